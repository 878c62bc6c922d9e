"""Several answers to one request: turns of the same prompt, told apart by their index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest
from rl_harness.errors import EngineError
from rl_harness.records import SamplingParams

ASK: Any = {"model": "m", "messages": [{"role": "user", "content": "q"}]}


async def test_whole(bench: Any, replies: Callable[..., None]) -> None:
    replies("one", "two two", "three")
    async with bench.client() as client:
        reply = await client.chat.completions.create(**ASK, n=3)
    assert [(choice.index, choice.message.content) for choice in reply.choices] == [
        (0, "one"),
        (1, "two two"),
        (2, "three"),
    ]
    turns = bench.session.turns
    assert len({turn.id for turn in turns}) == 3
    assert len({turn.prompt_tokens for turn in turns}) == 1
    assert reply.usage.prompt_tokens == turns[0].prompt_tokens
    assert reply.usage.completion_tokens == sum(turn.completion_tokens for turn in turns)


async def test_streamed(bench: Any, replies: Callable[..., None]) -> None:
    replies("one", "two two two")
    texts = ["", ""]
    roles: list[int] = []
    ends: list[int] = []
    async with bench.client() as client:
        stream = await client.chat.completions.create(
            **ASK, n=2, stream=True, logprobs=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles += [choice.index] * (choice.delta.role == "assistant")
            ends += [choice.index] * (choice.finish_reason == "stop")
    assert (texts, roles, sorted(ends)) == (["one", "two two two"], [0, 1], [0, 1])
    assert chunks[-1].usage.completion_tokens == sum(turn.completion_tokens for turn in bench.session.turns)
    scored = sum(len(c.logprobs.content) for chunk in chunks for c in chunk.choices if c.logprobs)
    assert scored == chunks[-1].usage.completion_tokens


async def test_a_conversation_goes_on_from_the_one_that_was_taken(bench: Any, replies: Callable[..., None]) -> None:
    replies("one", "two", "on")
    async with bench.client() as client:
        reply = await client.chat.completions.create(**ASK, n=2)
        more = [reply.choices[1].message, {"role": "user", "content": "r"}]
        await client.chat.completions.create(model="m", messages=ASK["messages"] + more)
    turns = bench.session.turns
    assert turns[2].parent == next(turn.id for turn in turns if turn.message.content == "two")


async def test_each_draws_its_own_noise(bench: Any) -> None:
    for name, sampling in (("a", SamplingParams(seed=7)), ("b", SamplingParams())):
        session = bench.open(name, sampling=sampling)
        async with bench.client(session) as client:
            await client.chat.completions.create(**ASK, n=3, seed=5)
        assert len({turn.sampling.seed for turn in session.turns}) == 3


async def test_one_that_fails_fails_the_request(bench: Any) -> None:
    bench.engine.reply = lambda request, prompt: "a long reply"
    bench.engine.faults = [EngineError("it broke")]
    async with bench.client() as client:
        with pytest.raises(openai.InternalServerError, match="it broke"):
            await client.chat.completions.create(**ASK, n=4)
    assert bench.engine.running == 0


async def test_they_count_against_the_limit(bench: Any) -> None:
    session = bench.open("t", max_turns=3)
    async with bench.client(session) as client:
        await client.chat.completions.create(**ASK, n=2)
        with pytest.raises(openai.PermissionDeniedError):
            await client.chat.completions.create(**ASK, n=2)
        await client.chat.completions.create(**ASK)
    assert len(session.turns) == 3
