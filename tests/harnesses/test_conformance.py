"""The core's own harnesses pass the checks that plugin authors run, and the checks find what they are for."""

from __future__ import annotations

from pathlib import Path

import pytest
from rl_harness.contracts import API, Harness, HarnessCapabilities, HarnessContext, HarnessResult, Options
from rl_harness.records.episode import Termination
from rl_harness.rollout.harnesses.chat import ChatHarness, ChatOptions
from rl_harness.rollout.harnesses.nop import NopHarness
from rl_harness.rollout.harnesses.oracle import OracleHarness
from rl_harness.rollout.harnesses.python import PythonHarness, PythonOptions
from rl_harness.rollout.harnesses.shell import ShellHarness, ShellOptions
from rl_harness.testing.chat_server import ScriptedReply
from rl_harness.testing.harness import Check, HarnessKit, check_engine_failure, check_model_calls, harness_checks

AGENT = """
import json
from urllib.request import Request, urlopen

def solve(task):
    body = {"model": task.model, "messages": [{"role": "user", "content": task.instruction}]}
    headers = {"Authorization": f"Bearer {task.api_key}", "Content-Type": "application/json"}
    reply = json.load(urlopen(Request(task.base_url + "/chat/completions", json.dumps(body).encode(), headers)))
    if task.sandbox is not None:
        task.sandbox.exec("true")
    return reply["choices"][0]["message"]["content"]
"""
ORACLE = pytest.param("oracle", marks=pytest.mark.needs("userns"))
CHECK_NAMES = [
    "check_declaration",
    "check_preflight",
    "check_ends_by_itself",
    "check_concurrent_runs",
    "check_model_calls",
    "check_engine_failure",
    "check_turn_limit",
    "check_deadline",
    "check_cancellation",
    "check_dead_sandbox",
]


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory, new_sandbox, new_isolated_sandbox) -> dict[str, HarnessKit]:
    folder: Path = tmp_path_factory.mktemp("kits")
    (folder / "agent.py").write_text(AGENT)
    (folder / "solve.sh").write_text("echo 4\n")
    blocks = ["```bash\necho $((2 + 2))\n```", "4"]
    calls = [ScriptedReply(tool_calls=(("shell", '{"command": "echo $((2 + 2))"}'),)), "4"]
    return {
        "nop": HarnessKit(create=lambda: NopHarness(Options())),
        "oracle": HarnessKit(
            create=lambda: OracleHarness(Options()), solution=folder, sandbox=new_isolated_sandbox, answer="4"
        ),
        "chat": HarnessKit(create=lambda: ChatHarness(ChatOptions()), script=["4"], answer="4"),
        "shell": HarnessKit(
            create=lambda: ShellHarness(ShellOptions()), script=blocks, acts=blocks, answer="4", sandbox=new_sandbox
        ),
        "tools": HarnessKit(
            create=lambda: ShellHarness(ShellOptions(format="tools")),
            script=calls,
            acts=calls,
            answer="4",
            sandbox=new_sandbox,
        ),
        "python": HarnessKit(
            create=lambda: PythonHarness(PythonOptions(target="agent:solve", path=folder)),
            script=["4"],
            acts=["4"],
            answer="4",
            sandbox=new_sandbox,
        ),
    }


@pytest.mark.parametrize("name", ["nop", ORACLE, "chat", "shell", "tools", "python"])
@pytest.mark.parametrize("check", CHECK_NAMES)
async def test_conforms(kits, name, check):
    applicable: dict[str, Check] = {found.__name__: found for found in harness_checks(kits[name])}
    assert set(applicable) <= set(CHECK_NAMES)
    if check in applicable:
        await applicable[check](kits[name])


class Careless(Harness):
    """Answers without a model, whatever happens."""

    api = API

    @property
    def capabilities(self) -> HarnessCapabilities:
        return HarnessCapabilities(needs_sandbox=False)

    async def run(self, context: HarnessContext) -> HarnessResult:
        return HarnessResult(termination=Termination.ANSWER, answer="4")


async def test_the_checks_find_a_careless_harness():
    kit = HarnessKit(create=lambda: Careless(Options()), script=["4"])
    with pytest.raises(AssertionError, match="never called its model"):
        await check_model_calls(kit)
    with pytest.raises(AssertionError, match="failure of the engine for an answer"):
        await check_engine_failure(kit)
