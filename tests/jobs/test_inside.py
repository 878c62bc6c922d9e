"""An agent that runs inside a sandbox without network is evaluated from the command line, its model calls relayed."""

from __future__ import annotations

from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "inside_harness.py"


@pytest.mark.needs("userns")
def test_an_agent_inside_reaches_its_model_without_a_network(world) -> None:
    task = world.directory / "tasks" / "colour"
    (task / "environment" / "workspace").mkdir(parents=True)
    (task / "environment" / "workspace" / "readme.txt").write_text("nothing\n")
    (task / "instruction.md").write_text("Which colour is the sky?")
    (task / "task.toml").write_text('schema_version = "1.4"\n\n[environment]\nnetwork_mode = "no-network"\n')
    (task / "tests").mkdir()
    (task / "tests" / "test.sh").write_text(
        "grep -qx blue /app/answer.txt && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n"
    )
    rule = "engine.rules=[{match = 'Which colour', reply = 'blue'}]"
    arguments = ("run", "tasks/colour", *world.scripted, "-p", str(EXAMPLE), "--harness", "inside", "-o", rule)
    report = world.json(*arguments, "--sandbox", "local")
    summary = report["evaluations"][0]["summary"]
    assert (summary["scored"], summary["passed"], summary["unscored"]) == (1, 1, {}), world.stderr


@pytest.mark.needs("userns")
def test_an_agent_whose_model_cannot_take_what_it_says_ran_into_a_limit(world) -> None:
    """Many say so, and end as if all were well."""
    (world.directory / "talkative.py").write_text(
        EXAMPLE.read_text().replace('"content": sys.argv[1]', '"content": sys.argv[1] * 1000')
    )
    task = world.question("q", "4")
    options = (*world.scripted, "-o", "engine.context_length=1000")
    report = world.json("run", str(task), *options, "-p", "talkative.py", "--harness", "inside")
    summary = report["evaluations"][0]["summary"]
    assert summary["terminations"] == {"token_limit": 1}, summary


SHOWING = """
from pathlib import Path
from rl_harness.contracts import HarnessCapabilities, HarnessResult, Harness, HostMount
from rl_harness.hookspecs import Extension, hookimpl
from rl_harness.records import Termination


@hookimpl
def rl_harness_harnesses():
    return [Extension("showing", f"{__name__}:Showing", "reads what it is shown")]


class Showing(Harness):
    api = 1
    capabilities = HarnessCapabilities(protocols=frozenset())
    mounts = (HostMount(source=Path("shown").absolute(), target="/opt/shown"),)
    told = None

    def adapt(self, sandbox):
        self.told = sandbox

    async def run(self, context):
        read = await context.sandbox.exec("cat /opt/shown/word > answer.txt")
        assert self.told.mounts
        return HarnessResult(termination=Termination.ANSWER, detail=read.stderr.decode())
"""


@pytest.mark.needs("userns")
def test_a_harness_shows_its_agent_a_directory_where_the_sandbox_can(world) -> None:
    files = {
        "showing.py": SHOWING,
        "shown/word": "blue\n",
        "task/instruction.md": "Which colour?",
        "task/task.toml": 'schema_version = "1.4"\n\n[environment]\nnetwork_mode = "no-network"\n',
        "task/tests/test.sh": "grep -qx blue /app/answer.txt && reward=1 || reward=0\n"
        "echo $reward > /logs/verifier/reward.txt\n",
    }
    for name, text in files.items():
        path = world.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    arguments = ("run", "task", "-p", "showing.py", "--harness", "showing")
    report = world.json(*arguments, "--sandbox", "local")
    assert report["evaluations"][0]["summary"]["passed"] == 1, world.stderr
    world.run(*arguments, "--sandbox", "process", expect=2)
    assert "shows its agent directories of this machine, which sandbox 'process' cannot" in world.stderr
