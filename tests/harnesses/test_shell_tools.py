from __future__ import annotations

import json

import pytest
from rl_harness.plugins import load_registry
from rl_harness.records.episode import Termination
from rl_harness.records.turn import Message
from rl_harness.rollout.harnesses.shell import ShellHarness, ShellOptions
from rl_harness.tasks import open_benchmark
from rl_harness.testing.chat_server import ScriptedChat, ScriptedReply


def shell(command: str) -> tuple[str, str]:
    return ("shell", json.dumps({"command": command}))


def harness() -> ShellHarness:
    return ShellHarness(ShellOptions(format="tools"))


async def test_calls_are_run_in_order_and_answered_by_id(make_context, sandbox):
    calls = ScriptedReply(text="two at once", tool_calls=(shell("echo 1 > n"), shell("cat n")))
    async with ScriptedChat([calls, "It is 1."]) as chat:
        result = await harness().run(make_context(chat.endpoint, sandbox))
    assert (result.termination, result.answer) == (Termination.ANSWER, "It is 1.")
    assert chat.requests[0]["tools"][0]["function"]["name"] == "shell"
    assistant, first, second = chat.requests[1]["messages"][-3:]
    assert assistant["content"] == "two at once"
    assert [call["id"] for call in assistant["tool_calls"]] == ["call_1_0", "call_1_1"]
    assert first == {"role": "tool", "tool_call_id": "call_1_0", "content": "Output:\n(no output)"}
    assert second == {"role": "tool", "tool_call_id": "call_1_1", "content": "Output:\n1"}


async def test_broken_calls_are_corrected_each_by_its_id(make_context, sandbox):
    calls = ScriptedReply(tool_calls=(("python", "{}"), ("shell", "{not json"), ("shell", '{"cmd": "ls"}')))
    async with ScriptedChat([calls, "sorry"]) as chat:
        await harness().run(make_context(chat.endpoint, sandbox))
    results = chat.requests[1]["messages"][-3:]
    assert [message["tool_call_id"] for message in results] == ["call_1_0", "call_1_1", "call_1_2"]
    assert "no tool 'python'" in results[0]["content"]
    assert all("the arguments must be" in message["content"] for message in results[1:])


async def test_ends(make_context, sandbox):
    for reply, termination in [
        (ScriptedReply(text=""), Termination.NO_ACTION),
        (ScriptedReply(text="cut", finish_reason="length"), Termination.TOKEN_LIMIT),
        (ScriptedReply(text="42"), Termination.ANSWER),
    ]:
        async with ScriptedChat([reply]) as chat:
            assert (await harness().run(make_context(chat.endpoint, sandbox))).termination == termination


async def test_examples_with_blocks_are_shown_as_calls(make_context, sandbox):
    examples = (
        Message(role="user", content="Square it."),
        Message(role="assistant", content="Look first.\n```bash\ncat input.txt\n```"),
        Message(role="user", content="Output:\n6"),
        Message(role="assistant", content="```bash\necho 36 > answer.txt\n```"),
    )
    async with ScriptedChat(["done"]) as chat:
        await harness().run(make_context(chat.endpoint, sandbox, system="S", examples=examples))
    roles = [message["role"] for message in chat.requests[0]["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool", "user"]
    look, seen = chat.requests[0]["messages"][2:4]
    assert look["content"] == "Look first."
    assert json.loads(look["tool_calls"][0]["function"]["arguments"]) == {"command": "cat input.txt"}
    assert seen == {"role": "tool", "tool_call_id": look["tool_calls"][0]["id"], "content": "Output:\n6"}
    assert chat.requests[0]["messages"][-1]["content"] == "Do it."


@pytest.mark.parametrize("turns", [1, 2])
async def test_an_agent_with_a_tool_is_not_told_to_write_blocks(make_context, sandbox, turns):
    prompts = open_benchmark(load_registry(), "shell-arithmetic", options={"turns": turns}).prompts
    async with ScriptedChat(["done"]) as chat:
        await harness().run(make_context(chat.endpoint, sandbox, system=prompts.system, examples=prompts.examples))
    messages = chat.requests[0]["messages"]
    assert "exactly one call of the `shell` tool" in messages[0]["content"]
    assert not any("```" in message["content"] or "block" in message["content"] for message in messages)


def test_jobs_leave_it_to_the_harness_how_commands_are_written():
    """An agent that was given a tool was told to write blocks; nor was it told its limits, which only the harness's own
    prompt states."""
    prompts = open_benchmark(load_registry(), "shell-basics").prompts
    assert (prompts.system, prompts.examples) == (None, ())
