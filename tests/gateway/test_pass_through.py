"""A model behind somebody's chat API, asked in each of the protocols: what goes on to the API, and what comes back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest
from aiohttp import web
from rl_harness.gateway import ChatPolicy, Gateway
from rl_harness.inference.api import ApiEngine, ApiOptions
from rl_harness.records import SamplingParams

FUNCTION = {"name": "run", "description": "Run it.", "parameters": {"type": "object"}}
CHAT_TOOL = {"type": "function", "function": FUNCTION}
PIXEL = "iVBORw0KGgo="


class Upstream:
    """An API that answers each request with the next of ``answers`` (chunks, or a status with a body)."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.bodies: list[dict[str, Any]] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        answer = self.answers.pop(0)
        if isinstance(answer, tuple):
            return web.json_response(answer[1], status=answer[0])
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for chunk in answer:
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


def chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"model": "up-1", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


USAGE = {
    "choices": [],
    "usage": {
        "prompt_tokens": 11,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 7},
        "completion_tokens_details": {"reasoning_tokens": 2},
    },
}
SAYS = [chunk(reasoning_content="hm"), chunk(content="hi"), chunk("stop"), USAGE]
CALLS = [
    chunk(content="I look."),
    chunk(tool_calls=[{"index": 0, "id": "call_1", "function": {"name": "run", "arguments": '{"a":'}}]),
    chunk("tool_calls", tool_calls=[{"index": 0, "function": {"arguments": " 1}"}}]),
    USAGE,
]


class Remote:
    def __init__(self, upstream: Upstream, gateway: Gateway) -> None:
        self.upstream = upstream
        self.gateway = gateway
        self.session = gateway.open_session("s", policy="m", sampling=SamplingParams(temperature=0.5))

    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.gateway.base_url, api_key=self.session.api_key, max_retries=0)

    def anthropic(self) -> anthropic.AsyncAnthropic:
        base_url = self.gateway.base_url.removesuffix("/v1")
        return anthropic.AsyncAnthropic(base_url=base_url, api_key=self.session.api_key, max_retries=0)


@pytest.fixture
async def remote() -> AsyncIterator[Remote]:
    upstream = Upstream()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", upstream.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine = ApiEngine(ApiOptions(base_url=f"http://127.0.0.1:{runner.addresses[0][1]}/v1", retries=0))
    await engine.start("up")
    async with Gateway({"m": ChatPolicy("m", engine)}) as gateway:
        yield Remote(upstream, gateway)
    await engine.close()
    await runner.cleanup()


ASK: Any = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "q"}]}


@pytest.mark.parametrize("stream", [False, True])
async def test_messages(remote: Remote, stream: bool) -> None:
    remote.upstream.answers = [SAYS, CALLS, [chunk("length", content="cut"), USAGE]]
    tool: Any = {"name": "run", "description": "Run it.", "input_schema": {"type": "object"}}
    asked: Any = ASK | {"tools": [tool], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    replies = []
    async with remote.anthropic() as client:
        for _ in range(3):
            if stream:
                async with client.messages.stream(**asked) as running:
                    replies.append(await running.get_final_message())
            else:
                replies.append(await client.messages.create(**asked))
    said, called, cut = replies
    assert [(block.type, getattr(block, "text", None)) for block in said.content] == [
        ("thinking", None),
        ("text", "hi"),
    ]
    assert (said.content[0].thinking, said.stop_reason) == ("hm", "end_turn")
    assert (said.usage.input_tokens, said.usage.cache_read_input_tokens, said.usage.output_tokens) == (4, 7, 3)
    assert (called.content[1].id, called.content[1].input, called.stop_reason) == ("toolu_1", {"a": 1}, "tool_use")
    assert cut.stop_reason == "max_tokens"
    sent = remote.upstream.bodies[0]
    assert (sent["max_tokens"], sent["temperature"], sent["tools"]) == (9, 0.5, [CHAT_TOOL])
    assert (sent["tool_choice"], sent["parallel_tool_calls"]) == ("required", False)
    turns = remote.session.turns
    assert [turn.exact for turn in turns] == [False] * 3
    assert turns[0].extra == {"model": "up-1", "reasoning_tokens": 2}


@pytest.mark.parametrize("stream", [False, True])
async def test_responses(remote: Remote, stream: bool) -> None:
    remote.upstream.answers = [SAYS, CALLS]
    asked: Any = {
        "model": "m",
        "input": [{"role": "developer", "content": "Sys"}, {"role": "user", "content": "q"}],
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": {"type": "function", "name": "run"},
        "reasoning": {"effort": "low"},
        "max_output_tokens": 9,
    }
    replies = []
    async with remote.openai() as client:
        for _ in range(2):
            if stream:
                async with client.responses.stream(**asked) as running:
                    replies.append(await running.get_final_response())
            else:
                replies.append(await client.responses.create(**asked))
    said, called = replies
    assert (said.output[0].content[0].text, said.output_text) == ("hm", "hi")
    assert (said.usage.input_tokens, said.usage.output_tokens_details.reasoning_tokens) == (11, 2)
    assert (called.output[1].call_id, called.output[1].arguments) == ("call_1", '{"a": 1}')
    sent = remote.upstream.bodies[0]
    assert sent["messages"] == [{"role": "system", "content": "Sys"}, {"role": "user", "content": "q"}]
    assert (sent["reasoning_effort"], sent["max_tokens"]) == ("low", 9)
    assert sent["tool_choice"] == {"type": "function", "function": {"name": "run"}}


async def test_chat_goes_on_as_it_came(remote: Remote) -> None:
    """What only the API knows what to do with included: images, roles and fields of its own."""
    remote.upstream.answers = [SAYS]
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}", "detail": "low"}}
    messages: Any = [
        {"role": "developer", "content": "Sys"},
        {"role": "user", "content": [{"type": "text", "text": "what?"}, image], "own": 1},
        {"role": "oracle", "content": None},
    ]
    async with remote.openai() as client:
        reply = await client.chat.completions.create(
            model="m", messages=messages, tool_choice="none", extra_body={"own": {"a": 1}}, presence_penalty=0.5
        )
    assert reply.choices[0].message.content == "hi"
    assert reply.usage.completion_tokens_details.reasoning_tokens == 2
    sent = remote.upstream.bodies[0]
    assert sent["messages"] == messages
    assert (sent["own"], sent["presence_penalty"], sent["tool_choice"]) == ({"a": 1}, 0.5, "none")


async def test_images_reach_the_api_from_the_other_protocols(remote: Remote) -> None:
    remote.upstream.answers = [SAYS, SAYS]
    url = f"data:image/png;base64,{PIXEL}"
    source: Any = {"type": "base64", "media_type": "image/png", "data": PIXEL}
    content: Any = [{"type": "text", "text": "what?"}, {"type": "image", "source": source}]
    async with remote.anthropic() as client:
        await client.messages.create(**ASK | {"messages": [{"role": "user", "content": content}], "system": "Sys"})
    parts: Any = [{"type": "input_text", "text": "what?"}, {"type": "input_image", "image_url": url}]
    async with remote.openai() as client:
        await client.responses.create(model="m", input=[{"role": "user", "content": parts}], instructions="Sys")
    for sent in remote.upstream.bodies:
        assert sent["messages"] == [
            {"role": "system", "content": "Sys"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": url}}],
            },
        ]


async def test_structured_output_is_the_apis_affair(remote: Remote) -> None:
    remote.upstream.answers = [SAYS, SAYS, SAYS]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    named: Any = {"type": "json_schema", "json_schema": {"name": "mine", "schema": schema}}
    async with remote.openai() as client:
        await client.chat.completions.create(model="m", messages=ASK["messages"], response_format=named)
        text: Any = {"format": {"type": "json_schema", "name": "mine", "schema": schema, "strict": True}}
        await client.responses.create(model="m", input="q", text=text)
    async with remote.anthropic() as client:
        config: Any = {"format": {"type": "json_schema", "schema": schema}}
        await client.messages.create(**ASK, extra_body={"output_config": config})
    assert remote.upstream.bodies[0]["response_format"] == named
    flat = remote.upstream.bodies[1]["response_format"]
    assert flat == {"type": "json_schema", "json_schema": {"name": "mine", "schema": schema, "strict": True}}
    assert remote.upstream.bodies[2]["response_format"]["json_schema"] == {"name": "reply", "schema": schema}


async def test_logprobs_come_from_the_api(remote: Remote) -> None:
    entry = {"token": "hi", "logprob": -0.5, "bytes": [104, 105], "top_logprobs": [{"token": "ho", "logprob": -1.0}]}
    scored = {"choices": [{"index": 0, "delta": {"content": "hi"}, "logprobs": {"content": [entry]}}]}
    remote.upstream.answers = [[scored, chunk("stop")]]
    async with remote.openai() as client:
        reply = await client.chat.completions.create(model="m", messages=ASK["messages"], logprobs=True, top_logprobs=1)
    (content,) = reply.choices[0].logprobs.content
    assert (content.token, content.logprob, content.top_logprobs[0].token) == ("hi", -0.5, "ho")
    assert (remote.upstream.bodies[0]["logprobs"], remote.upstream.bodies[0]["top_logprobs"]) == (True, 1)


async def test_several_answers_are_several_requests(remote: Remote) -> None:
    remote.upstream.answers = [SAYS, SAYS]
    async with remote.openai() as client:
        reply = await client.chat.completions.create(model="m", messages=ASK["messages"], n=2)
    assert [choice.index for choice in reply.choices] == [0, 1]
    assert ["n" in body for body in remote.upstream.bodies] == [False, False]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422, 500])
async def test_errors_of_the_api(remote: Remote, status: int) -> None:
    """Its status, in the words of the protocol that was spoken; what is no fault of the request is the engine's."""
    remote.upstream.answers = [(status, {"error": {"message": "no such thing", "code": "odd"}})] * 3
    told = 502 if status == 500 else status
    async with remote.openai() as client:
        with pytest.raises(openai.APIStatusError, match="no such thing") as chat:
            await client.chat.completions.create(model="m", messages=ASK["messages"])
        with pytest.raises(openai.APIStatusError, match="no such thing") as responses:
            await client.responses.create(model="m", input="q")
    async with remote.anthropic() as client:
        with pytest.raises(anthropic.APIStatusError, match="no such thing") as messages:
            await client.messages.create(**ASK)
    assert [caught.value.status_code for caught in (chat, responses, messages)] == [told] * 3
    assert remote.session.turns == []
    assert (remote.session.engine_error is None) == (status in (400, 413, 422))


async def test_a_full_context_is_told_in_each_protocols_words(remote: Remote) -> None:
    full = (400, {"error": {"message": "maximum is 5 tokens", "code": "context_length_exceeded"}})
    remote.upstream.answers = [full, full, [full[1]]]
    async with remote.anthropic() as client:
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long: maximum is 5 tokens"):
            await client.messages.create(**ASK)
    async with remote.openai() as client:
        for _ in range(2):  # told by a status, and within a stream
            with pytest.raises(openai.BadRequestError) as caught:
                await client.responses.create(model="m", input="q", stream=True)
            assert caught.value.code == "context_length_exceeded"


async def test_nobody_counts_the_tokens_of_an_unknown_tokenizer(remote: Remote) -> None:
    async with remote.anthropic() as client:
        with pytest.raises(anthropic.NotFoundError, match="tokenizer is not known"):
            await client.messages.count_tokens(model="m", messages=ASK["messages"])


async def test_silence_is_answered(remote: Remote) -> None:
    """An API that says nothing at all, and ends."""
    remote.upstream.answers = [[chunk("stop")]] * 3
    async with remote.openai() as client:
        stream = await client.chat.completions.create(model="m", messages=ASK["messages"], stream=True)
        assert [one.choices[0].finish_reason async for one in stream] == [None, "stop"]
        async with client.responses.stream(model="m", input="q") as events:
            assert (await events.get_final_response()).output_text == ""
    async with remote.anthropic() as client, client.messages.stream(**ASK) as stream:
        assert (await stream.get_final_message()).content == []
