"""OpenAI's responses as clients see them, through the real client where it can say it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from rl_harness.errors import EngineError
from rl_harness.gateway import Gateway, TokenPolicy

TOOL = {"type": "function", "name": "run", "description": "Run it.", "parameters": {"type": "object"}}
LATER = {
    "type": "custom",
    "name": "exec",
    "description": "Run a script.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: SOURCE"},
}
CALL = '<tool_call>\n{"name": "run", "arguments": {"command": "ls"}}\n</tool_call>'
ASK: Any = {"model": "any", "input": "q"}


async def test_a_response(bench: Any, replies: Callable[..., None]) -> None:
    replies("the héllo")
    async with bench.client() as client:
        reply = await client.responses.create(**ASK, instructions="Sys")
    (turn,) = bench.session.turns
    assert reply.id.startswith("resp_")
    assert (reply.object, reply.model, reply.status, reply.store) == ("response", "m", "completed", False)
    assert reply.output_text == "the héllo"
    assert reply.output[0].id.startswith("msg_")
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (turn.prompt_tokens, turn.completion_tokens)
    assert bench.prompt(turn).startswith("<|im_start|>system\nSys<|im_end|>\n<|im_start|>user\nq<|im_end|>\n")


async def test_each_token_is_streamed_as_it_comes(bench: Any, replies: Callable[..., None]) -> None:
    """Fault 20, here too."""
    replies("abcd then the rest")
    bench.engine.gate.clear()
    async with bench.client() as client, client.responses.stream(**ASK) as stream:
        seen = aiter(stream)
        async for event in seen:
            if event.type == "response.output_text.delta":
                assert event.delta == "abcd"
                break
        bench.engine.gate.set()
        rest = [event.delta async for event in seen if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert "".join(rest) == " then the rest"
    assert final.output_text == "abcd then the rest"
    (turn,) = bench.session.turns
    assert (final.usage.input_tokens, final.usage.output_tokens) == (turn.prompt_tokens, turn.completion_tokens)


async def test_the_sequence_of_events(bench: Any, replies: Callable[..., None]) -> None:
    replies(f"<think>hm</think>I\n{CALL}")
    seen = await events(bench, ASK | {"stream": True, "tools": [TOOL]})
    assert list(dict.fromkeys(event["type"] for event in seen)) == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_text.delta",
        "response.output_text.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.completed",
    ]
    assert [event["sequence_number"] for event in seen] == list(range(len(seen)))
    done = [event["item"] for event in seen if event["type"] == "response.output_item.done"]
    assert seen[-1]["response"]["output"] == done
    assert [(item["type"], item["id"][:3]) for item in done] == [
        ("reasoning", "rs_"),
        ("message", "msg"),
        ("function_call", "fc_"),
    ]
    assert (done[2]["name"], done[2]["arguments"], done[2]["call_id"][:5]) == ("run", '{"command": "ls"}', "call_")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_loop_with_tools(bench: Any, replies: Callable[..., None], stream: bool) -> None:
    """Fault 15: the turns are recorded, each the continuation of the one before, whatever came in between."""
    replies(f"<think>hm</think>I look.\n{CALL}\n{CALL}", f"Again.\n{CALL}\nand on", "done")
    items: list[Any] = [{"role": "user", "content": "q"}]
    async with bench.client() as client:
        for _ in range(3):
            asked: Any = {"model": "m", "input": items, "tools": [TOOL], "store": False}
            if stream:
                async with client.responses.stream(**asked) as running:
                    reply = await running.get_final_response()
            else:
                reply = await client.responses.create(**asked)
            items += [item.model_dump(exclude_none=True) for item in reply.output]
            for item in reply.output:
                if item.type == "function_call":
                    assert json.loads(item.arguments) == {"command": "ls"}
                    items.append({"type": "function_call_output", "call_id": item.call_id, "output": "out"})
    assert reply.output_text == "done"
    turns = bench.session.turns
    assert [turn.parent for turn in turns] == [None, turns[0].id, turns[1].id]
    assert turns[2].shared == turns[1].prompt_tokens + turns[1].completion_tokens
    assert "<|im_start|>tool\nout<|im_end|>" in bench.prompt(turns[2])


async def test_reasoning_survives_the_round_trip(bench: Any, replies: Callable[..., None]) -> None:
    """Also where a client drops the open text, and the session that knew it is gone."""
    replies("<think>hm, hé</think>I look.", "ok")
    async with bench.client() as client:
        reply = await client.responses.create(**ASK, include=["reasoning.encrypted_content"])
        thought = reply.output[0].model_dump()
        assert [part["text"] for part in thought["content"]] == ["hm, hé"]
        del thought["content"]
        items = [
            {"role": "user", "content": "q"},
            thought,
            reply.output[1].model_dump(),
            {"role": "user", "content": "r"},
        ]
    seen: list[Any] = []
    bench.renderer.render = _watching(bench.renderer.render, seen)
    async with bench.client(bench.open("other")) as client:
        await client.responses.create(model="m", input=items)
    assert [(message.role, message.content, message.reasoning) for message in seen[0]] == [
        ("user", "q", None),
        ("assistant", "I look.", "hm, hé"),
        ("user", "r", None),
    ]


async def test_what_an_agent_says(bench: Any, replies: Callable[..., None]) -> None:
    """Everything that is known to be sent, in one request: none of it is refused, all text arrives."""
    replies("ok")
    body = {
        "model": "any",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "You help."}]},
            {"type": "message", "role": "user", "id": "msg_1", "content": [{"type": "input_text", "text": "do it"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}], "content": None},
            {"role": "assistant", "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
            {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "run", "arguments": '{"a":1}'},
            {"type": "function_call", "call_id": "call_2", "namespace": "web", "name": "open", "arguments": "{}"},
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
            {"type": "function_call_output", "call_id": "call_1", "output": "out"},
            {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "page"}]},
            {
                "type": "additional_tools",
                "role": "developer",
                "tools": [{"type": "namespace", "name": "functions", "description": "", "tools": [LATER]}],
            },
            {"role": "user", "content": "go on"},
        ],
        "tools": [
            TOOL | {"strict": False},
            {"type": "namespace", "name": "web", "description": "d", "tools": [TOOL | {"name": "open"}]},
            {"type": "web_search", "external_web_access": False},
            {
                "type": "custom",
                "name": "patch",
                "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"},
            },
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "text": {"verbosity": "low"},
        "service_tier": "auto",
        "client_metadata": {"x": "y"},
    }
    async with bench.post(body, path="/responses", headers={"session-id": "1"}) as response:
        assert response.status == 200, await response.text()
    prompt = bench.prompt(bench.session.turns[0])
    for text in (
        "system\nYou help.",
        "user\ndo it<|im_end|>",
        "I look.",
        '{"name": "web__open"',
        "tool\nout<|im_end|>",
        "tool\npage<|im_end|>",
        "user\ngo on<|im_end|>",
    ):
        assert text in prompt
    offered = [name in prompt for name in ("run", "web__open", "patch", "start: X", "functions__exec", "web_search")]
    assert offered == [True] * 5 + [False]


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_become_the_items_of_their_tools(bench: Any, replies: Callable[..., None], stream: bool) -> None:
    calls = [
        ("web__open", {"url": "u"}),
        ("patch", {"input": "*** Begin"}),
        ("local_shell", {"command": ["ls", "-l"]}),
        ("functions__exec", {"input": "text(1)"}),
    ]
    said = "\n".join(f"<tool_call>\n{json.dumps({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls)
    replies(said, "done")
    tools: Any = [
        {"type": "namespace", "name": "web", "description": "d", "tools": [TOOL | {"name": "open"}]},
        {"type": "custom", "name": "patch"},
        {"type": "local_shell"},
    ]
    later = {"type": "namespace", "name": "functions", "description": "", "tools": [LATER]}
    asked: list[Any] = [
        {"type": "additional_tools", "role": "developer", "tools": [later]},
        {"role": "user", "content": "q"},
    ]
    async with bench.client() as client:
        if stream:
            async with client.responses.stream(model="m", input=asked, tools=tools) as running:
                reply = await running.get_final_response()
        else:
            reply = await client.responses.create(model="m", input=asked, tools=tools)
        opened, patch, shell, script = reply.output
        assert (opened.type, opened.namespace, opened.name, opened.arguments) == (
            "function_call",
            "web",
            "open",
            '{"url": "u"}',
        )
        assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "patch", "*** Begin")
        assert (shell.type, shell.action.command) == ("local_shell_call", ["ls", "-l"])
        assert (script.type, script.namespace, script.name) == ("custom_tool_call", "functions", "exec")
        assert script.input == "text(1)"
        items: list[Any] = [*asked, *(item.model_dump() for item in reply.output)]
        items += [
            {"type": "function_call_output", "call_id": opened.call_id, "output": "a"},
            {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "b"},
            {"type": "local_shell_call_output", "id": shell.call_id, "output": "c"},
            {"type": "custom_tool_call_output", "call_id": script.call_id, "output": "d"},
        ]
        await client.responses.create(model="m", input=items, tools=tools)
    one, two = bench.session.turns
    assert (two.parent, two.shared) == (one.id, one.prompt_tokens + one.completion_tokens)


async def test_tool_choice(bench: Any, replies: Callable[..., None]) -> None:
    replies('{"name": "run", "arguments": {"a": 1}}</tool_call>', ' {"a": 2}}\n</tool_call>', CALL, CALL)
    async with bench.client() as client:
        any_of = await client.responses.create(**ASK, tools=[TOOL], tool_choice="required")
        assert json.loads(any_of.output[0].arguments) == {"a": 1}
        named = await client.responses.create(**ASK, tools=[TOOL], tool_choice={"type": "function", "name": "run"})
        assert json.loads(named.output[0].arguments) == {"a": 2}
        none = await client.responses.create(**ASK, tools=[TOOL], tool_choice="none")
        assert none.output_text == CALL
        other = TOOL | {"name": "walk"}
        allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "walk"}]}
        await client.responses.create(**ASK, tools=[TOOL, other], tool_choice=allowed)
        assert "run" not in bench.prompt(bench.session.turns[-1])
        for choice in ("required", {"type": "function", "name": "fly"}, "sometimes"):
            with pytest.raises(openai.BadRequestError, match="tool_choice"):
                await client.responses.create(**ASK, tool_choice=choice)


async def test_counting(bench: Any, replies: Callable[..., None]) -> None:
    replies("one")
    async with bench.client() as client:
        counted = await client.responses.input_tokens.count(**ASK, tools=[TOOL], instructions="S")
        assert bench.session.turns == []
        await client.responses.create(**ASK, tools=[TOOL], instructions="S")
    assert counted.input_tokens == bench.session.turns[0].prompt_tokens


async def test_reasoning_is_counted(bench: Any, replies: Callable[..., None]) -> None:
    replies("<think>a long thought</think>ok", "ok")
    async with bench.client() as client:
        usages = [(await client.responses.create(**ASK)).usage for _ in range(2)]
    counted = usages[0].output_tokens_details.reasoning_tokens
    # To the chunk, which here has four tokens.
    assert len("<think>a long thought") - 4 <= counted <= len("<think>a long thought</think>")
    assert usages[1].output_tokens_details.reasoning_tokens == 0


async def test_logprobs(bench: Any, replies: Callable[..., None]) -> None:
    replies("aé", "aé")
    asked: Any = ASK | {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    async with bench.client() as client:
        reply = await client.responses.create(**asked)
        turn = bench.session.turns[0]
        assert [entry.logprob for entry in reply.output[0].content[0].logprobs] == turn.logps.tolist()
        async with client.responses.stream(**asked) as stream:
            deltas = [event async for event in stream if event.type == "response.output_text.delta"]
            final = await stream.get_final_response()
    assert [entry.logprob for entry in final.output[0].content[0].logprobs] == turn.logps.tolist()
    assert sum(len(delta.logprobs) for delta in deltas) > 0


async def test_the_limit_is_reached(bench: Any, replies: Callable[..., None]) -> None:
    replies("0123456789", "0123456789")
    async with bench.client() as client:
        reply = await client.responses.create(**ASK, max_output_tokens=3)
        assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    seen = await events(bench, ASK | {"stream": True, "max_output_tokens": 3})
    assert seen[-1]["type"] == "response.incomplete"


async def test_nothing_at_all_is_an_empty_message(bench: Any, replies: Callable[..., None]) -> None:
    replies([260], [260])
    async with bench.client() as client:
        assert (await client.responses.create(**ASK)).output_text == ""
        async with client.responses.stream(**ASK) as stream:
            assert (await stream.get_final_response()).output_text == ""


async def test_a_web_socket_is_told_at_once(bench: Any) -> None:
    upgrade = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13", "sec-websocket-key": "x"}
    async with bench.http.get(f"{bench.gateway.base_url}/responses", headers=upgrade) as response:
        assert response.status == 426
    async with bench.http.get(f"{bench.gateway.base_url}/responses") as response:
        assert response.status == 401


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True}, "background"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "send the item itself"),
        ({"input": [{"type": "dance"}]}, "dance"),
        ({"input": [{"role": "critic", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "text only"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "text only"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "name"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tools": [TOOL | {"parameters": {"properties": 5}}]}, "schema"),
        ({"tools": [{"type": "namespace", "name": "x"}]}, "namespace"),
        ({"tools": [{"type": "apply_patch"}]}, "offer a function instead"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}, "structured output"),
    ],
)
async def test_what_cannot_be_honoured_is_refused(bench: Any, fields: dict[str, Any], names: str) -> None:
    async with bench.post(ASK | fields, path="/responses") as response:
        answer = await response.json()
        assert response.status == 400, answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert names in answer["error"]["message"]
    assert bench.engine.requests == []


async def test_errors(bench: Any) -> None:
    bench.engine.faults = [EngineError("it broke")]
    bench.engine.reply = lambda request, prompt: "a long reply"
    async with bench.client() as client:
        with pytest.raises(openai.InternalServerError, match="it broke"):
            await client.responses.create(**ASK)
    bench.engine.faults = [EngineError("it broke")]
    seen = await events(bench, ASK | {"stream": True})
    assert seen[-1]["type"] == "response.failed"
    assert seen[-1]["response"]["id"] == seen[0]["response"]["id"]
    assert seen[-1]["response"]["error"] == {"code": "server_error", "message": "it broke"}
    assert bench.session.turns == []


async def test_the_context_is_full(bench: Any, folder: Any) -> None:
    engine = type(bench.engine)(bench.engine.Options(replies=("0123456789",), context_length=40))
    await engine.start(str(folder))
    async with Gateway({"m": TokenPolicy("m", engine, bench.renderer)}) as gateway:
        session = gateway.open_session("t", policy="m")
        async with openai.AsyncOpenAI(base_url=gateway.base_url, api_key=session.api_key, max_retries=0) as client:
            for stream in (False, True):
                with pytest.raises(openai.BadRequestError) as caught:
                    await client.responses.create(model="m", input="x" * 60, stream=stream)
                assert caught.value.code == "context_length_exceeded"


async def events(bench: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, each named as its data says."""
    async with bench.post(body, path="/responses") as response:
        assert response.content_type == "text/event-stream"
        lines = [line.rstrip(b"\n") async for line in response.content if line != b"\n"]
    seen = [json.loads(line[6:]) for line in lines if line.startswith(b"data: ")]
    assert [line[7:].decode() for line in lines if line.startswith(b"event: ")] == [event["type"] for event in seen]
    return seen


def _watching(render: Any, seen: list[Any]) -> Any:
    def watched(messages: Any, tools: Any = ()) -> Any:
        seen.append(messages)
        return render(messages, tools)

    return watched
