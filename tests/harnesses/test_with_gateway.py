"""Harnesses against the real gateway, renderer and tokenizer; only the sampling is scripted."""

from __future__ import annotations

from pathlib import Path

import pytest
from rl_harness.contracts import Endpoint, GenerateRequest, Renderer
from rl_harness.errors import EngineError
from rl_harness.gateway import Gateway, TokenPolicy
from rl_harness.gateway.renderers.chatml import ChatMLRenderer
from rl_harness.records import Termination, sequence_of
from rl_harness.rollout.harnesses.python import PythonHarness, PythonOptions
from rl_harness.rollout.harnesses.shell import ShellHarness, ShellOptions
from rl_harness.testing.engine import ScriptedEngine, ScriptedOptions
from rl_harness.testing.tokenizer import write_tokenizer

#: None is told an address or a key, and each asks for a model of its own.
CLIENTS = """
from anthropic import Anthropic
from openai import OpenAI

def solve(task):
    said = [{"role": "user", "content": task.instruction}]
    first = OpenAI().chat.completions.create(model="gpt-4o", messages=said).choices[0].message.content
    second = OpenAI().responses.create(model="gpt-5", input="And now?").output_text
    third = Anthropic().messages.create(model="claude", max_tokens=20, messages=said + said).content[0].text
    return f"{first} {second} {third}"
"""


class Served:
    """A gateway with one open session."""

    def __init__(self, gateway: Gateway, engine: ScriptedEngine, renderer: Renderer) -> None:
        self.gateway = gateway
        self.engine = engine
        self.renderer = renderer

    def open(self, max_turns: int | None = None) -> Endpoint:
        session = self.gateway.open_session("episode", policy="policy", max_turns=max_turns)
        return Endpoint(base_url=self.gateway.base_url, api_key=session.api_key, model="policy")

    async def close(self):
        return await self.gateway.close_session("episode")


@pytest.fixture
async def serve(tmp_path: Path):
    engine = ScriptedEngine(ScriptedOptions(context_length=4000))
    folder = write_tokenizer(tmp_path / "model")
    await engine.start(str(folder))
    renderer = ChatMLRenderer(ChatMLRenderer.Options())
    renderer.load(folder)
    async with Gateway({"policy": TokenPolicy("policy", engine, renderer)}) as gateway:
        yield Served(gateway, engine, renderer)


def say(serve: Served, *replies: str) -> None:
    left = list(replies)
    serve.engine.reply = lambda request, prompt: left.pop(0)


async def test_a_conversation_is_one_chain_of_exact_turns(serve, make_context, sandbox):
    say(serve, "```bash\necho 6\n```", "Look:\n\n```bash\necho 36 > answer.txt\n```\n", "It is done.")
    result = await ShellHarness(ShellOptions()).run(make_context(serve.open(), sandbox))
    turns = await serve.close()
    assert (result.termination, result.answer) == (Termination.ANSWER, "It is done.")
    assert await sandbox.read_file("/app/answer.txt") == b"36\n"
    assert [turn.parent for turn in turns] == [None, turns[0].id, turns[1].id]
    by_id = {turn.id: turn for turn in turns}
    whole = serve.renderer.decode(sequence_of(turns[2], by_id.__getitem__))
    assert "<|im_start|>user\nOutput:\n6<|im_end|>" in whole
    assert whole.count("<|im_start|>assistant") == 3


async def test_tool_calls_and_results_are_one_chain_too(serve, make_context, sandbox):
    call = '<tool_call>\n{{"name": "shell", "arguments": {{"command": "{}"}}}}\n</tool_call>'
    say(serve, call.format("echo 6"), "Now this. " + call.format("echo 36 > answer.txt"), "36")
    result = await ShellHarness(ShellOptions(format="tools")).run(make_context(serve.open(), sandbox))
    turns = await serve.close()
    assert (result.termination, result.answer) == (Termination.ANSWER, "36")
    assert await sandbox.read_file("/app/answer.txt") == b"36\n"
    assert [turn.parent for turn in turns] == [None, turns[0].id, turns[1].id]


async def test_the_gateways_limits_are_the_agents(serve, make_context, sandbox):
    serve.engine.reply = lambda request, prompt: "```bash\necho again\n```"
    result = await ShellHarness(ShellOptions()).run(make_context(serve.open(max_turns=2), sandbox))
    assert result.termination == Termination.TURN_LIMIT
    assert len(await serve.close()) == 2
    context = make_context(serve.open(), sandbox, instruction="x" * 5000)
    assert (await ShellHarness(ShellOptions()).run(context)).termination == Termination.TOKEN_LIMIT


async def test_a_failing_engine_is_not_the_agents_failure(serve, make_context, sandbox):
    def fail(request: GenerateRequest, prompt: str) -> str:
        raise EngineError("out of memory")

    serve.engine.reply = fail
    with pytest.raises(EngineError, match="out of memory"):
        await ShellHarness(ShellOptions()).run(make_context(serve.open(), sandbox))


@pytest.mark.needs("openai")
async def test_a_python_agent_with_an_openai_client(serve, make_context, sandbox, tmp_path):
    (tmp_path / "agent.py").write_text(
        """
from openai import AsyncOpenAI

async def solve(task):
    client, messages = AsyncOpenAI(), [{"role": "user", "content": task.instruction}]
    while True:
        reply = (await client.chat.completions.create(model=task.model, messages=messages)).choices[0].message
        messages.append(reply)
        done = await task.sandbox.aexec(reply.content)
        messages.append({"role": "user", "content": done.text})
"""
    )
    say(serve, "echo 6 > n", "cat n")
    harness = PythonHarness(PythonOptions(target="agent:solve", path=tmp_path))
    result = await harness.run(make_context(serve.open(max_turns=2), sandbox))
    turns = await serve.close()
    assert result.termination == Termination.TURN_LIMIT, result.detail
    assert [turn.parent for turn in turns] == [None, turns[0].id]
    assert await sandbox.read_file("/app/n") == b"6\n"


@pytest.mark.needs("openai")
async def test_clients_of_every_protocol_find_the_session_in_the_environment(serve, make_context, tmp_path):
    (tmp_path / "agent.py").write_text(CLIENTS)
    serve.engine.reply = lambda request, prompt: "well"
    harness = PythonHarness(PythonOptions(target="agent:solve", path=tmp_path))
    result = await harness.run(make_context(serve.open()))
    assert result.answer == "well well well", result.detail
    assert len(await serve.close()) == 3
