"""The proxy of an allow-list, talked to over a socket of this machine as a relay would hand connections to it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from rl_harness.sandboxes.allowlist import proxy as module
from rl_harness.sandboxes.allowlist.hosts import AllowedHosts
from rl_harness.sandboxes.allowlist.proxy import Dialer, Proxy

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Place:
    """A proxy with a list, and a server at every loopback address that notes who was asked what."""

    def __init__(self, proxy: Proxy, own: int, port: int, six: int, heads: list[bytes]) -> None:
        self.proxy = proxy
        self.own = own
        self.port = port
        self.six = six
        self.heads = heads

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.own)

    async def say(self, data: bytes) -> bytes:
        """All that comes back for it."""
        reader, writer = await self.open()
        writer.write(data)
        try:
            return await reader.read()
        finally:
            writer.close()

    async def connect(self, authority: str) -> bytes:
        """The first line of the answer to a CONNECT."""
        reader, writer = await self.open()
        writer.write(f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n".encode())
        line = await reader.readline()
        writer.close()
        return line.strip()


@contextlib.asynccontextmanager
async def place(*entries: str, serve: Serve | None = None) -> AsyncIterator[Place]:
    heads: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(EOFError, OSError):
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi")
            await writer.drain()
        writer.close()

    dialer = Dialer()
    proxy = Proxy(AllowedHosts(entries), dialer)
    own = await asyncio.get_running_loop().create_server(proxy.target, "127.0.0.1", 0)
    server = await asyncio.start_server(serve or answer, "0.0.0.0", 0)
    six = await asyncio.start_server(serve or answer, "::1", 0)
    ports = [each.sockets[0].getsockname()[1] for each in (own, server, six)]
    try:
        yield Place(proxy, *ports, heads)
    finally:
        for each in (own, server, six):
            each.close()
        await proxy.close()
        dialer.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 -- nothing tells
            await asyncio.sleep(0.01)


def get(url: str, *fields: str) -> bytes:
    return "\r\n".join([f"GET {url} HTTP/1.1", "Host: whatever", *fields, "", ""]).encode()


async def test_a_request_reaches_a_listed_host_as_its_own_client_would_have_sent_it() -> None:
    async with place("127.0.0.2") as here:
        fields = (
            "Proxy-Connection: keep-alive",
            "Proxy-Authorization: Basic eDp5",
            "X-Mine: 1",
            "Connection: keep-alive",
        )
        answer = await here.say(get(f"http://127.0.0.2:{here.port}/a?b=c#d", *fields))
        assert answer.endswith(b"\r\n\r\nhi")
        assert here.heads == [
            f"GET /a?b=c HTTP/1.1\r\nHost: 127.0.0.2:{here.port}\r\nConnection: close\r\nX-Mine: 1\r\n\r\n".encode()
        ]


async def test_a_body_arrives_and_a_query_without_a_path_is_one_of_the_root() -> None:
    bodies = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        bodies.append(await reader.readuntil(b"\r\n\r\n"))
        bodies.append(await reader.readexactly(100_000))
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        writer.close()

    async with place("127.0.0.2", serve=serve) as here:
        head = f"POST http://127.0.0.2:{here.port}?q HTTP/1.1\r\nContent-Length: 100000\r\n\r\n".encode()
        assert (await here.say(head + b"x" * 100_000)).startswith(b"HTTP/1.1 204")
        assert bodies[0].startswith(b"POST /?q HTTP/1.1\r\n")
        assert bodies[1] == b"x" * 100_000


async def test_a_body_in_chunks_arrives_and_what_follows_a_request_does_not() -> None:
    """Some clients send their next request before they have the answer: to another host, maybe."""
    bodies = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhi")
        writer.write_eof()
        bodies.append((await reader.read()).partition(b"\r\n\r\n")[2])
        writer.close()

    async with place("127.0.0.2", serve=serve) as here:
        url = f"http://127.0.0.2:{here.port}/"
        following = get("http://127.0.0.3/")
        chunks = b"5;x=y\r\nhello\r\n10\r\n0123456789abcdef\r\n0\r\nTrailer: t\r\n\r\n"
        for field, body in (("Transfer-Encoding: chunked", chunks), ("Content-Length: 5", b"hello"), ("X: y", b"")):
            reader, writer = await here.open()
            writer.write(get(url, field) + body + following)
            writer.write_eof()
            assert (await reader.read()).endswith(b"\r\n\r\nhi")
            writer.close()
            await until(lambda: here.proxy.connections == 0)
            assert bodies.pop() == body


@pytest.mark.parametrize(
    "body", [b"zz\r\n", b"5\r\nhello!\r\n", b"-1\r\n", b"5\r\nhel", b"9" * 40_000, b"1" * 40_000 + b"\r\n"]
)
async def test_a_malformed_chunk_ends_the_connection(body: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            await reader.read()
        writer.close()

    async with place("127.0.0.2", serve=serve) as here:
        reader, writer = await here.open()
        writer.write(get(f"http://127.0.0.2:{here.port}/", "Transfer-Encoding: chunked") + body)
        writer.write_eof()
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()


async def test_connect_carries_any_bytes_both_ways_until_both_have_ended() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.read()  # the client's end arrives while the way back is open
        writer.write(data[::-1])
        writer.close()

    async with place("127.0.0.2", serve=serve) as here:
        reader, writer = await here.open()
        writer.write(f"CONNECT 127.0.0.2:{here.port} HTTP/1.1\r\n\r\n".encode())
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 200 Connection established\r\n\r\n"
        data = bytes(range(256)) * 8000
        writer.write(data)
        writer.write_eof()
        assert await reader.read() == data[::-1]
        writer.close()


@pytest.mark.parametrize(
    "authority", ["127.0.0.2:{port}", "[::1]:{six}", "[0:0:0:0:0:0:0:1]:{six}", "[::FFFF:127.0.0.2]:{port}"]
)
async def test_addresses_of_both_versions_are_connected_to(authority: str) -> None:
    async with place("127.0.0.2", "::1") as here:
        line = await here.connect(authority.format(port=here.port, six=here.six))
        assert line == b"HTTP/1.1 200 Connection established"


async def test_a_listed_name_that_leads_to_this_machine_is_refused_unless_its_address_is_listed_too() -> None:
    async with place("localhost") as here:
        assert await here.connect(f"localhost:{here.port}") in (
            b"HTTP/1.1 403 localhost leads to 127.0.0.1",
            b"HTTP/1.1 403 localhost leads to ::1",
        )
    async with place("localhost", "127.0.0.0/8") as here:
        for name in ("localhost", "LOCALHOST", "localhost."):
            assert await here.connect(f"{name}:{here.port}") == b"HTTP/1.1 200 Connection established"


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.1",
        "0.0.0.0",
        "0",
        "2130706433",
        "0x7f000001",
        "0x7f.0.0.1",
        "0177.0.0.1",
        "127.0.0.01",
        "localhost",
        "localhost.",
        "169.254.169.254",
        "2852039166",
        "100.100.100.200",
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[::127.0.0.1]",
        "[64:ff9b::127.0.0.1]",
        "127.0.0.2.evil.example",
        "metadata.google.internal",
    ],
)
async def test_nothing_but_what_is_listed_is_reached_however_it_is_written(host: str) -> None:
    async with place("127.0.0.2", "example.org", "0.0.0.0/0", "::/0") as here:
        port = here.six if host.startswith("[") else here.port
        bare = host.strip("[]").removesuffix(".").encode()
        assert (await here.connect(f"{host}:{port}")).startswith(b"HTTP/1.1 403 " + bare + b" is not in allowed_hosts")
        answer = await here.say(get(f"http://{host}:{port}/"))
        assert answer.startswith(b"HTTP/1.1 403 ")
        assert b"this task's allowed_hosts: 127.0.0.2, example.org" in answer
        assert here.heads == []


async def test_a_name_that_is_not_listed_is_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an agent asks a resolver for arrives at the domain's owner: a message like any other."""
    asked: list[Any] = []
    real = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *given, **options: (asked.append(given[0]), real(*given, **options))[1]
    )
    async with place("localhost", "*.localhost") as here:
        asked.clear()
        await here.connect("secret.example.org:443")
        await here.say(get("http://0x7f.1/"))
        assert asked == []
        await here.connect(f"localhost:{here.port}")
        assert asked == ["localhost"]


@pytest.mark.parametrize(
    "head",
    [
        b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET https://127.0.0.2/ HTTP/1.1\r\n\r\n",
        b"GET ftp://127.0.0.2/ HTTP/1.1\r\n\r\n",
        b"GET http://user:pass@127.0.0.2/ HTTP/1.1\r\n\r\n",
        b"GET http:///x HTTP/1.1\r\n\r\n",
        b"GET http://127.0.0.2/ HTTP/2.0\r\n\r\n",
        b"GET http://127.0.0.2/\x00 HTTP/1.1\r\n\r\n",
        b"GET http://127.0.0.2/ HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET http://127.0.0.2/ HTTP/1.1\r\nX: a\r\n folded\r\n\r\n",
        b"GET http://127.0.0.2/ HTTP/1.1\r\nHost : evil\r\n\r\n",
        b"GET http://127.0.0.2/ HTTP/1.1\r\nX: a\nHost: evil\r\n\r\n",
        b"GET http://127.0.0.2/ HTTP/1.1\r\nX: a\rb\r\n\r\n",
        b"GET http://127.0.0.2/ HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET http://127.0.0.2/ HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"GET http://127.0.0.2/ HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET http://127.0.0.2/ HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"CONNECT 127.0.0.2 HTTP/1.1\r\n\r\n",
        b"CONNECT 127.0.0.2:0 HTTP/1.1\r\n\r\n",
        b"CONNECT 127.0.0.2:65536 HTTP/1.1\r\n\r\n",
        b"CONNECT 127.0.0.2:-1 HTTP/1.1\r\n\r\n",
        b"CONNECT [127.0.0.2]:80:80 HTTP/1.1\r\n\r\n",
        b"CONNECT [zz]:80 HTTP/1.1\r\n\r\n",
        b"CONNECT http://127.0.0.2:80 HTTP/1.1\r\n\r\n",
        b"CONNECT 127.0.0.2/..:80 HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        bytes(range(256)) + b"\r\n\r\n",
    ],
)
async def test_what_is_no_request_for_a_proxy_is_answered_so(head: bytes) -> None:
    async with place("127.0.0.2") as here:
        assert (await here.say(head)).startswith(b"HTTP/1.1 400 ")
        assert here.heads == []


async def test_a_head_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    async with place("127.0.0.2") as here:
        assert (await here.say(b"GET http://127.0.0.2/ HTTP/1.1\r\nX: " + b"a" * 200_000)).startswith(b"HTTP/1.1 431 ")
        monkeypatch.setattr(module, "HEAD_SECONDS", 0.1)
        assert (await here.say(b"GET http://127.0.0.2/ HT")).startswith(b"HTTP/1.1 408 ")


async def test_a_refused_client_that_is_still_sending_sees_why() -> None:
    async with place("127.0.0.2") as here:
        head = b"POST http://127.0.0.3/ HTTP/1.1\r\nContent-Length: 5000000\r\n\r\n"
        reader, writer = await here.open()
        writer.write(head)
        for _ in range(50):
            writer.write(b"x" * 100_000)
            await writer.drain()
        assert (await reader.read()).startswith(b"HTTP/1.1 403 127.0.0.3 is not in allowed_hosts\r\n")
        writer.close()


async def test_a_host_that_does_not_answer_is_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    async with place("127.0.0.2", "*.invalid") as here:
        with socket.create_server(("127.0.0.2", 0)) as closed:
            port = closed.getsockname()[1]
        assert await here.connect(f"127.0.0.2:{port}") == b"HTTP/1.1 502 127.0.0.2 is not reached"
        assert await here.connect("nobody.invalid:80") == b"HTTP/1.1 502 nobody.invalid is not reached"
        monkeypatch.setattr(module, "CONNECT_SECONDS", 0.0)
        assert await here.connect(f"127.0.0.2:{here.port}") == b"HTTP/1.1 504 127.0.0.2 does not answer"


async def test_connections_are_bounded_and_come_free_again() -> None:
    async with place("127.0.0.2") as here:
        held = [await here.open() for _ in range(module.MAX_CONNECTIONS)]
        await until(lambda: here.proxy.connections == module.MAX_CONNECTIONS)
        for _ in range(20):
            with contextlib.suppress(OSError):
                assert await here.say(get(f"http://127.0.0.2:{here.port}/")) == b""
        assert here.proxy.connections == module.MAX_CONNECTIONS
        for _, writer in held:
            writer.close()
        await until(lambda: here.proxy.connections == 0)
        assert (await here.say(get(f"http://127.0.0.2:{here.port}/"))).endswith(b"hi")


async def test_who_sends_to_a_host_that_reads_nothing_is_held_back() -> None:
    let_go = asyncio.Event()

    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reader._transport.pause_reading()  # type: ignore[attr-defined]  # or its own buffer takes some
        await let_go.wait()
        writer.close()

    async with place("127.0.0.2", serve=deaf) as here:
        reader, writer = await here.open()
        writer.write(f"CONNECT 127.0.0.2:{here.port} HTTP/1.1\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < 64 << 20:
                writer.write(b"x" * (1 << 16))
                sent += 1 << 16
                await asyncio.wait_for(writer.drain(), 1)
        assert sent < 64 << 20
        writer.transport.abort()
        let_go.set()


async def test_a_connection_on_which_nothing_moves_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    monkeypatch.setattr(module, "IDLE_SECONDS", 0.2)
    async with place("127.0.0.2", serve=silent) as here:
        reader, writer = await here.open()
        writer.write(f"CONNECT 127.0.0.2:{here.port} HTTP/1.1\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()


async def test_one_on_which_something_moves_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    monkeypatch.setattr(module, "IDLE_SECONDS", 2.0)
    async with place("127.0.0.2", serve=echo) as here:
        reader, writer = await here.open()
        writer.write(f"CONNECT 127.0.0.2:{here.port} HTTP/1.1\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
        loop = asyncio.get_running_loop()
        end = loop.time() + 2.2
        while loop.time() < end:
            writer.write(b"x")
            assert await reader.readexactly(1) == b"x"
            await asyncio.sleep(0.05)
        writer.close()


async def test_closing_breaks_what_runs_and_leaves_nothing() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with place("127.0.0.2", serve=silent) as here:
        reader, writer = await here.open()
        writer.write(f"CONNECT 127.0.0.2:{here.port} HTTP/1.1\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
        await here.proxy.close()
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        assert here.proxy.connections == 0
        writer.close()
