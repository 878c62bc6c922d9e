"""An HTTP forward proxy for one sandbox: ``CONNECT``, and requests with a whole address. It connects to allowed hosts
only, at an address that it resolved and judged itself, and passes bytes on: TLS stays between client and server.

Whoever talks to it may be hostile: heads, connections, look-ups, buffers and time are bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import re
import socket
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from rl_harness.hosts import DOMAIN
from rl_harness.sandboxes.allowlist.hosts import Address, AllowedHosts

log = logging.getLogger("rl_harness.sandboxes.allowlist")

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

#: Of one sandbox at once; those beyond are reset.
MAX_CONNECTIONS = 128
#: Names of one sandbox looked up at once: one that floods the resolver keeps no other from it.
MAX_LOOKUPS = 4
#: Bytes of a request's line and header fields.
HEAD_LIMIT = 32 << 10
#: Seconds for a whole head to arrive, and for a host to be found and to answer.
HEAD_SECONDS = 30.0
CONNECT_SECONDS = 30.0
#: Of these for each address of a host that has several.
ADDRESS_SECONDS = 8.0
#: Seconds without a byte in either direction after which a connection is given up.
IDLE_SECONDS = 600.0
#: Seconds that a client has to take the last of its answer.
LINGER_SECONDS = 5.0
_CHUNK = 1 << 16

_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_REQUEST_LINE = re.compile(rb"(" + _TOKEN + rb") ([\x21-\x7e]+) (HTTP/1\.[01])")
_FIELD = re.compile(rb"(" + _TOKEN + rb"):[\t\x20-\x7e\x80-\xff]*")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})[\t ]*(;[\t\x20-\x7e\x80-\xff]*)?\r\n")
_AUTHORITY = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[^\[\]:@]+))(?::(?P<port>[0-9]{1,5}))?")
_URL = re.compile(r"http://(?P<authority>[^/?#]*)(?P<path>[^#]*)(?:#.*)?", re.IGNORECASE)
#: Fields for us and not for the server, which is asked one request a connection.
_OURS = {
    b"connection",
    b"host",
    b"keep-alive",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"proxy-connection",
    b"te",
    b"upgrade",
}


class Refused(Exception):
    """What a client is answered instead of a connection: a status, and a reason fit for its line."""

    def __init__(self, status: int, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.detail = detail


class Request(NamedTuple):
    """Where a client wants to go, and the head that the server there gets; None to be connected only. ``body`` is how
    long what follows it is, None where its chunks say so."""

    host: str
    port: int
    head: bytes | None = None
    body: int | None = 0


def parse(head: bytes) -> Request:
    """The request of a head without the empty line that ends it. Raises :class:`Refused` for what is none."""
    first, *fields = head.split(b"\r\n")
    found = _REQUEST_LINE.fullmatch(first)
    if found is None:
        raise Refused(400, "this is an HTTP proxy and that is no HTTP request")
    method, target, version = found[1], found[2].decode("ascii"), found[3]
    names = [match[1].lower() if (match := _FIELD.fullmatch(field)) else None for field in fields]
    if None in names:
        raise Refused(400, "a header field is malformed")
    if method == b"CONNECT":
        return Request(*_authority(target, None))
    url = _URL.fullmatch(target)
    if url is None:
        raise Refused(400, "this is a proxy: it takes CONNECT host:port, and requests for http://host/path")
    host, port = _authority(url["authority"], 80)
    path = url["path"] if url["path"].startswith("/") else "/" + url["path"]
    kept = [field for field, name in zip(fields, names, strict=True) if name not in _OURS]
    lines = [
        b"%s %s %s" % (method, path.encode("ascii"), version),
        b"Host: " + url["authority"].encode("ascii"),
        b"Connection: close",
        *kept,
    ]
    return Request(host, port, b"\r\n".join(lines) + b"\r\n\r\n", _body_length(fields))


def _body_length(fields: Iterable[bytes]) -> int | None:
    values: dict[bytes, set[bytes]] = {}
    for field in fields:
        name, _, value = field.partition(b":")
        values.setdefault(name.lower(), set()).add(value.strip().lower())
    lengths, codings = values.get(b"content-length", set()), values.get(b"transfer-encoding", set())
    if codings == {b"chunked"} and not lengths:
        return None
    if codings or len(lengths) > 1 or not all(_LENGTH.fullmatch(length) for length in lengths):
        raise Refused(400, "how long the request is cannot be told")
    return int(lengths.pop()) if lengths else 0


def _authority(text: str, default: int | None) -> tuple[str, int]:
    found = _AUTHORITY.fullmatch(text)
    port = found["port"] if found is not None else None
    if found is None or (port is None and default is None):
        raise Refused(400, "the address is no host:port")
    number = default if port is None else int(port)
    if number is None or not 0 < number < 65536:
        raise Refused(400, "the address has no such port")
    host = found["six"] or found["host"].lower().removesuffix(".")
    if _literal(host) is None and (found["six"] or not DOMAIN.fullmatch(host)):
        raise Refused(400, "the address has no valid host")
    return host, number


def _literal(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


class Dialer:
    """Looks names up and connects, for all sandboxes of a provider."""

    def __init__(self) -> None:
        # Not the loop's own threads: a resolver that hangs must not keep the rest of the program from them.
        self._threads = ThreadPoolExecutor(32, thread_name_prefix="allow-list")

    async def addresses(self, host: str, port: int) -> list[Address]:
        """Raises ``OSError`` where there is none."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(
                self._threads, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            )
        except UnicodeError as error:
            raise OSError(str(error)) from None
        return list(dict.fromkeys(ipaddress.ip_address(str(each[4][0]).partition("%")[0]) for each in found))

    async def connect(self, addresses: Iterable[Address], port: int) -> Streams:
        """To the first that answers. Raises the last one's ``OSError``."""
        error = OSError("it has no address")
        for address in addresses:
            try:
                async with asyncio.timeout(ADDRESS_SECONDS):
                    return await asyncio.open_connection(str(address), port, limit=_CHUNK)
            except TimeoutError:
                error = OSError(f"{address} does not answer")
            except OSError as failure:
                error = failure
        raise error

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class Proxy:
    """Answers the connections made in one sandbox. :meth:`target` is a relay's."""

    def __init__(self, hosts: AllowedHosts, dialer: Dialer) -> None:
        self._hosts = hosts
        self._dialer = dialer
        self._tasks: set[asyncio.Task[None]] = set()
        self._lookups = asyncio.Semaphore(MAX_LOOKUPS)

    def target(self) -> asyncio.Protocol:
        """What answers one connection. Raises ``OSError`` when there are too many."""
        # What is still being ended counts too, so that opening and breaking connections buys nothing.
        if len(self._tasks) >= MAX_CONNECTIONS:
            raise OSError(f"more than {MAX_CONNECTIONS} connections to the proxy")
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(limit=HEAD_LIMIT), self._accepted)

    @property
    def connections(self) -> int:
        return len(self._tasks)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Break every connection. Idempotent."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            try:
                request, outside = await self._admitted(reader)
            except Refused as refusal:
                await _answer(refusal, reader, writer)
            else:
                await self._carry(request, (reader, writer), outside)
        except (OSError, EOFError, asyncio.LimitOverrunError) as error:
            log.debug("a connection through an allow-list's proxy broke: %s", error)
        except Exception:
            log.exception("an allow-list's proxy")
        finally:
            writer.transport.abort()

    async def _admitted(self, reader: asyncio.StreamReader) -> tuple[Request, Streams]:
        """The next request, and the connection it is for. Raises :class:`Refused`."""
        try:
            async with asyncio.timeout(HEAD_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
        except TimeoutError:
            raise Refused(408, f"no whole request came within {HEAD_SECONDS:g} s") from None
        except asyncio.LimitOverrunError:
            raise Refused(431, f"the request's head is longer than {HEAD_LIMIT} bytes") from None
        request = parse(head[:-4])
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                addresses = await self._allowed(request.host, request.port)
                return request, await self._dialer.connect(addresses, request.port)
        except TimeoutError:
            raise Refused(504, f"{request.host} does not answer") from None
        except OSError as error:
            raise Refused(502, f"{request.host} is not reached", str(error)) from None

    async def _allowed(self, host: str, port: int) -> list[Address]:
        """The addresses of a host that may be connected to. A name that is not listed is not even looked up, because a
        look-up carries it to servers of whoever owns the domain."""
        literal = _literal(host)
        listed = self._hosts.names(host) if literal is None else self._hosts.admits(literal, named=False)
        if not listed:
            entries = ", ".join(self._hosts.entries[:20]) or "none"
            raise Refused(403, f"{host} is not in allowed_hosts", f"this task's allowed_hosts: {entries}")
        if literal is not None:
            return [literal]
        async with self._lookups:
            found = await self._dialer.addresses(host, port)
        admitted = [address for address in found if self._hosts.admits(address, named=True)]
        if found and not admitted:
            raise Refused(
                403,
                f"{host} leads to {found[0]}",
                "an address that is not public is reached only where allowed_hosts has it too",
            )
        return admitted

    async def _carry(self, request: Request, inside: Streams, outside: Streams) -> None:
        try:
            if request.head is None:
                inside[1].write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                outside[1].write(request.head)
            async with asyncio.timeout(IDLE_SECONDS) as idle:
                loop = asyncio.get_running_loop()

                def active() -> None:
                    if not idle.expired():
                        idle.reschedule(loop.time() + IDLE_SECONDS)

                await _both(
                    _pass(inside[0], outside[1], active)
                    if request.head is None
                    else _pass_request(inside[0], outside[1], active, request.body),
                    _pass(outside[0], inside[1], active),
                )
            async with asyncio.timeout(LINGER_SECONDS):
                for _, writer in (inside, outside):
                    writer.close()
                    await writer.wait_closed()
        finally:
            outside[1].transport.abort()


async def _both(*work: Coroutine[Any, Any, None]) -> None:
    """Run them side by side; the first that fails ends the others."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, active: Callable[[], None]) -> None:
    while data := await reader.read(_CHUNK):
        active()
        writer.write(data)
        await writer.drain()
        active()
    writer.write_eof()


async def _pass_request(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, active: Callable[[], None], length: int | None
) -> None:
    """A request's body and no more: a server that closes on what it does not read takes its own answer back. Whatever
    else a client sends, such as its next request, it sends again, having been told that the connection ends."""

    async def pass_bytes(count: int) -> None:
        while count:
            data = await reader.read(min(count, _CHUNK))
            if not data:
                raise EOFError("the request is not whole")
            active()
            writer.write(data)
            await writer.drain()
            count -= len(data)

    async def pass_line() -> bytes:
        line = await reader.readuntil(b"\r\n")
        writer.write(line)
        return line

    if length is not None:
        await pass_bytes(length)
    else:
        size = -1
        while size:
            found = _CHUNK_LINE.fullmatch(await pass_line())
            if found is None:
                raise EOFError("the request has a malformed chunk")
            size = int(found[1], 16)
            await pass_bytes(size)
            if size and await pass_line() != b"\r\n":
                raise EOFError("the request has a malformed chunk")
        while await pass_line() != b"\r\n":
            await writer.drain()
    while await reader.read(_CHUNK):
        pass
    writer.write_eof()


async def _answer(refusal: Refused, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Say why, and read on for a moment: a client that is still sending would not see the answer else."""
    text = f"rl-harness: {refusal.reason}"[:400] + (f" ({refusal.detail})"[:2000] if refusal.detail else "") + "\n"
    body = text.encode("utf-8", "replace")
    head = (
        f"HTTP/1.1 {refusal.status} {refusal.reason[:300]}\r\nContent-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode("ascii", "replace") + body)
    writer.write_eof()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while await reader.read(_CHUNK):
                pass
