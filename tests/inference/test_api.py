"""The api engine against real servers on loopback: another gateway of ours, and one that misbehaves to order."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from rl_harness.errors import EngineError, RequestRefused, Unavailable
from rl_harness.gateway import ChatPolicy, Gateway, TokenPolicy
from rl_harness.gateway.renderers.template import TemplateOptions, TemplateRenderer
from rl_harness.inference.api import ApiEngine, ApiOptions
from rl_harness.records import SamplingParams
from rl_harness.testing.engine import ScriptedEngine, ScriptedOptions
from rl_harness.testing.tokenizer import write_tokenizer

ASK = {"messages": [{"role": "user", "content": "q"}]}
TOOL = {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}


class Upstream:
    """Answers each request with the next of ``answers`` and keeps what it got."""

    def __init__(self) -> None:
        self.answers: list[Callable[[web.Request], Any]] = []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Any] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.headers.append(request.headers)
        answer: web.StreamResponse = await self.answers.pop(0)(request)
        return answer


def chunk(**delta: Any) -> dict[str, Any]:
    return {"model": "upstream-1", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


def end(reason: str = "stop") -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}


USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 11, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 7}},
}


def streams(*chunks: Any, cut: bool = False) -> Callable[[web.Request], Any]:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        await response.write(b": a comment\n\n")
        for one in chunks:
            data = one if isinstance(one, bytes) else b"data: " + json.dumps(one).encode() + b"\r\n\r\n"
            for byte_pair in range(0, len(data), 37):
                await response.write(data[byte_pair : byte_pair + 37])
        if cut:
            assert request.transport is not None
            request.transport.abort()
        else:
            await response.write(b"data: [DONE]\n\n")
        return response

    return answer


def says(status: int, body: Any, **headers: str) -> Callable[[web.Request], Any]:
    async def answer(request: web.Request) -> web.Response:
        if isinstance(body, bytes):
            return web.Response(status=status, body=body, headers=headers)
        return web.json_response(body, status=status, headers=headers)

    return answer


async def cuts(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


@pytest.fixture
async def upstream() -> AsyncIterator[tuple[Upstream, str]]:
    server = Upstream()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.handle)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield server, f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    await runner.cleanup()


@pytest.fixture
async def engine(upstream: tuple[Upstream, str]) -> AsyncIterator[ApiEngine]:
    made = ApiEngine(ApiOptions(base_url=upstream[1], backoff=0.001, retries=3))
    await made.start("remote")
    yield made
    await made.close()


async def collect(engine: ApiEngine, body: Any = ASK) -> list[Any]:
    return [one async for one in engine.complete(body)]


async def test_what_is_sent(upstream: tuple[Upstream, str], engine: ApiEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    server, url = upstream
    server.answers = [streams(chunk(content="hi"), end()), streams(end())]
    assert [one["choices"][0]["delta"] for one in await collect(engine)] == [{"content": "hi"}, {}]
    assert server.bodies[0] == ASK | {"model": "remote", "stream": True}
    assert "authorization" not in server.headers[0]
    monkeypatch.setenv("MY_KEY", "secret")
    own = ApiEngine(ApiOptions(base_url=url, api_key_env="MY_KEY", max_tokens_key="max_completion_tokens"))
    await own.start("remote")
    await collect(own, ASK | {"max_tokens": 5})
    assert server.bodies[1]["max_completion_tokens"] == 5
    assert "max_tokens" not in server.bodies[1]
    assert server.headers[1]["authorization"] == "Bearer secret"
    await own.close()


async def test_failures_before_the_first_byte_are_retried(upstream: tuple[Upstream, str], engine: ApiEngine) -> None:
    upstream[0].answers = [says(429, {}, **{"retry-after": "0"}), cuts, says(503, b"busy"), streams(end())]
    assert len(await collect(engine)) == 1
    assert len(upstream[0].bodies) == 4


async def test_retries_end(upstream: tuple[Upstream, str], engine: ApiEngine) -> None:
    upstream[0].answers = [says(500, {"error": {"message": "sorry"}})] * 4
    with pytest.raises(EngineError, match=r"answered 500: sorry \(after 4 attempts\)"):
        await collect(engine)


async def test_what_cannot_get_better_is_not_retried(upstream: tuple[Upstream, str], engine: ApiEngine) -> None:
    upstream[0].answers = [says(400, {"error": {"message": "no such model"}})]
    with pytest.raises(RequestRefused, match=r"^no such model$"):
        await collect(engine)
    upstream[0].answers = [says(404, b"")]
    with pytest.raises(EngineError, match=r"answered 404: Not Found$"):
        await collect(engine)


async def test_after_the_first_byte_a_failure_is_final(upstream: tuple[Upstream, str], engine: ApiEngine) -> None:
    upstream[0].answers = [streams(chunk(content="a"), cut=True), streams(b"data: {broken\n\n")]
    for _ in range(2):
        with pytest.raises(EngineError, match="the reply broke off"):
            await collect(engine)
    assert len(upstream[0].bodies) == 2


async def test_a_silent_upstream_is_given_up(upstream: tuple[Upstream, str]) -> None:
    async def hangs(request: web.Request) -> web.Response:
        await asyncio.sleep(30)
        return web.Response()

    upstream[0].answers = [hangs]
    impatient = ApiEngine(ApiOptions(base_url=upstream[1], idle_timeout=0.05, retries=0))
    await impatient.start("remote")
    with pytest.raises(EngineError, match="chat/completions: "):
        await collect(impatient)
    await impatient.close()


async def test_an_upstream_that_does_not_stream(upstream: tuple[Upstream, str], engine: ApiEngine) -> None:
    whole = {"choices": [{"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}], "usage": USAGE["usage"]}
    upstream[0].answers = [says(200, whole), says(200, b"nonsense")]
    (only,) = await collect(engine)
    assert only["choices"][0]["delta"] == {"content": "hi"}
    with pytest.raises(EngineError, match="cannot be read"):
        await collect(engine)


async def test_preflight_says_what_is_missing(upstream: tuple[Upstream, str], unused_tcp_port: int) -> None:
    await ApiEngine(ApiOptions(base_url=upstream[1])).preflight()
    with pytest.raises(Unavailable, match=rf"does not answer: 127\.0\.0\.1:{unused_tcp_port}: Connect call failed"):
        await ApiEngine(ApiOptions(base_url=f"http://127.0.0.1:{unused_tcp_port}/v1")).preflight()
    with pytest.raises(Unavailable, match="does not answer"):
        await ApiEngine(ApiOptions(base_url="not an address")).preflight()
    async with Gateway({}) as gateway:
        with pytest.raises(Unavailable, match="refuses the key") as caught:
            await ApiEngine(ApiOptions(base_url=gateway.base_url)).preflight()
        assert "OPENAI_API_KEY" in str(caught.value.remedy)


async def test_turns_of_a_chat_policy(upstream: tuple[Upstream, str], engine: ApiEngine) -> None:
    """Fault 8: an upstream's fragments of a call are one call here; reasoning is kept; usage is the upstream's."""
    fragments = [
        chunk(role="assistant", reasoning_content="hm"),
        chunk(content="I look."),
        chunk(tool_calls=[{"index": 0, "id": "call_1", "function": {"name": "run", "arguments": ""}}]),
        chunk(tool_calls=[{"index": 0, "function": {"arguments": '{"command":'}}]),
        chunk(tool_calls=[{"index": 0, "function": {"arguments": ' "ls"}'}}]),
        chunk(tool_calls=[{"index": 1, "id": "call_2", "function": {"name": "run", "arguments": "{}"}}]),
        end("tool_calls"),
        USAGE,
    ]
    upstream[0].answers = [streams(*fragments), streams(*fragments), streams(chunk(content="done"), end(), USAGE)]
    async with Gateway({"m": ChatPolicy("m", engine)}) as gateway, aiohttp.ClientSession() as http:
        session = gateway.open_session("s", policy="m", sampling=SamplingParams(temperature=0.5, max_tokens=9))
        key = {"authorization": f"Bearer {session.api_key}"}
        url = f"{gateway.base_url}/chat/completions"
        body = ASK | {"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}}
        async with http.post(url, json=body, headers=key) as response:
            answer = await response.json()
        message = answer["choices"][0]["message"]
        assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"command": "ls"}', "{}"]
        assert (message["content"], message["reasoning_content"]) == ("I look.", "hm")
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 7}
        async with http.post(url, json=body | {"stream": True}, headers=key) as response:
            events = [json.loads(line[6:]) async for line in response.content if line.startswith(b"data: {")]
        assert sum(len(e["choices"][0]["delta"].get("tool_calls", ())) for e in events) == 2
        more = [message, {"role": "tool", "tool_call_id": "call_1", "content": "out"}]
        async with http.post(url, json={"messages": ASK["messages"] + more, "tools": [TOOL]}, headers=key) as response:
            assert (await response.json())["choices"][0]["message"]["content"] == "done"
        turns = await gateway.close_session("s")
    sent = upstream[0].bodies[0]
    assert (sent["temperature"], sent["max_tokens"]) == (0.5, 9)
    assert (sent["tool_choice"], sent["response_format"]) == ("required", {"type": "json_object"})
    assert "top_p" not in sent
    assert not turns[0].exact
    assert (turns[0].prompt_tokens, turns[0].completion_tokens, turns[0].cached_tokens) == (11, 3, 7)
    assert (len(turns[0].completion), turns[0].finish_reason, turns[0].extra) == (
        0,
        "tool_calls",
        {"model": "upstream-1"},
    )
    assert turns[2].parent in {turns[0].id, turns[1].id}
    assert upstream[0].bodies[2]["messages"][1]["tool_calls"][0]["id"] == "call_1"


@pytest.mark.parametrize(
    "chunks",
    [
        [chunk(content="a")],
        [{"error": {"message": "overloaded"}}],
        [{"choices": "x"}],
        [chunk(content=5), end()],
        [chunk(content="a"), {"choices": [], "usage": {"prompt_tokens": "many"}}, end()],
        [{"choices": [{"delta": {"tool_calls": [5]}}]}],
    ],
)
async def test_an_upstream_that_breaks_its_contract(
    upstream: tuple[Upstream, str], engine: ApiEngine, chunks: list[Any]
) -> None:
    upstream[0].answers = [streams(*chunks)]
    async with Gateway({"m": ChatPolicy("m", engine)}) as gateway, aiohttp.ClientSession() as http:
        session = gateway.open_session("s", policy="m")
        key = {"authorization": f"Bearer {session.api_key}"}
        async with http.post(f"{gateway.base_url}/chat/completions", json=ASK, headers=key) as response:
            assert response.status == 502
            assert (await response.json())["error"]["type"] == "engine_error"
        assert session.turns == []
        assert session.engine_error


async def test_a_request_that_the_upstream_refuses(upstream: tuple[Upstream, str], engine: ApiEngine) -> None:
    """A full context is the agent's affair, and it hears of it as from OpenAI itself; it is no engine failure."""
    full = {"error": {"message": "too long", "code": "context_length_exceeded"}}
    upstream[0].answers = [says(400, full), says(401, {"error": {"message": "bad key"}})]
    async with Gateway({"m": ChatPolicy("m", engine)}) as gateway, aiohttp.ClientSession() as http:
        session = gateway.open_session("s", policy="m")
        key = {"authorization": f"Bearer {session.api_key}"}
        url = f"{gateway.base_url}/chat/completions"
        async with http.post(url, json=ASK, headers=key) as response:
            assert response.status == 400
            assert (await response.json())["error"]["code"] == "context_length_exceeded"
        assert session.engine_error is None
        async with http.post(url, json=ASK, headers=key) as response:
            assert response.status == 401
        assert "bad key" in str(session.engine_error)


async def test_a_gateway_behind_a_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tokenizer(tmp_path)
    inner = ScriptedEngine(ScriptedOptions(replies=('I look. <tool_call>{"name": "run"}</tool_call>',)))
    await inner.start(str(folder))
    renderer = TemplateRenderer(TemplateOptions())
    renderer.load(folder)
    async with Gateway({"real": TokenPolicy("real", inner, renderer)}) as behind:
        monkeypatch.setenv("INNER_KEY", behind.open_session("s", policy="real").api_key)
        engine = ApiEngine(ApiOptions(base_url=behind.base_url, api_key_env="INNER_KEY"))
        await engine.start("real")
        async with Gateway({"m": ChatPolicy("m", engine)}) as gateway, aiohttp.ClientSession() as http:
            session = gateway.open_session("t", policy="m")
            key = {"authorization": f"Bearer {session.api_key}"}
            body = ASK | {"tools": [TOOL]}
            async with http.post(f"{gateway.base_url}/chat/completions", json=body, headers=key) as response:
                message = (await response.json())["choices"][0]["message"]
        (turn,) = await behind.close_session("s")
        await engine.close()
    assert message["content"] == "I look."
    assert message["tool_calls"][0]["id"] == turn.message.tool_calls[0].id
    assert message["tool_calls"][0]["function"] == {"name": "run", "arguments": "{}"}
