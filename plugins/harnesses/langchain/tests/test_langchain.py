"""The harness with the processes of its agents; the model is a scripted chat server."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from rl_harness.contracts import AgentTask, HarnessContext, NetworkPolicy, Sandbox, SandboxSpec
from rl_harness.errors import UsageError
from rl_harness.sandboxes.process import ProcessProvider
from rl_harness.testing import HarnessKit, ScriptedChat, ScriptedReply, harness_checks
from rl_harness_langchain.harness import LangChainHarness, LangChainOptions

pytestmark = pytest.mark.needs("langchain")

#: Names no address and no key.
AGENT = """
import os
from langchain_core.runnables import RunnableLambda
from langchain_openai import ChatOpenAI
from rl_harness_langchain import shell

model = ChatOpenAI(model=os.environ["RL_HARNESS_MODEL"], max_retries=0).bind_tools([shell])

async def act(text: str) -> str:
    reply = await model.ainvoke(text)
    for call in reply.tool_calls:
        await shell.ainvoke(call["args"])
        return await act(text)
    return reply

agent = RunnableLambda(act)
"""
CALL = ScriptedReply(tool_calls=(("shell", '{"command": "echo $((2 + 2))"}'),))
CHECKS = {
    check.__name__: check
    for check in harness_checks(
        HarnessKit(create=lambda: LangChainHarness(LangChainOptions(agent="mine")), script=["4"], acts=["4"])
    )
}


@pytest.fixture
def agent(tmp_path: Path) -> Callable[..., LangChainHarness]:
    def write(code: str, target: str = "mine:agent", **options: Any) -> LangChainHarness:
        (tmp_path / "mine.py").write_text(textwrap.dedent(code))
        return LangChainHarness(LangChainOptions(agent=target, path=tmp_path, **options))

    return write


@asynccontextmanager
async def sandbox(folder: Path) -> AsyncIterator[Sandbox]:
    provider = ProcessProvider(ProcessProvider.Options(state_dir=folder))
    try:
        yield await provider.create(SandboxSpec(network=NetworkPolicy.FULL))
    finally:
        await provider.close()


def context(chat: ScriptedChat | None = None, opened: Sandbox | None = None) -> HarnessContext:
    return HarnessContext(
        task=AgentTask(name="task", instruction="hello"),
        sandbox=opened,
        endpoint=chat.endpoint if chat else None,
        deadline=time.monotonic() + 60,
    )


@pytest.mark.parametrize("check", CHECKS)
async def test_conforms(agent, tmp_path: Path, check: str) -> None:
    kit = HarnessKit(
        create=lambda: agent(AGENT),
        script=[CALL, "4"],
        acts=[CALL, "4"],
        answer="4",
        sandbox=lambda: sandbox(tmp_path / "state"),
    )
    await CHECKS[check](kit)


async def test_a_configurable_model_is_the_runs_and_a_marked_factory_is_found(agent) -> None:
    code = """
        import rl_harness
        from langchain.chat_models import init_chat_model

        @rl_harness.agent
        async def make():
            return init_chat_model()
        """
    async with ScriptedChat(["yes"]) as chat:
        result = await agent(code, "mine").run(context(chat))
    assert result.answer == "yes", result.detail
    assert chat.requests[0]["model"] == chat.endpoint.model


async def test_what_can_be_no_agent_is_told_before_the_run(agent) -> None:
    with pytest.raises(UsageError, match="mine:agent cannot be called: it is of type int, and neither a Runnable"):
        await agent("agent = 3").preflight()
    with pytest.raises(UsageError, match=r"harness langchain: module 'mine' has no 'agnt'; did you mean 'agent'"):
        await agent("agent = 3", "mine:agnt").preflight()


TOOLS = """
    from langchain_core.runnables import RunnableLambda
    from rl_harness_langchain import read_file, shell, write_file

    def act(text: str):
        said = [write_file.invoke({"path": "a/b.txt", "content": "6\\n"}), shell.invoke({"command": "cat a/b.txt"})]
        said += [read_file.invoke({"path": "a/b.txt"}), read_file.invoke({"path": "absent"})]
        said += [shell.invoke({"command": "echo out; echo err >&2; exit 3"})]
        return said + [len(shell.invoke({"command": "seq 9999"}))]

    agent = RunnableLambda(act)
    """


async def test_tools_act_in_the_sandbox_and_tell_the_model_what_went_wrong(agent, tmp_path: Path) -> None:
    async with sandbox(tmp_path / "state") as opened:
        result = await agent(TOOLS).run(context(opened=opened))
    assert result.answer is not None, result.detail
    for part in (
        r'["a/b.txt is written.", "6\n", "6\n", "Error: ',
        r'"out\nerr\n\n[exit code 3]", 80',
    ):
        assert part in result.answer


async def test_tools_without_a_sandbox_say_so(agent) -> None:
    result = await agent(TOOLS).run(context())
    assert "there is no sandbox: the task has none" in result.detail


async def test_the_interpreter_needs_neither_rl_harness_nor_this_package(agent, tmp_path: Path) -> None:
    """Shadowed here by files on its path that cannot be imported: the worker brings the package along."""
    for name in ("rl_harness", "rl_harness_langchain"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not here')")
    result = await agent(TOOLS, python=sys.executable).run(context())
    assert "there is no sandbox" in result.detail
