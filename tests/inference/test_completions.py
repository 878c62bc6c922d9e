"""The engine for servers of token ids, against a real HTTP server that answers in vLLM's form."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from rl_harness.contracts import GenerateRequest, TokenChunk
from rl_harness.errors import EngineError, RequestRefused, Unavailable, UnknownModel
from rl_harness.gateway import Gateway, TokenPolicy
from rl_harness.gateway.renderers.template import TemplateOptions, TemplateRenderer
from rl_harness.inference import Replicas
from rl_harness.inference.completions import CompletionsEngine, CompletionsOptions, _Reply
from rl_harness.records import SamplingParams
from rl_harness.records.arrays import ids
from rl_harness.testing.tokenizer import write_tokenizer

Answer = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


def event(tokens: list[int], finish: str | None = None, values: list[float | None] | None = None) -> bytes:
    given = [-0.5 - token for token in tokens] if values is None else values
    top = [{f"token_id:{token}": -0.5, "token_id:7": -2.0} for token in tokens]
    choice = {"token_ids": tokens, "logprobs": {"token_logprobs": given, "top_logprobs": top}, "finish_reason": finish}
    return b"data: " + json.dumps({"object": "text_completion", "choices": [choice]}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


class Server:
    """``answer`` serves completions; ``bodies`` and ``connections`` are what came."""

    def __init__(self) -> None:
        self.answer: Answer = streamed(event([1]), event([2, 3]), event([4], "stop"), DONE)
        self.models: Any = {"data": [{"id": "served", "max_model_len": 100}]}
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.connections: set[Any] = set()
        self.gone = asyncio.Event()
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Also after :meth:`stop`, at the same address."""
        application = web.Application(client_max_size=1 << 24)
        application.router.add_post("/v1/completions", self.completions)
        application.router.add_get("/v1/models", self.list_models)
        self._runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        port = urlsplit(self.url).port if self.url else 0
        await web.TCPSite(self._runner, "127.0.0.1", port, reuse_address=True).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def stop(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("authorization"))
        self.connections.add(request.transport)
        if not body.get("stream"):
            given = {"choices": [{"token_ids": [5], "logprobs": {"token_logprobs": [0.0]}, "finish_reason": "length"}]}
            return web.json_response(self.tried if self.tried is not None else given)
        try:
            return await self.answer(request, body)
        except (ConnectionResetError, asyncio.CancelledError):
            self.gone.set()
            raise

    tried: Any = None

    async def list_models(self, request: web.Request) -> web.StreamResponse:
        if isinstance(self.models, int):
            return web.Response(status=self.models)
        return web.json_response(self.models)


def streamed(*pieces: bytes) -> Answer:
    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(0)
        await response.write_eof()
        return response

    return answer


def refused(status: int, body: Any) -> Answer:
    async def answer(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        return web.json_response(body, status=status)

    return answer


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_tokenizer(tmp_path / "model"))


@pytest_asyncio.fixture
async def engine(server: Server, model: str) -> AsyncIterator[CompletionsEngine]:
    engine = CompletionsEngine(CompletionsOptions(base_url=server.url, idle_timeout=30))
    await engine.start(model)
    yield engine
    await engine.close()


def request(**sampling: Any) -> GenerateRequest:
    return GenerateRequest(id="r", prompt=ids([9, 8]), sampling=SamplingParams(max_tokens=5, **sampling))


async def complete(engine: CompletionsEngine, asked: GenerateRequest | None = None) -> list[TokenChunk]:
    return [chunk async for chunk in engine.generate(asked or request())]


@asynccontextmanager
async def served(engine: CompletionsEngine, model: str) -> AsyncIterator[Any]:
    """A gateway before the engine; what is yielded asks it something and returns status and body."""
    renderer = TemplateRenderer(TemplateOptions())
    renderer.load(Path(model))
    gateway = Gateway({"m": TokenPolicy("m", Replicas([engine]), renderer)})
    asked = {"model": "m", "max_tokens": 5}
    hello = [{"role": "user", "content": "hello"}]

    async def ask(path: str = "chat/completions") -> tuple[int, Any]:
        session = gateway.open_session(f"s{next(numbers)}", policy="m")
        headers = {"authorization": f"Bearer {session.api_key}"}
        body = asked | {"input" if path == "responses" else "messages": hello}
        async with http.post(f"{gateway.base_url}/{path}", json=body, headers=headers) as response:
            return response.status, await response.json()

    numbers = itertools.count()
    async with gateway, aiohttp.ClientSession() as http:
        yield ask


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110 -- nothing tells of it
            await asyncio.sleep(0.005)


async def test_ids_go_in_and_come_out_with_their_log_probs(server: Server, engine: CompletionsEngine) -> None:
    chunks = await complete(engine, request(temperature=0.5, seed=3, stop=("x",), stop_token_ids=(4,), top_k=2))
    assert np.concatenate([chunk.ids for chunk in chunks]).tolist() == [1, 2, 3, 4]
    assert np.concatenate([chunk.logps for chunk in chunks]).tolist() == [-1.5, -2.5, -3.5, -4.5]
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["stop"]
    body = server.bodies[0]
    assert body["prompt"] == [9, 8]
    assert (body["model"], body["max_tokens"], body["temperature"], body["seed"]) == ("served", 5, 0.5, 3)
    assert (body["stop"], body["stop_token_ids"], body["top_k"]) == (["x"], [4], 2)


async def test_the_stream_may_be_cut_into_pieces_anywhere(server: Server, engine: CompletionsEngine) -> None:
    whole = event([1]) + event([2, 3]) + event([4], "length") + DONE
    for size in (1, 2, 7, 50, len(whole)):
        server.answer = streamed(*(whole[start : start + size] for start in range(0, len(whole), size)))
        chunks = await complete(engine)
        assert np.concatenate([chunk.ids for chunk in chunks]).tolist() == [1, 2, 3, 4]
        assert chunks[-1].finish_reason == "length"


async def test_a_connection_is_used_again_also_by_who_stops_at_the_last_token(
    server: Server, engine: CompletionsEngine
) -> None:
    for _ in range(5):
        stream = engine.generate(request())
        async for chunk in stream:
            if chunk.finish_reason:
                break
        await stream.aclose()
        await until(lambda: bool(engine._client and engine._client._idle))
    assert len(server.connections) == 1


async def test_whoever_goes_in_between_ends_the_generation(server: Server, engine: CompletionsEngine) -> None:
    async def endless(asked: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(asked)
        while True:
            await response.write(event([1]))
            await asyncio.sleep(0.01)

    server.answer = endless
    stream = engine.generate(request())
    await anext(stream)
    await stream.aclose()
    await asyncio.wait_for(server.gone.wait(), 20)


async def bytes_of_a_server(*said: bytes | asyncio.Event) -> tuple[asyncio.Server, CompletionsEngine]:
    """A server that answers its first request with these bytes, where there is an event after it is set; any other as
    a server should. And an engine before it, which is not to wait long for what does not come."""
    well = streamed_bytes(event([1]) + event([2], "stop") + DONE)
    connections = itertools.count()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = next(connections) == 0
        with contextlib.suppress(EOFError, OSError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
                for one in said if first else [well]:
                    if isinstance(one, asyncio.Event):
                        await one.wait()
                    else:
                        writer.write(one)
                first = False
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    engine = CompletionsEngine(CompletionsOptions(base_url=f"http://127.0.0.1:{port}/v1", idle_timeout=1))
    engine._client = engine._connection()
    return server, engine


def streamed_bytes(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 100_000,  # no end of a head
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nhello",
        b"220 mail.example ESMTP\r\n\r\n",
    ],
    ids=["head", "upgrade", "other"],
)
async def test_what_is_no_answer_is_the_engines_failure(said: bytes, caplog: pytest.LogCaptureFixture) -> None:
    server, engine = await bytes_of_a_server(said)
    async with asyncio.timeout(20), server:
        with pytest.raises(EngineError):
            await complete(engine)
        assert len(await complete(engine)) > 0
        await engine.close()
    assert not caplog.records  # that reading it failed otherwise than foreseen


async def test_what_nobody_asked_for_is_no_answer_to_what_is_asked_next() -> None:
    """Nor is its connection handed out twice."""
    again = asyncio.Event()
    answer = streamed_bytes(event([5]) + event([6], "stop") + DONE)
    server, engine = await bytes_of_a_server(answer, again, answer)
    async with asyncio.timeout(20), server:
        async for chunk in engine.generate(request()):
            assert 6 in chunk.ids or not chunk.finish_reason
        client = engine._client
        assert client is not None
        assert len(client._idle) == 1
        again.set()
        await until(lambda: not client._all)
        for chunks in await asyncio.gather(complete(engine), complete(engine)):
            assert np.concatenate([chunk.ids for chunk in chunks]).tolist() == [1, 2]
        await engine.close()


async def test_a_field_needs_no_space_after_its_colon(server: Server, engine: CompletionsEngine) -> None:
    server.answer = streamed(event([1]).replace(b"data: ", b"data:"), event([2], "stop").replace(b"data: ", b"data:"))
    assert np.concatenate([chunk.ids for chunk in await complete(engine)]).tolist() == [1, 2]


async def test_a_server_that_was_restarted_is_asked_anew(server: Server, engine: CompletionsEngine) -> None:
    """A kept connection that the other side has closed is no failure."""
    await complete(engine)
    for transport in server.connections:
        transport.close()
    await until(lambda: not (engine._client and engine._client._all))
    assert len(await complete(engine)) > 0


async def test_top_log_probs_are_by_id(server: Server, engine: CompletionsEngine) -> None:
    chunks = await complete(engine, request(top_logprobs=2))
    assert next(top for chunk in chunks for top in chunk.top_logprobs) == {1: -0.5, 7: -2.0}


async def test_an_aborted_completion_is_interrupted(server: Server, engine: CompletionsEngine) -> None:
    server.answer = streamed(event([1]), event([], "abort"), DONE)
    assert (await complete(engine))[-1].finish_reason == "interrupted"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (streamed(event([1])), "without a finish reason"),
        (streamed(b'data: {"error": {"message": "out of memory"}}\n\n'), "out of memory"),
        (streamed(b"data: {nonsense}\n\n"), "no completion"),
        (streamed(event([1, 2], values=[-1.0])), "1 log-probs for 2 tokens"),
        (streamed(event([1, 2], values=[-1.0, None])), "token_logprobs"),
        (streamed(event([1], "content_filter")), "content_filter"),
        (streamed(event([-1])), "no completion"),
        (streamed(event([1 << 31])), "no completion"),
        (streamed(event([1 << 70])), "no completion"),
        (streamed(b'data: {"other": ' + b"[" * 5000 + b"]" * 5000 + b"}\n\n"), "no completion"),
        (refused(503, {"error": {"message": "loading"}}), "503: loading"),
        (streamed(event([5], "stop") + event([6, 7], "length")), "more than the one completion"),
        (
            streamed(event([5]) + event([6], "stop").replace(b'"token_ids"', b'"index": 1, "token_ids"')),
            "more than the",
        ),
        (streamed(event([5], "stop", values=[5.0])), "log-prob of 5.0"),
    ],
)
async def test_what_goes_wrong_is_the_engines(
    server: Server, engine: CompletionsEngine, answer: Answer, says: str
) -> None:
    server.answer = answer
    with pytest.raises(EngineError, match=says) as failure:
        await complete(engine)
    assert not isinstance(failure.value, RequestRefused)


async def test_a_refused_request_is_the_clients(server: Server, engine: CompletionsEngine) -> None:
    server.answer = refused(400, {"message": "prompt too long", "type": "BadRequestError"})
    with pytest.raises(RequestRefused, match="prompt too long"):
        await complete(engine)


async def test_a_server_that_is_away_is_an_engine_error(engine: CompletionsEngine, model: str) -> None:
    away = CompletionsEngine(CompletionsOptions(base_url="http://127.0.0.1:9/v1"))
    with pytest.raises(Unavailable, match="does not answer"):
        await away.preflight()
    with pytest.raises(Unavailable, match="no http"):
        await CompletionsEngine(CompletionsOptions(base_url="ftp://x")).preflight()


async def test_calls_wait_for_a_server_that_restarts(
    server: Server, engine: CompletionsEngine, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that it was answering, which go on from their last token, and those that come while it is away."""
    begun = asyncio.Event()

    async def dying(asked: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(asked)
        await response.write(event([1]))
        begun.set()
        await asyncio.Event().wait()
        return response

    server.answer = dying
    async with served(engine, model) as ask:
        first = asyncio.create_task(ask())
        await begun.wait()
        await server.stop()
        second = asyncio.create_task(ask())
        await until(lambda: caplog.text.count("is tried again") > 1)
        server.answer = streamed(event([2, 3]), event([4], "stop"), DONE)
        await server.start()
        assert [(await first)[0], (await second)[0]] == [200, 200]
    begins, *later = [body["prompt"] for body in server.bodies]
    assert sorted(later, key=len) == [begins, [*begins, 1]]


@pytest.mark.parametrize(
    ("path", "kind"), [("chat/completions", "engine_error"), ("messages", "api_error"), ("responses", "engine_error")]
)
async def test_a_server_that_stays_away_is_the_protocols_own_error(
    server: Server, model: str, path: str, kind: str
) -> None:
    engine = CompletionsEngine(CompletionsOptions(base_url=server.url, patience=0.3))
    await engine.start(model)
    await server.stop()
    async with served(engine, model) as ask:
        status, body = await ask(path)
    assert status == 502
    assert body["error"]["type"] == kind
    assert "Connect" in body["error"]["message"]
    await server.start()
    await engine.close()


async def test_what_a_server_refuses_for_good_is_not_asked_again(server: Server, engine: CompletionsEngine) -> None:
    """A key that became wrong, say: nobody waits for the patience to end."""
    server.answer = refused(401, {"message": "this key has expired"})
    with pytest.raises(EngineError, match="expired"):
        [chunk async for chunk in Replicas([engine]).generate(request())]
    assert len(server.bodies) == 1


async def test_the_model_is_found(server: Server, engine: CompletionsEngine, model: str) -> None:
    assert engine.capabilities.context_length == 100
    await engine.preflight()
    await engine.preflight_model(model)
    with pytest.raises(UnknownModel):
        await engine.preflight_model(model + "nowhere")
    server.models = {"data": [{"id": "one"}, {"id": "two"}]}
    with pytest.raises(Unavailable, match="serves one, two"):
        await engine.preflight()
    server.models = 401
    with pytest.raises(Unavailable, match="refuses the key"):
        await engine.preflight()


@pytest.mark.parametrize(
    ("tried", "says"),
    [
        ({"choices": [{"text": "x", "finish_reason": "length"}]}, "no token ids"),
        ({"choices": [{"token_ids": [5], "logprobs": {"token_logprobs": [-0.7]}}]}, "another distribution"),
        ({"choices": []}, "as expected"),
    ],
)
async def test_a_server_that_cannot_be_recorded_exactly_is_refused(
    server: Server, engine: CompletionsEngine, tried: Any, says: str
) -> None:
    server.tried = tried
    with pytest.raises(Unavailable, match=says):
        await engine.preflight()


async def test_the_key_comes_from_the_environment(server: Server, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "secret")
    engine = CompletionsEngine(CompletionsOptions(base_url=server.url, api_key_env="SOME_KEY"))
    await engine.start(model)
    await complete(engine)
    await engine.close()
    assert server.keys == ["Bearer secret"]


@given(data=st.data())
def test_however_a_stream_is_written_and_cut_its_tokens_are_the_same(data: st.DataObject) -> None:
    ends = data.draw(st.sampled_from([b"\n\n", b"\r\n\r\n"]))
    between = st.sampled_from([b"", b": keep-alive" + ends, b"event: completion" + ends[: len(ends) // 2]])
    events = [event([1]), event([2, 3]), event([4], "stop")]
    stream = b"".join(data.draw(between) + one.rstrip() + ends for one in events) + data.draw(between) + b"data: [DONE]"
    stream += ends
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=6)))
    reply, chunks = _Reply(tops=False), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        chunk = reply.add(stream[start:end])
        if chunk is not None:
            chunks.append(chunk)
    assert [token for chunk in chunks for token in chunk.ids] == [1, 2, 3, 4]
    assert [value for chunk in chunks for value in chunk.logps] == [-1.5, -2.5, -3.5, -4.5]
    assert reply.over
