"""The HTTP server, over raw sockets: whatever comes is answered with a 4xx or closed, never a 500, never a hang; and
what one reader takes for a body is no request to another."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rl_harness.gateway import http as server
from rl_harness.gateway.errors import ApiError
from rl_harness.gateway.listening import listen

BODY = json.dumps({"messages": [{"role": "user", "content": "q"}]}).encode()


async def relayed(bench: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """As an agent in a sandbox is connected."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    await asyncio.get_running_loop().connect_accepted_socket(bench.gateway.inference_protocol, theirs)
    return await asyncio.open_connection(sock=ours)


async def talk(bench: Any, *sent: bytes, relay: bool = False, half_close: bool = False) -> bytes:
    """All that is answered to what is sent, until the server closes or has nothing more to say."""
    if relay:
        reader, writer = await relayed(bench)
    else:
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.gateway._port)
    answer = b""
    try:
        for piece in sent:
            writer.write(piece)
            await asyncio.sleep(0)
        async with asyncio.timeout(0.3):
            while data := await reader.read(1 << 16):
                answer += data
    except (TimeoutError, ConnectionError):
        pass
    writer.close()
    return answer


def request(
    bench: Any, body: bytes = BODY, *, method: str = "POST", path: str = "/v1/chat/completions", more: str = ""
) -> bytes:
    key = f"authorization: Bearer {bench.session.api_key}\r\n"
    return (
        f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n{key}{more}content-length: {len(body)}\r\n\r\n".encode() + body
    )


def statuses(answer: bytes) -> list[int]:
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]


async def test_requests_one_after_the_other(bench: Any) -> None:
    """Pipelined, cut anywhere: as many answers, in order."""
    data = request(bench) + request(bench, method="GET", path="/v1/models", body=b"") + request(bench)
    assert statuses(await talk(bench, data)) == [200, 200, 200]
    assert statuses(await talk(bench, *(data[at : at + 7] for at in range(0, len(data), 7)))) == [200, 200, 200]
    assert len(bench.session.turns) == 4


async def test_a_chunked_body(bench: Any) -> None:
    chunks = b"".join(b"%x;why=%b\r\n%b\r\n" % (1, b"not", BODY[at : at + 1]) for at in range(len(BODY)))
    head = request(bench, b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
    data = head + chunks + b"0\r\nauthorization: Bearer x\r\nx-trailer: y\r\n\r\n"
    assert statuses(await talk(bench, data + request(bench))) == [200, 200]


async def test_a_client_that_waits_to_be_told_to_continue(bench: Any) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", bench.gateway._port)
    data = request(bench, more="expect: 100-continue\r\n")
    writer.write(data[: -len(BODY)])
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(BODY)
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()
    refused = data.replace(bench.session.api_key.encode(), b"wrong")[: -len(BODY)]
    assert statuses(await talk(bench, refused)) == [401]


async def test_an_old_client(bench: Any) -> None:
    answer = await talk(bench, request(bench).replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"host: localhost\r\n", b""))
    assert statuses(answer) == [200]
    assert b"connection: close\r\n" in answer
    streamed = BODY[:-1] + b', "stream": true}'
    answer = await talk(bench, request(bench, streamed).replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert b"chunked" not in answer
    assert answer.endswith(b"data: [DONE]\n\n")


async def test_an_upgrade_is_answered_as_the_request_it_is(bench: Any) -> None:
    for name in ("h2c", "websocket"):
        more = f"connection: upgrade\r\nupgrade: {name}\r\n"
        assert statuses(await talk(bench, request(bench, more=more))) == [200]
        asked = request(bench, b"", method="GET", path="/v1/responses", more=more)
        assert statuses(await talk(bench, asked + b"\x81\x05hello")) == [426]


def smuggled(bench: Any) -> list[bytes]:
    """Requests whose length one reader sees otherwise than another; each hides a second one."""
    inner = request(bench)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {bench.session.api_key}\r\n".encode()
    )
    n = len(inner) + len(BODY)
    return [
        head + b"content-length: %d\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" % n + inner,
        head + b"transfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n0\r\n\r\n" + inner,
        head + b"content-length: 0\r\ncontent-length: %d\r\n\r\n" % n + inner,
        head + b"content-length: %d, 0\r\n\r\n" % n + inner,
        head + b"content-length: +0\r\n\r\n" + inner,
        head + b"content-length: -1\r\n\r\n" + inner,
        head + b"content-length: 0x0\r\n\r\n" + inner,
        head + b"content-length: 99999999999999999999999999\r\n\r\n" + inner,
        head + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n" + inner,
        head + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n" + inner,
        head + b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n\r\n0\r\n\r\n" + inner,
        head + b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n" + inner,
        head + b"transfer-encoding:\x0bchunked\r\n\r\n0\r\n\r\n" + inner,
        head + b" transfer-encoding: chunked\r\n\r\n0\r\n\r\n" + inner,
        head + b"transfer-encoding: chunked\r\n\r\n0x0\r\n\r\n" + inner,
        head + b"transfer-encoding: chunked\r\n\r\n-1\r\n\r\n" + inner,
        head + b"transfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n\r\n" + inner,
        head + b"content-length: 0\nx: y\r\n\r\n" + inner,
        head + b"x: y\rcontent-length: 0\r\n\r\n" + inner,
        head + b"authorization: Bearer other\r\ncontent-length: 0\r\n\r\n" + inner,
        head + b"host: other\r\ncontent-length: 0\r\n\r\n" + inner,
        head.replace(b"host: x\r\n", b"") + b"content-length: 0\r\n\r\n" + inner,
        head + b"x: \x00\r\ncontent-length: 0\r\n\r\n" + inner,
    ]


@pytest.mark.parametrize("relay", [False, True])
async def test_nothing_is_smuggled(bench: Any, relay: bool) -> None:
    """Refused, and the connection with it: what follows is never read as a request."""
    for data in smuggled(bench):
        answer = await talk(bench, data.replace(b"host: x\r\n", b"host: localhost\r\n"), relay=relay)
        assert statuses(answer) == [400], data[:300]
    assert bench.session.turns == []


@pytest.mark.parametrize("relay", [False, True])
async def test_a_relayed_agent_cannot_choose_its_host_or_scheme(bench: Any, relay: bool) -> None:
    """A whole address in the request line is a path here, whatever it names."""
    for target in ("http://127.0.0.1:1/v1/models", "http://evil.example/v1/models", "/v1/models?x=/rl#y"):
        data = request(bench, b"", method="GET", path=target)
        assert statuses(await talk(bench, data, relay=relay)) == [200], target
    for target in ("127.0.0.1:22", "*", "http://127.0.0.1:1", "/v1/models/../../health", "/%76%31/models"):
        for method in ("GET", "PUT"):
            data = request(bench, b"", method=method, path=target)
            assert statuses(await talk(bench, data, relay=relay)) in ([404], [400]), target
    assert statuses(await talk(bench, request(bench, b"", method="CONNECT", path="127.0.0.1:22"), relay=relay)) == [404]


async def test_heads_have_a_limit(bench: Any) -> None:
    for data in (
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 1_000_000,
        b"GET / HTTP/1.1\r\nhost: localhost\r\n" + b"".join(b"x%d: y\r\n" % n for n in range(300)) + b"\r\n",
    ):
        assert statuses(await talk(bench, data)) == [431]


async def test_framing_and_trailers_have_a_limit(bench: Any) -> None:
    head = request(bench, b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
    for data in (
        head + b"1\r\n{\r\n0\r\nx: " + b"a" * 1_000_000,
        head + b"1;" + b"a" * 1_000_000,
        head + b"0\r\n" + b"x: y\r\n" * 100_000,
    ):
        assert statuses(await talk(bench, data)) in ([400], [431])


async def test_a_large_body_without_a_key_is_not_read(bench: Any) -> None:
    """Refused at once; the client gets to read why although it goes on sending."""
    data = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 30000000\r\n\r\n" + b"x" * 3_000_000
    )
    answer = await talk(bench, data)
    assert statuses(answer) == [401]
    assert b"connection: close" in answer


async def test_a_slow_head_and_a_slow_body_are_given_up(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.05)
    monkeypatch.setattr(server, "PROGRESS_SECONDS", 0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", bench.gateway._port)
    writer.write(b"POST /v1")
    async with asyncio.timeout(10):
        assert await reader.read() == b""
    writer.close()
    reader, writer = await asyncio.open_connection("127.0.0.1", bench.gateway._port)
    writer.write(request(bench)[:-5])
    async with asyncio.timeout(10):
        assert (await reader.readline()).startswith(b"HTTP/1.1 408")
    writer.close()
    assert bench.gateway._sessions._by_id["s"].bodies.used == 0


async def test_connections_leave_nothing_behind(bench: Any) -> None:
    for data in (b"", b"GET", b"\x00" * 10, request(bench)[:-3], request(bench)):
        await talk(bench, data)
    async with asyncio.timeout(10):
        while bench.gateway._server.connections or bench.gateway._server.tasks:  # noqa: ASYNC110 - announces nothing
            await asyncio.sleep(0.01)
    assert not bench.session.running
    assert bench.gateway._bodies.used == bench.session.bodies.used == bench.session.calls.used == 0


LINE = st.sampled_from([b"POST", b"GET", b"HEAD", b"OPTIONS", b"PUT", b"PRI", b"", b"get", b"CONNECT"])
TARGET = st.one_of(
    st.sampled_from(
        [b"/v1/chat/completions", b"/v1/messages", b"/v1/responses", b"/s/x/v1/messages", b"/s//", b"/s/", b"*", b"//"]
    ),
    st.binary(max_size=20).map(lambda tail: b"/" + tail),
)
KEY = st.sampled_from([b"authorization: Bearer KEY\r\n", b"x-api-key: KEY\r\n", b"authorization: Bearer\r\n", b""])
HEADER = st.one_of(
    st.sampled_from(
        [
            b"host: localhost\r\n",
            b"content-length: 5\r\n",
            b"transfer-encoding: chunked\r\n",
            b"expect: 100-continue\r\n",
            b"connection: close\r\n",
            b"connection: upgrade\r\nupgrade: websocket\r\n",
            b"anthropic-version: 2023-06-01\r\n",
            b"x-stainless-retry-count: 1\r\n",
            b"content-encoding: gzip\r\n",
        ]
    ),
    st.tuples(st.binary(max_size=8), st.binary(max_size=8)).map(lambda pair: b"%b: %b\r\n" % pair),
)
CONTENT = st.one_of(
    st.just(BODY),
    st.just(BODY[:-1] + b', "stream": true}'),
    st.binary(max_size=30),
    st.lists(st.binary(min_size=1, max_size=9), max_size=4).map(
        lambda chunks: b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    ),
)


@st.composite
def raw_requests(draw: Any) -> bytes:
    """Nearly right, or not at all."""
    head = (
        draw(LINE)
        + b" "
        + draw(TARGET)
        + draw(st.sampled_from([b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", b"\r\n", b" X\r\n"]))
    )
    head += draw(st.sampled_from([b"host: localhost\r\n", b""])) + draw(KEY)
    head += b"".join(draw(st.lists(HEADER, max_size=3)))
    content = draw(CONTENT)
    head += draw(st.sampled_from([b"content-length: %d\r\n" % len(content), b""]))
    data = head + b"\r\n" + content
    cut = draw(st.integers(0, len(data)))
    return data if draw(st.booleans()) else data[:cut] + draw(st.binary(max_size=4)) + data[cut:]


@given(parts=st.lists(raw_requests(), min_size=1, max_size=3), relay=st.booleans(), size=st.integers(1, 400))
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
async def test_whatever_is_sent(bench: Any, parts: list[bytes], relay: bool, size: int) -> None:
    """Never a 500, never a hang, and the next client is served."""
    data = b"".join(parts).replace(b"KEY", bench.session.api_key.encode())
    reader, writer = await relayed(bench) if relay else await asyncio.open_connection("127.0.0.1", bench.gateway._port)
    try:
        for at in range(0, len(data), size):
            writer.write(data[at : at + size])
            await asyncio.sleep(0)
        with contextlib.suppress(OSError):  # it may have hung up by now
            writer.write_eof()
        async with asyncio.timeout(10):
            answer = await reader.read()
    except (ConnectionError, RuntimeError):  # closed before all was sent
        answer = b""
    writer.close()
    assert all(status < 500 for status in statuses(answer)), answer
    assert statuses(
        await talk(bench, request(bench, b"", method="GET", path="/v1/models", more="connection: close\r\n"))
    ) == [200]


def test_on_uvloop() -> None:
    """Its transports differ from asyncio's in kind, and in what they refuse once they are closing."""
    uvloop = pytest.importorskip("uvloop")

    async def main() -> list[int]:
        async def handle(exchange: Any) -> None:
            try:
                await exchange.respond(200, await exchange.body(100))
            except ApiError as error:
                await exchange.respond(error.status, b"")

        serving = server.HttpServer(handle)
        listening = listen("127.0.0.1", 0)
        await serving.listen(listening)
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: "
        writer.write((head + b"5\r\n\r\nhello") * 2 + head + b"101\r\n\r\n")
        answer = await reader.readuntil(b"413 ")
        answer += await reader.read()
        writer.close()
        await serving.close()
        return statuses(answer)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(main()) == [200, 200, 413]
