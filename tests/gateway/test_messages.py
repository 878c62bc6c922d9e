"""Anthropic's messages as clients see them, through the real client where it can say it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anthropic
import pytest
from rl_harness.errors import EngineError
from rl_harness.gateway import Gateway, TokenPolicy
from rl_harness.gateway.renderers.tokenizer import TokenizerFolder

TOOL = {"name": "run", "description": "Run it.", "input_schema": {"type": "object", "properties": {"command": {}}}}
CALL = '<tool_call>\n{"name": "run", "arguments": {"command": "ls"}}\n</tool_call>'
ASK: Any = {"model": "any", "max_tokens": 1000, "messages": [{"role": "user", "content": "q"}]}


async def test_a_message(bench: Any, replies: Callable[..., None]) -> None:
    replies("the héllo")
    async with bench.anthropic() as client:
        reply = await client.messages.create(**ASK, system="Sys")
    (turn,) = bench.session.turns
    assert reply.id.startswith("msg_")
    assert (reply.type, reply.role, reply.model) == ("message", "assistant", "m")
    assert [block.model_dump(exclude_none=True) for block in reply.content] == [{"type": "text", "text": "the héllo"}]
    assert (reply.stop_reason, reply.stop_sequence) == ("end_turn", None)
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (turn.prompt_tokens, turn.completion_tokens)
    assert bench.prompt(turn).startswith("<|im_start|>system\nSys<|im_end|>\n<|im_start|>user\nq<|im_end|>\n")


async def test_each_token_is_streamed_as_it_comes(bench: Any, replies: Callable[..., None]) -> None:
    """Fault 20, here too."""
    replies("abcd then the rest")
    bench.engine.gate.clear()
    async with bench.anthropic() as client, client.messages.stream(**ASK) as stream:
        text = aiter(stream.text_stream)
        assert await anext(text) == "abcd"
        assert stream.current_message_snapshot.usage.input_tokens > 0
        bench.engine.gate.set()
        assert "".join([piece async for piece in text]) == " then the rest"
        final = await stream.get_final_message()
    (turn,) = bench.session.turns
    assert final.stop_reason == "end_turn"
    assert (final.usage.input_tokens, final.usage.output_tokens) == (turn.prompt_tokens, turn.completion_tokens)


async def test_the_sequence_of_events(bench: Any, replies: Callable[..., None]) -> None:
    replies(f"<think>hm</think>I look.\n{CALL}\nand on")
    seen = await events(bench, ASK | {"stream": True, "tools": [TOOL]})
    assert [event["type"] for event in seen if event["type"] != "content_block_delta"] == [
        "message_start",
        "ping",
        *["content_block_start", "content_block_stop"] * 4,
        "message_delta",
        "message_stop",
    ]
    blocks = [event["content_block"] for event in seen if event["type"] == "content_block_start"]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "text"]
    assert blocks[2]["id"].startswith("toolu_")
    assert blocks[2]["input"] == {}
    deltas = [event["delta"]["type"] for event in seen if event["type"] == "content_block_delta"]
    assert list(dict.fromkeys(deltas)) == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta"]
    indexes = [event["index"] for event in seen if "index" in event]
    assert indexes == sorted(indexes)
    assert set(indexes) == {0, 1, 2, 3}
    assert seen[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_loop_with_tools(bench: Any, replies: Callable[..., None], stream: bool) -> None:
    """Fault 15: the turns are recorded, each the continuation of the one before, whatever came in between."""
    replies(f"<think>hm</think>I look.\n{CALL}\n{CALL}", f"Again.\n{CALL}\nand on", "done")
    messages: list[Any] = [{"role": "user", "content": "q"}]
    async with bench.anthropic() as client:
        for _ in range(3):
            asked: Any = ASK | {"messages": messages, "tools": [TOOL]}
            if stream:
                async with client.messages.stream(**asked) as running:
                    reply = await running.get_final_message()
            else:
                reply = await client.messages.create(**asked)
            messages.append({"role": "assistant", "content": reply.content})
            calls = [block for block in reply.content if block.type == "tool_use"]
            assert all(call.input == {"command": "ls"} for call in calls)
            if calls:
                assert reply.stop_reason == "tool_use"
                results = [
                    {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "out"}]}
                    for call in calls
                ]
                messages.append({"role": "user", "content": results})
    assert messages[-1]["content"][0].text == "done"
    turns = bench.session.turns
    assert [turn.parent for turn in turns] == [None, turns[0].id, turns[1].id]
    assert turns[2].shared == turns[1].prompt_tokens + turns[1].completion_tokens
    assert turns[0].message.reasoning == "hm"
    assert "<|im_start|>tool\nout<|im_end|>" in bench.prompt(turns[2])


async def test_what_an_agent_says(bench: Any, replies: Callable[..., None]) -> None:
    """Everything that is known to be sent, in one request: none of it is refused, all text arrives."""
    replies("ok")
    cached = {"cache_control": {"type": "ephemeral"}}
    body = ASK | {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=7;"},
            {"type": "text", "text": "You help.", **cached},
            {"type": "text", "text": "Be brief."},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "do it", **cached}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "xyz"},
                    {"type": "text", "text": "I look.", "citations": None},
                    {"type": "tool_use", "id": "toolu_1", "name": "run", "input": {"command": "ls"}, **cached},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_1",
                        "is_error": True,
                        "content": [{"type": "text", "text": "no such"}, {"type": "text", "text": "file"}],
                        **cached,
                    },
                    {"type": "text", "text": "go on"},
                ],
            },
            {"role": "system", "content": "be quick"},
            {"role": "user", "content": "now"},
        ],
        "tools": [
            TOOL | cached | {"defer_loading": True, "eager_input_streaming": True, "strict": True},
            {"type": "custom"} | TOOL | {"name": "walk"},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
            {"type": "bash_20250124", "name": "bash"},
        ],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "metadata": {"user_id": "u"},
        "betas": ["x"],
        "container": None,
        "mcp_servers": [],
        "service_tier": "auto",
        "speed": "fast",
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b", "x-claude-code-session-id": "1"}
    async with bench.post(body, path="/messages?beta=true", headers=headers) as response:
        assert response.status == 200, await response.text()
    prompt = bench.prompt(bench.session.turns[0])
    for text in (
        "system\nYou help.\nBe brief.\n",
        "user\ndo it<|im_end|>",
        "I look.",
        '"command": "ls"',
        "tool\nError: no such\nfile<|im_end|>",
        "user\ngo on<|im_end|>",
        "system\nbe quick<|im_end|>",
    ):
        assert text in prompt
    assert "billing" not in prompt
    assert [f'"name": "{name}"' in prompt for name in ("run", "walk", "bash", "web_search")] == [True] * 3 + [False]


async def test_a_header_for_the_bill_starts_no_branch(bench: Any, replies: Callable[..., None]) -> None:
    replies("one", "two")
    messages: list[Any] = [{"role": "user", "content": "q"}]
    for number in range(2):
        system = [{"type": "text", "text": f"x-anthropic-billing-header: cch={number};"}, {"type": "text", "text": "S"}]
        async with bench.post(ASK | {"messages": messages, "system": system}, path="/messages") as response:
            reply = await response.json()
        messages += [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": "r"}]
    one, two = bench.session.turns
    assert (two.parent, two.shared) == (one.id, one.prompt_tokens + one.completion_tokens)


async def test_stop_sequences_are_named(bench: Any, replies: Callable[..., None]) -> None:
    replies("one STOP two", "one STOP two", "one")
    async with bench.anthropic() as client:
        reply = await client.messages.create(**ASK, stop_sequences=["zzz", "STOP"])
        assert (reply.content[0].text, reply.stop_reason, reply.stop_sequence) == ("one ", "stop_sequence", "STOP")
        async with client.messages.stream(**ASK, stop_sequences=["zzz", "STOP"]) as stream:
            final = await stream.get_final_message()
        assert (final.content[0].text, final.stop_reason, final.stop_sequence) == ("one ", "stop_sequence", "STOP")
        last = await client.messages.create(**ASK, stop_sequences=["STOP"])
        assert (last.stop_reason, last.stop_sequence) == ("end_turn", None)


async def test_the_limit_is_reached(bench: Any, replies: Callable[..., None]) -> None:
    replies("0123456789")
    async with bench.anthropic() as client:
        reply = await client.messages.create(**ASK | {"max_tokens": 3})
    assert (reply.stop_reason, reply.usage.output_tokens) == ("max_tokens", 3)


async def test_tool_choice(bench: Any, replies: Callable[..., None]) -> None:
    replies('{"name": "run", "arguments": {"a": 1}}</tool_call>', ' {"a": 2}}\n</tool_call>', CALL)
    async with bench.anthropic() as client:
        any_of = await client.messages.create(**ASK, tools=[TOOL], tool_choice={"type": "any"})
        assert any_of.content[0].input == {"a": 1}
        named = await client.messages.create(**ASK, tools=[TOOL], tool_choice={"type": "tool", "name": "run"})
        assert named.content[0].input == {"a": 2}
        none = await client.messages.create(**ASK, tools=[TOOL], tool_choice={"type": "none"})
        assert none.content[0].text == CALL
        for choice in ({"type": "any"}, {"type": "tool", "name": "fly"}, {"type": "sometimes"}):
            with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
                await client.messages.create(**ASK, tool_choice=choice)


async def test_one_call_at_a_time(bench: Any, replies: Callable[..., None]) -> None:
    """The reply ends with its first call, to the id, and the next turn goes on from there."""
    replies(f"{CALL}{CALL}", "done")
    one_each: Any = {"type": "auto", "disable_parallel_tool_use": True}
    async with bench.anthropic() as client:
        reply = await client.messages.create(**ASK, tools=[TOOL], tool_choice=one_each)
        assert ([block.type for block in reply.content], reply.stop_reason) == (["tool_use"], "tool_use")
        result = {"type": "tool_result", "tool_use_id": reply.content[0].id, "content": "out"}
        more = [{"role": "assistant", "content": reply.content}, {"role": "user", "content": [result]}]
        await client.messages.create(**ASK | {"messages": ASK["messages"] + more}, tools=[TOOL])
    one, two = bench.session.turns
    assert bench.renderer.decode(one.completion) == CALL
    assert (two.parent, two.shared) == (one.id, one.prompt_tokens + one.completion_tokens)


async def test_counting(bench: Any, replies: Callable[..., None]) -> None:
    replies("one")
    async with bench.anthropic() as client:
        asked: Any = {name: ASK[name] for name in ("model", "messages")} | {"tools": [TOOL], "system": "S"}
        counted = await client.messages.count_tokens(**asked)
        assert bench.session.turns == []
        await client.messages.create(max_tokens=5, **asked)
    assert counted.input_tokens == bench.session.turns[0].prompt_tokens


async def test_models_in_the_shape_of_the_client(bench: Any) -> None:
    async with bench.anthropic() as client:
        assert [model.id async for model in client.models.list()] == ["m"]


async def test_who_looks_whether_anybody_is_there(bench: Any) -> None:
    async with bench.http.head(bench.gateway.base_url.removesuffix("v1")) as response:
        assert (response.status, await response.read()) == (200, b"")


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url"}}]}]}, "text only"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]},
            "text only",
        ),
        ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "{"}]}, "continue"),
        ({"messages": [{"role": "assistant", "content": [{"type": "dance"}]}]}, "dance"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"compaction": {"type": "summarize"}}, "compaction"),
        ({"tools": [{"type": "computer_20250124", "name": "computer"}]}, "text only"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"temperature": -1}, "temperature"),
        ({"tools": [{"name": "x", "input_schema": 5}]}, "schema"),
        ({"tools": [{"name": "x", "input_schema": {"type": "thing"}}]}, "schema"),
        ({"tools": [{"name": "", "input_schema": {}}]}, "name"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}}, "structured output"),
    ],
)
async def test_what_cannot_be_honoured_is_refused(bench: Any, fields: dict[str, Any], names: str) -> None:
    async with bench.post(ASK | fields, path="/messages") as response:
        answer = await response.json()
        assert response.status == 400, answer
    assert answer["type"] == "error"
    assert answer["error"]["type"] == "invalid_request_error"
    assert names in answer["error"]["message"]
    assert bench.engine.requests == []


async def test_errors_have_the_clients_own_types(bench: Any) -> None:
    with pytest.raises(anthropic.AuthenticationError):
        async with anthropic.AsyncAnthropic(base_url=bench.gateway.base_url[:-3], api_key="x", max_retries=0) as wrong:
            await wrong.messages.create(**ASK)
    bench.engine.faults = [EngineError("it broke")]
    bench.engine.reply = lambda request, prompt: "a long reply"
    async with bench.anthropic() as client:
        with pytest.raises(anthropic.InternalServerError) as caught:
            await client.messages.create(**ASK)
        assert caught.value.body == {"type": "error", "error": {"type": "api_error", "message": "it broke"}}
        limited = bench.open("limited", max_turns=0)
        with pytest.raises(anthropic.PermissionDeniedError, match="limit of 0 model calls"):
            await bench.anthropic(limited).messages.create(**ASK)


async def test_an_error_in_mid_stream(bench: Any) -> None:
    bench.engine.faults = [EngineError("it broke")]
    bench.engine.reply = lambda request, prompt: "a long reply"
    async with bench.anthropic() as client:
        with pytest.raises(anthropic.APIStatusError, match="it broke"):
            async with client.messages.stream(**ASK) as stream:
                await stream.get_final_message()
    assert bench.session.turns == []


async def test_the_context_is_full(bench: Any, folder: Any) -> None:
    """Told in these words, agents shorten their conversation."""
    engine = type(bench.engine)(bench.engine.Options(replies=("0123456789",), context_length=40))
    await engine.start(str(folder))
    async with Gateway({"m": TokenPolicy("m", engine, bench.renderer)}) as gateway:
        session = gateway.open_session("t", policy="m")
        base_url = gateway.base_url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=base_url, api_key=session.api_key, max_retries=0) as client:
            for size in (60, 20_000):
                with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 40 maximum"):
                    await client.messages.create(**ASK | {"messages": [{"role": "user", "content": "x" * size}]})


async def test_what_cannot_fit_is_refused_without_tokenising_it(bench: Any, folder: Any, monkeypatch: Any) -> None:
    """In whatever part of a request it stands: 30 MiB would take gigabytes."""
    encoded: list[int] = []
    whole = TokenizerFolder.encode
    monkeypatch.setattr(TokenizerFolder, "encode", lambda self, text: encoded.append(len(text)) or whole(self, text))
    counted: list[int] = []
    piece = TokenizerFolder.count
    monkeypatch.setattr(TokenizerFolder, "count", lambda self, text: counted.append(len(text)) or piece(self, text))
    engine = type(bench.engine)(bench.engine.Options(replies=("0123456789",), context_length=100_000))
    await engine.start(str(folder))
    long = "many words, " * 100_000
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": long}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "there"}
    tool = {"name": "look", "description": "short", "input_schema": {"type": "object"}}
    says = {
        "content": ASK | {"messages": [{"role": "user", "content": long}]},
        "system": ASK | {"system": long},
        "tools": ASK | {"tools": [tool | {"description": long}]},
        "arguments": ASK
        | {
            "messages": [
                *ASK["messages"],
                {"role": "assistant", "content": [call]},
                {"role": "user", "content": [result]},
            ]
        },
    }
    async with Gateway({"m": TokenPolicy("m", engine, bench.renderer)}) as gateway:
        session = gateway.open_session("t", policy="m")
        base_url = gateway.base_url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=base_url, api_key=session.api_key, max_retries=0) as client:
            for body in says.values():
                with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 100000 maximum"):
                    await client.messages.create(**body)
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
                await client.messages.count_tokens(model="m", messages=says["content"]["messages"])
            assert max(encoded, default=0) < 1 << 20
            assert 0 < sum(counted) < 5 * len(long) / 2  # no further than it takes to know
            # What is large and fits is taken, and its tokens are those of the whole.
            engine._options = engine.Options(replies=("0123456789",), context_length=1 << 21)
            await client.messages.create(**says["content"])
        (turn,) = session.turns
        assert bench.renderer.decode(turn.context).count(long) == 1


async def events(bench: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, each named as its data says."""
    async with bench.post(body, path="/messages") as response:
        assert response.content_type == "text/event-stream"
        lines = [line.rstrip(b"\n") async for line in response.content if line != b"\n"]
    seen = [json.loads(line[6:]) for line in lines if line.startswith(b"data: ")]
    assert [line[7:].decode() for line in lines if line.startswith(b"event: ")] == [event["type"] for event in seen]
    return seen
