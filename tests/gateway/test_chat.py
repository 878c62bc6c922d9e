"""Chat completions as clients see them, through the real OpenAI client where it can say it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import openai
import pytest
from rl_harness.contracts import GenerateRequest, TokenChunk
from rl_harness.errors import EngineError
from rl_harness.gateway import Gateway, TokenPolicy
from rl_harness.records import SamplingParams, ids

TOOL = {
    "type": "function",
    "function": {"name": "run", "parameters": {"type": "object", "additionalProperties": False}},
}
CALL = '<tool_call>\n{"name": "run", "arguments": {"command": "ls"}}\n</tool_call>'


async def test_a_conversation_not_streamed(bench: Any, replies: Callable[..., None]) -> None:
    replies("the héllo", "again")
    client = bench.client()
    messages: Any = [{"role": "system", "content": "Sys"}, {"role": "user", "content": "hi"}]
    first = await client.chat.completions.create(model="any", messages=messages)
    assert first.choices[0].message.content == "the héllo"
    assert first.choices[0].finish_reason == "stop"
    assert first.model == "m"
    messages += [first.choices[0].message, {"role": "user", "content": "more"}]
    second = await client.chat.completions.create(model="m", messages=messages)
    one, two = bench.session.turns
    assert second.usage is not None
    assert (second.usage.prompt_tokens, second.usage.completion_tokens) == (two.prompt_tokens, two.completion_tokens)
    assert (two.parent, two.shared) == (one.id, one.prompt_tokens + one.completion_tokens)
    sent = [request.prompt.tolist() for request in bench.engine.requests]
    assert sent[1][: two.shared] == sent[0] + one.completion.tolist()
    assert bench.prompt(two).endswith("the héllo<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n")
    await client.close()


async def test_a_turn_holds_everything(bench: Any) -> None:
    await bench.engine.prepare(_Source(3))
    await bench.engine.commit(3)
    await bench.ask("q", max_tokens=2)
    (turn,) = bench.session.turns
    assert (turn.id, turn.session, turn.index, turn.policy, turn.parent, turn.shared) == ("s/0", "s", 0, "m", None, 0)
    assert bench.renderer.decode(turn.completion) == "ok"
    assert turn.finish_reason == "length"
    assert turn.versions.tolist() == [3, 3]
    assert turn.logps.tolist() == [-(token % 7 + 1) / 8 for token in turn.completion.tolist()]
    assert turn.exact
    assert (turn.prompt_tokens, turn.completion_tokens) == (len(turn.context), 2)
    assert turn.sampling.max_tokens == 2
    assert turn.sampling.stop_token_ids == bench.renderer.end_token_ids
    assert turn.message.content == "ok"
    assert turn.first_token_seconds is not None
    assert 0 < turn.first_token_seconds <= turn.seconds
    assert turn.started_at > 1e9


async def test_versions_are_those_that_sampled(bench: Any, replies: Callable[..., None]) -> None:
    """Fault 10: a commit in the middle of a turn labels only what comes after it."""
    replies("0123456789")
    bench.engine.gate.clear()
    asking = asyncio.create_task(bench.ask("q"))
    await until(lambda: bench.engine.waiting)
    await bench.engine.prepare(_Source(1))
    await bench.engine.commit(1)
    bench.engine.gate.set()
    await asking
    assert bench.session.turns[0].versions.tolist() == [0] * 4 + [1] * 7


async def test_each_token_is_streamed_as_it_comes(bench: Any, replies: Callable[..., None]) -> None:
    """Fault 20: the first chunk arrives while the engine has not yet made the second."""
    replies("abcd then the rest")
    bench.engine.gate.clear()
    client = bench.client()
    stream = await client.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": "q"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = aiter(stream)
    assert (await anext(chunks)).choices[0].delta.role == "assistant"
    assert (await anext(chunks)).choices[0].delta.content == "abcd"
    bench.engine.gate.set()
    rest = [chunk async for chunk in chunks]
    assert "".join(c.choices[0].delta.content or "" for c in rest if c.choices) == " then the rest"
    assert [c.choices[0].finish_reason for c in rest if c.choices][-1] == "stop"
    (turn,) = bench.session.turns
    assert rest[-1].choices == []
    assert rest[-1].usage.prompt_tokens == turn.prompt_tokens
    assert rest[-1].usage.completion_tokens == turn.completion_tokens
    await client.close()


async def test_the_turn_is_recorded_before_its_client_knows(bench: Any) -> None:
    """A client that continues at once finds the turn it continues."""
    async with bench.post({"messages": [{"role": "user", "content": "q"}], "stream": True}) as response:
        async for line in response.content:
            if b'"finish_reason":"stop"' in line:
                assert len(bench.session.turns) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_both_ways(bench: Any, replies: Callable[..., None], stream: bool) -> None:
    """Fault 8: a call is one whole delta, recorded as the client got it."""
    replies(f"I look.\n{CALL}\n{CALL}", "done")
    client = bench.client()
    messages: Any = [{"role": "user", "content": "q"}]
    if stream:
        async with client.chat.completions.stream(model="m", messages=messages, tools=[TOOL]) as events:
            chunks = [event.chunk async for event in events if event.type == "chunk"]
            reply = (await events.get_final_completion()).choices[0]
        deltas = [call for c in chunks if c.choices for call in c.choices[0].delta.tool_calls or ()]
        assert [(delta.index, delta.function.arguments) for delta in deltas] == [
            (i, '{"command": "ls"}') for i in (0, 1)
        ]
    else:
        reply = (await client.chat.completions.create(model="m", messages=messages, tools=[TOOL])).choices[0]
    assert reply.finish_reason == "tool_calls"
    assert reply.message.content == "I look."
    calls = reply.message.tool_calls
    assert [call.id for call in calls] == [call.id for call in bench.session.turns[0].message.tool_calls]
    # Back as an agent sends it: other spacing, other ids, null content where there was none.
    echoed = [
        {"id": f"x{n}", "type": "function", "function": {"name": "run", "arguments": '{"command":"ls"}'}}
        for n in range(len(calls))
    ]
    messages += [{"role": "assistant", "content": "I look. ", "tool_calls": echoed}]
    messages += [
        {"role": "tool", "tool_call_id": f"x{n}", "content": [{"type": "text", "text": "out"}]} for n in (0, 1)
    ]
    last = await client.chat.completions.create(model="m", messages=messages, tools=[TOOL])
    assert last.choices[0].message.content == "done"
    one, two = bench.session.turns
    assert (two.parent, two.shared) == (one.id, one.prompt_tokens + one.completion_tokens)
    assert bench.prompt(two).count(f"I look.\n{CALL}\n{CALL}<|im_end|>\n<|im_start|>tool\nout") == 1
    await client.close()


async def test_a_malformed_call_is_text(bench: Any, replies: Callable[..., None]) -> None:
    replies("<tool_call>{broken</tool_call>")
    message = await bench.ask("q", tools=[TOOL])
    assert message["content"] == "<tool_call>{broken</tool_call>"
    assert "tool_calls" not in message
    assert bench.session.turns[0].finish_reason == "stop"


async def test_tool_choice(bench: Any, replies: Callable[..., None]) -> None:
    replies(CALL, CALL)
    assert (await bench.ask("q", tools=[TOOL], tool_choice="auto"))["tool_calls"]
    assert (await bench.ask("q", tools=[TOOL], tool_choice="none"))["content"] == CALL
    missing = {"type": "function", "function": {"name": "walk"}}
    for choice, tools in (("required", []), (missing, [TOOL]), ("sometimes", [TOOL]), ({}, [TOOL])):
        await expect(bench, 400, "tool_choice", tools=tools, tool_choice=choice)


async def test_a_call_that_is_demanded_is_begun_for_the_model(bench: Any, replies: Callable[..., None]) -> None:
    """Its beginning is context, not sampled; the model goes on from there, and later turns from its ids."""
    replies('{"name": "run", "arguments": {"a": 1}}</tool_call>', ' {"a": 2}}\n</tool_call>', "text only STOP")
    first = await bench.ask("q", tools=[TOOL], tool_choice="required")
    assert first["tool_calls"][0]["function"] == {"name": "run", "arguments": '{"a": 1}'}
    named = {"type": "function", "function": {"name": "run"}}
    result = {"role": "tool", "content": "out", "tool_call_id": "x"}
    second = await bench.ask("q", first, result, tools=[TOOL], tool_choice=named)
    assert second["tool_calls"][0]["function"]["arguments"] == '{"a": 2}'
    one, two = bench.session.turns
    assert bench.prompt(one).endswith("<|im_start|>assistant\n<tool_call>\n")
    assert bench.renderer.decode(one.completion) == '{"name": "run", "arguments": {"a": 1}}</tool_call><|im_end|>'
    assert (two.parent, two.shared) == (one.id, one.prompt_tokens + one.completion_tokens)
    assert bench.prompt(two).endswith('<|im_start|>assistant\n<tool_call>\n{"name": "run", "arguments":')
    third = await bench.ask("r", tools=[TOOL], tool_choice="required", stop="STOP")
    assert third["content"] == "<tool_call>\ntext only "
    assert bench.renderer.decode(bench.session.turns[2].completion) == "text only STOP"


async def test_reasoning_has_its_own_field(bench: Any, replies: Callable[..., None]) -> None:
    replies("<think>hm</think>4", "<think>hm</think>4")
    message = await bench.ask("q")
    assert (message["content"], message["reasoning_content"]) == ("4", "hm")
    chunks = await events(bench, {"messages": [{"role": "user", "content": "r"}], "stream": True})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "hm"
    assert "".join(d.get("content", "") for d in deltas) == "4"


async def test_a_stop_string(bench: Any, replies: Callable[..., None]) -> None:
    """Fault 12: a completion that ends in a stop string, not in an end token, goes on like any other."""
    replies("one STOP two", "x")
    message = await bench.ask("q", stop=["STOP", "zzz"])
    assert message["content"] == "one "
    await bench.ask("q", {"role": "assistant", "content": "one"}, "r", stop="STOP")
    one, two = bench.session.turns
    assert one.finish_reason == "stop"
    assert bench.renderer.decode(one.completion) == "one STOP"
    assert two.parent == one.id
    assert "one STOP<|im_end|>\n<|im_start|>user\nr" in bench.prompt(two)


async def test_an_engine_that_overshoots_a_stop_string(bench: Any) -> None:
    """What came after the stop string is neither text nor recorded."""
    folder = bench.renderer._folder
    tokens = folder.encode("a#bcd")
    bench.engine.generate = _overshooting(tokens)
    message = await bench.ask("q", stop="#")
    assert message["content"] == "a"
    (turn,) = bench.session.turns
    assert bench.renderer.decode(turn.completion) == "a#"
    assert len(turn.logps) == len(turn.versions) == 2


@pytest.mark.parametrize("tokens", [[260], [260, 260], [260] * 5])
async def test_nothing_but_end_tokens(bench: Any, replies: Callable[..., None], tokens: list[int]) -> None:
    """Fault 12, the other half."""
    replies(tokens, "x")
    message = await bench.ask("q")
    assert message["content"] == ""
    await bench.ask("q", {"role": "assistant", "content": None}, "r")
    one, two = bench.session.turns
    assert one.completion.tolist() == [260]
    assert two.parent == one.id


async def test_logprobs(bench: Any, replies: Callable[..., None]) -> None:
    replies("aé", "aé")
    client = bench.client()
    messages: Any = [{"role": "user", "content": "q"}]
    asked: Any = {"model": "m", "messages": messages, "logprobs": True, "top_logprobs": 1}
    reply = await client.chat.completions.create(**asked)
    content = reply.choices[0].logprobs.content
    turn = bench.session.turns[0]
    assert [entry.logprob for entry in content] == turn.logps.tolist()
    assert (content[0].token, content[0].bytes, content[1].bytes) == ("a", [97], None)
    assert content[0].top_logprobs[0].logprob == content[0].logprob
    streamed = [
        entry.logprob
        async for chunk in await client.chat.completions.create(**asked, stream=True)
        if chunk.choices and chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == turn.logps.tolist()
    await client.close()


async def test_models_lists_the_sessions_policy(bench: Any) -> None:
    client = bench.client()
    assert [model.id async for model in client.models.list()] == ["m"]
    await client.close()


async def test_content_in_parts_and_null(bench: Any) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]
    developer = {"role": "developer", "content": parts}
    silent = {"role": "assistant", "content": None}
    await bench.ask(developer, "q", silent, {"role": "user", "content": [{"type": "text", "text": "r"}]})
    (turn,) = bench.session.turns
    assert bench.prompt(turn).startswith("<|im_start|>system\na\nb<|im_end|>\n<|im_start|>user\nq<|im_end|>\n")


async def test_the_context_is_full(bench: Any, folder: Any) -> None:
    engine = type(bench.engine)(bench.engine.Options(replies=("0123456789",), context_length=40))
    await engine.start(str(folder))
    async with Gateway({"m": TokenPolicy("m", engine, bench.renderer)}) as gateway:
        session = gateway.open_session("t", policy="m", sampling=SamplingParams())
        client = openai.AsyncOpenAI(base_url=gateway.base_url, api_key=session.api_key, max_retries=0)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x" * 60}])
        assert caught.value.code == "context_length_exceeded"
        assert "maximum context length is 40 tokens" in str(caught.value)
        assert session.too_long is not None
        reply = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x" * 15}], max_tokens=1000
        )
        assert session.too_long is None
        # What fits is given: the limit is the room there is.
        assert reply.choices[0].finish_reason == "length"
        (turn,) = session.turns
        assert turn.prompt_tokens + turn.completion_tokens == 40
        await client.close()


async def test_a_long_conversation_does_not_hold_up_others(bench: Any) -> None:
    """Tokenising it takes longer than a hundred small calls; they are answered meanwhile."""
    order: list[str] = []

    async def long() -> None:
        await bench.ask("the words of a long file " * 30_000, session=bench.open("long"))
        order.append("long")

    asking = asyncio.create_task(long())
    while not asking.done():
        await bench.ask("q", session=bench.session)
        order.append("short")
    await asking
    assert order.count("short") >= 3


async def test_what_cannot_fit_is_not_even_tokenised(bench: Any, folder: Any) -> None:
    engine = type(bench.engine)(bench.engine.Options(replies=("x",), context_length=40))
    await engine.start(str(folder))
    bench.renderer.render = None
    async with Gateway({"m": TokenPolicy("m", engine, bench.renderer)}) as gateway:
        session = gateway.open_session("t", policy="m")
        body = {"messages": [{"role": "user", "content": "x" * 20_000}]}
        key = {"authorization": f"Bearer {session.api_key}"}
        async with bench.http.post(f"{gateway.base_url}/chat/completions", json=body, headers=key) as response:
            assert (await response.json())["error"]["code"] == "context_length_exceeded"


async def test_the_session_decides_the_distribution(bench: Any) -> None:
    session = bench.open("t", sampling=SamplingParams(temperature=0.7, max_tokens=3, stop=("A",)))
    body = {
        "messages": [{"role": "user", "content": "q"}],
        "temperature": 0.1,
        "top_p": 1.0,
        "max_completion_tokens": 100,
        "stop": "B",
        "seed": -5,
    }
    async with bench.post(body, session=session) as response:
        assert response.headers["x-rl-harness-overridden"] == "temperature, max_tokens"
        assert response.status == 200
    (turn,) = session.turns
    assert (turn.sampling.temperature, turn.sampling.max_tokens, turn.sampling.stop) == (0.7, 3, ("A", "B"))
    assert turn.sampling.seed is not None
    free = bench.open("u", sampling=SamplingParams(temperature=0.7, max_tokens=3), fixed=frozenset())
    await bench.ask("q", session=free, temperature=0.1, max_tokens=2, top_k=-1)
    assert (free.turns[0].sampling.temperature, free.turns[0].sampling.max_tokens) == (0.1, 2)


async def test_seeds_of_a_session(bench: Any) -> None:
    """Each call draws its own noise, and the same again in another session with the same seed."""
    seeds = []
    for name in "ab":
        session = bench.open(name, sampling=SamplingParams(seed=7))
        for message in ("q", "q", "r"):
            await bench.ask(message, session=session, seed=1)
        seeds.append([turn.sampling.seed for turn in session.turns])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 3


async def test_a_failing_engine_leaves_nothing(bench: Any) -> None:
    """Fault 11: no incomplete turn; before the first token with a status, after it as an event."""
    bench.engine.reply = lambda request, prompt: "a long reply"
    bench.engine.faults = [EngineError("it broke")]
    await expect(bench, 502, "it broke")
    bench.engine.faults = [EngineError("it broke")]
    seen = await events(bench, {"messages": [{"role": "user", "content": "a long question"}], "stream": True})
    assert seen[-1]["error"]["type"] == "engine_error"
    assert bench.session.turns == []
    assert bench.session.engine_error == "it broke"
    bench.engine.reply = lambda request, prompt: []
    await bench.ask("q")
    assert bench.session.turns[0].completion_tokens == 0


@pytest.mark.parametrize("bad", ["nan", "short", "unfinished"])
async def test_an_engine_that_breaks_its_contract(bench: Any, bad: str) -> None:
    """Fault 9: a log-prob that is missing or not finite shifts nothing: the call fails."""
    bench.engine.generate = _broken(bad)
    await expect(bench, 502, "engine")
    assert bench.session.turns == []


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"n": 0}, "n:"),
        ({"n": 1000}, "n:"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "thing"}}}]}, "schema"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 30, "logprobs": True}, "top_logprobs"),
        ({"tools": [{"type": "web_search"}]}, r"tools[0]"),
        ({"tools": [{"type": "function", "function": {}}]}, r"tools[0].function.name"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"seed": 2**70}, "seed"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "text only"),
    ],
)
async def test_what_cannot_be_honoured_is_refused(bench: Any, fields: dict[str, Any], names: str) -> None:
    """Fault 14: no option is silently ignored."""
    await expect(bench, 400, names, **fields)
    assert bench.engine.requests == []


async def test_what_changes_nothing_is_accepted(bench: Any) -> None:
    neutral: dict[str, Any] = {
        "n": 1,
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "response_format": {"type": "text"},
    }
    await bench.ask("q", user="u", metadata={}, store=False, parallel_tool_calls=True, whatever=[1], **neutral)


async def test_two_hundred_sessions_at_once(bench: Any) -> None:
    bench.engine.reply = lambda request, prompt: "the answer to " + prompt.split("user\n")[-1].split("<")[0]

    async def converse(number: int) -> None:
        session = bench.open(f"session:{number}")
        messages: list[Any] = []
        for step in range(3):
            messages.append({"role": "user", "content": f"{number}.{step}"})
            reply = await bench.ask(*messages, session=session)
            assert reply["content"] == f"the answer to {number}.{step}"
            messages.append(reply)
        turns = await bench.gateway.close_session(session.id)
        assert [turn.parent for turn in turns] == [None, *(turn.id for turn in turns[:-1])]

    await asyncio.gather(*(converse(number) for number in range(200)))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is waited for announces nothing
            await asyncio.sleep(0.002)


async def expect(bench: Any, status: int, text: str, **fields: Any) -> None:
    body = {"messages": [{"role": "user", "content": "q"}]} | fields
    async with bench.post(body) as response:
        answer = await response.json()
        assert response.status == status, answer
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert text in answer["error"]["message"]


async def events(bench: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with bench.post(body) as response:
        assert response.content_type == "text/event-stream"
        lines = [line async for line in response.content if line.startswith(b"data: {")]
    return [json.loads(line[6:]) for line in lines]


class _Source:
    def __init__(self, version: int) -> None:
        self.manifest = type("Manifest", (), {"version": version})()


def _chunk(tokens: list[int], logps: Any, finish: Any) -> Any:

    return TokenChunk(ids=ids(tokens), logps=np.array(logps, dtype=np.float32), version=0, finish_reason=finish)


def _overshooting(tokens: list[int]) -> Any:
    async def generate(request: GenerateRequest) -> Any:
        yield _chunk(tokens, [-1.0] * len(tokens), "length")

    return generate


def _broken(how: str) -> Any:
    async def generate(request: GenerateRequest) -> Any:
        if how == "nan":
            yield _chunk([5, 6], [-1.0, float("nan")], "stop")
        elif how == "short":
            yield _chunk([5, 6], [-1.0], "stop")
        else:
            yield _chunk([5], [-1.0], None)

    return generate
