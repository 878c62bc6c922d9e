"""The engine's HTTP interface on the event loop: requests, streams, and connections taken over for a command.

Addresses and credentials are found by the docker SDK, which also builds and pulls; what every episode needs goes
through here, at a third of the SDK's processor time and with no thread that would outlive a cancelled task.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import aiohttp
from rl_harness.errors import ConfigError, SandboxError
from yarl import URL

OLDEST_API = (1, 41)
"""Engine 20.10."""

CONNECT_TIMEOUT = 20.0
ANSWER_TIMEOUT = 300.0
_LIMIT = 1 << 20
_HOST_AND_PORT = re.compile(r"[\w.-]+:\d+")
#: Where the engine keeps a container's root; nobody's business, and different each time.
_HOST_PATH = re.compile(
    r"/[^\s\"':]*/(?:overlay2|vfs|btrfs|zfs|aufs|fuse-overlayfs)/[^\s\"':/]+(?:/(?:merged|diff|work))?(?=/|\b)"
)

Parameters = Mapping[str, str | int | bool]


class EngineError(SandboxError):
    """The engine refused a request, in its own words. ``status`` is the HTTP status, 0 when there was no answer."""

    def __init__(self, message: str, status: int = 0, *, remedy: str | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.status = status


def find_address(option: str | None) -> str:
    """The engine's address: the option, ``DOCKER_HOST``, or the docker command's current context."""
    address = option or os.environ.get("DOCKER_HOST")
    if not address:
        from docker.context import ContextAPI  # type: ignore[import-untyped]

        try:
            context = ContextAPI.get_current_context()
            address = context.Host if context is not None else None
        except Exception:
            address = None
    address = address or "unix:///var/run/docker.sock"
    try:
        parts = urlsplit(address)
        port = parts.port  # which raises for what is none
    except ValueError as error:
        raise ConfigError(
            f"sandbox.host: {address!r} is no address of an engine: {error}",
            remedy="write unix:///PATH or tcp://HOST:PORT, here or in DOCKER_HOST",
        ) from None
    if parts.scheme in ("unix", "http+unix"):
        if not parts.netloc and parts.path.startswith("/") and "\0" not in parts.path:
            return address
        raise ConfigError(
            f"sandbox.host: {address!r} names no socket by its absolute path",
            remedy="write unix:///PATH with three slashes, here or in DOCKER_HOST",
        )
    plain = parts.scheme in ("tcp", "http") and not os.environ.get("DOCKER_TLS_VERIFY")
    if plain and parts.hostname and port != 0:
        return address
    if "://" not in address and _HOST_AND_PORT.fullmatch(address):
        raise ConfigError(f"sandbox.host: {address} has no scheme", remedy=f"write tcp://{address}")
    raise ConfigError(
        f"sandbox.host: {address} is not an engine that can be talked to directly (unix:// or tcp:// without TLS)",
        remedy="forward its socket: ssh -N -L /tmp/docker.sock:/var/run/docker.sock HOST, "
        "then -o sandbox.host=unix:///tmp/docker.sock",
    )


class Connection:
    """A connection the engine has handed over to a command or container: raw bytes both ways."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer

    async def write(self, data: bytes | memoryview) -> None:
        """Raises ConnectionError when the other side is gone."""
        view = memoryview(data)
        while view:  # a piece at a time, so that the transport never holds a copy of it all
            self._writer.write(view[:_LIMIT])
            view = view[_LIMIT:]
            await self._writer.drain()

    def write_eof(self) -> None:
        if not self._writer.is_closing():
            try:
                self._writer.write_eof()
            except OSError:
                pass  # the other side is gone, which ends its input as well

    def discard(self) -> None:
        """Throw away what is still to come, until the other side ends it."""
        transport = self._writer.transport
        if not transport.is_closing() and not isinstance(protocol := transport.get_protocol(), _Discard):
            transport.set_protocol(_Discard(protocol))
            if not self._is_reading():
                transport.resume_reading()  # type: ignore[attr-defined]  # a socket's transport does both

    def unblock(self) -> None:
        """Throw away what is still to come, if so much of it is unread that the other side has to wait."""
        if not self._is_reading():
            self.discard()

    def _is_reading(self) -> bool:
        return bool(self._writer.transport.is_reading())  # type: ignore[attr-defined]  # as above

    def close(self) -> None:
        self._writer.transport.abort()


class _Discard(asyncio.Protocol):
    """Takes everything and keeps nothing; whoever reads is told of the end, and whoever writes when to wait."""

    def __init__(self, instead_of: asyncio.BaseProtocol) -> None:
        self._readers = instead_of
        self.pause_writing = instead_of.pause_writing  # type: ignore[method-assign]
        self.resume_writing = instead_of.resume_writing  # type: ignore[method-assign]

    def connection_lost(self, exc: Exception | None) -> None:
        self._readers.connection_lost(exc)


class Engine:
    """One engine. Usable from one event loop; :meth:`close` when done."""

    def __init__(self, address: str | None) -> None:
        """``address`` None: where docker's own settings say, looked up at the first use."""
        self._given = address
        self._prefix = ""
        self._session: aiohttp.ClientSession | None = None

    @functools.cached_property
    def address(self) -> str:
        return find_address(self._given)

    @functools.cached_property
    def _path(self) -> str | None:
        parts = urlsplit(self.address)
        return parts.path if parts.scheme in ("unix", "http+unix") else None

    @functools.cached_property
    def _endpoint(self) -> tuple[str, int]:
        parts = urlsplit(self.address)
        return parts.hostname or "localhost", parts.port or 2375

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            connector: aiohttp.BaseConnector
            if self._path is not None:
                connector = aiohttp.UnixConnector(self._path, limit=0)
            else:
                connector = aiohttp.TCPConnector(limit=0)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT)
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=timeout,
                read_bufsize=_LIMIT,
                headers={"Accept-Encoding": "identity"},  # both ends are on one machine, or nearly
            )
        return self._session

    def _url(self, path: str, params: Parameters | None) -> URL:
        base = "docker" if self._path is not None else "{}:{}".format(*self._endpoint)
        query = f"?{_query(params)}" if params else ""
        return URL(f"http://{base}{path}{query}", encoded=True)

    async def _versioned(self, path: str) -> str:
        """``path`` at the API this was written for, or the oldest that a newer engine still speaks."""
        if not self._prefix:
            version = await self.request("GET", "/version", versioned=False)
            spoken = max(OLDEST_API, api_version(version.get("MinAPIVersion")))
            self._prefix = "/v{}.{}".format(*spoken)
        return f"{self._prefix}{path}"

    @asynccontextmanager
    async def _response(
        self, method: str, path: str, *, params: Parameters | None = None, data: Any = None, **more: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            async with self._open().request(method, self._url(path, params), data=data, **more) as response:
                if response.status >= 400:
                    raise EngineError(_message(await response.read(), response.status), response.status)
                yield response
        except (aiohttp.ClientError, ConnectionError, OSError) as error:
            raise self._unreachable(error) from None

    def _unreachable(self, error: Exception) -> EngineError:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return EngineError(
            f"the engine at {self.address} does not answer: {reason}",
            remedy="start it, or name another with -o sandbox.host=ADDRESS or DOCKER_HOST",
        )

    async def request(
        self,
        method: str,
        path: str,
        *,
        params: Parameters | None = None,
        body: Any = None,
        data: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = ANSWER_TIMEOUT,
        versioned: bool = True,
    ) -> Any:
        """The decoded answer (None where it is empty). ``body`` is sent as JSON, ``data`` as it is."""
        path = await self._versioned(path) if versioned else path
        headers = dict(headers or {})
        if body is not None:
            data, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
        try:
            async with asyncio.timeout(timeout):
                async with self._response(method, path, params=params, data=data, headers=headers) as response:
                    content = await response.read()
        except TimeoutError:
            raise EngineError(f"the engine did not answer within {timeout:g} s ({method} {path})") from None
        if not content:
            return None
        try:
            return json.loads(content)
        except ValueError:
            return content.decode("utf-8", "replace")

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        *,
        params: Parameters | None = None,
        data: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer to be read as it comes."""
        path = await self._versioned(path)
        async with self._response(method, path, params=params, data=data, headers=headers) as response:
            yield response

    async def send(self, path: str, chunks: AsyncIterator[bytes], *, params: Parameters) -> None:
        """PUT an archive of any size. On a socket of its own: a transport would copy every chunk twice."""
        loop = asyncio.get_running_loop()
        target = f"{await self._versioned(path)}?{_query(params)}"
        head = f"PUT {target} HTTP/1.1\r\nHost: docker\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n"
        unix = self._path is not None
        with socket.socket(socket.AF_UNIX if unix else socket.AF_INET) as connection:
            connection.setblocking(False)
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT):
                    await loop.sock_connect(connection, self._path or self._endpoint)
            except (OSError, TimeoutError) as error:
                raise self._unreachable(error) from None
            try:
                await loop.sock_sendall(connection, f"{head}Content-Type: application/x-tar\r\n\r\n".encode())
                async for chunk in chunks:
                    await loop.sock_sendall(connection, b"%x\r\n" % len(chunk))
                    await loop.sock_sendall(connection, chunk)
                    await loop.sock_sendall(connection, b"\r\n")
                await loop.sock_sendall(connection, b"0\r\n\r\n")
            except ConnectionError:
                pass  # refused before the end: the answer says why
            answer = b""
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT):
                    while part := await loop.sock_recv(connection, _LIMIT):
                        answer += part
            except (OSError, TimeoutError) as error:
                raise self._unreachable(error) from None
        status, _, rest = answer.partition(b"\r\n")
        code = status.split(b" ")[1] if status.startswith(b"HTTP/") else b""
        if not code.isdigit():
            raise EngineError(f"the engine at {self.address} broke off while it took an archive")
        if int(code) >= 400:
            body = rest[rest.find(b"{") : rest.rfind(b"}") + 1]  # whatever it is framed in
            raise EngineError(_message(body, int(code)), int(code))

    async def hijack(self, path: str, *, params: Parameters | None = None, body: Any = None) -> Connection:
        """Take a connection over, for a command's streams."""
        data = b"" if body is None else json.dumps(body).encode()
        target = await self._versioned(path) + (f"?{_query(params)}" if params else "")
        head = (
            f"POST {target} HTTP/1.1\r\nHost: docker\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                if self._path is not None:
                    reader, writer = await asyncio.open_unix_connection(self._path, limit=_LIMIT)
                else:
                    reader, writer = await asyncio.open_connection(*self._endpoint, limit=_LIMIT)
        except (OSError, TimeoutError) as error:
            raise self._unreachable(error) from None
        connection = Connection(reader, writer)
        try:
            writer.write(head.encode() + data)
            async with asyncio.timeout(ANSWER_TIMEOUT):
                answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                status = int(answer.split(" ", 2)[1])
                if status >= 400:
                    raise EngineError(_message(await _rest(reader, answer), status), status)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            connection.close()
            raise self._unreachable(error) from None
        except BaseException:
            connection.close()
            raise
        return connection

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


def api_version(text: object) -> tuple[int, int]:
    """The numbers of ``"1.41"``; zeros for what is no version."""
    major, _, minor = str(text).partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)


def _query(params: Parameters) -> str:
    return urlencode(
        {key: str(value).lower() if isinstance(value, bool) else value for key, value in params.items()},
        quote_via=quote,
    )


async def _rest(reader: asyncio.StreamReader, head: str) -> bytes:
    """The body of a refusal; the connection closes after it or it has a length."""
    for line in head.split("\r\n"):
        name, _, value = line.partition(":")
        if name.lower() == "content-length":
            return await reader.readexactly(int(value))
    return await asyncio.wait_for(reader.read(_LIMIT), 1.0)


def _message(content: bytes, status: int) -> str:
    try:
        message = json.loads(content)["message"]
    except (ValueError, KeyError, TypeError):
        message = content.decode("utf-8", "replace").strip()
    return _HOST_PATH.sub("", str(message))[:4000] or f"the engine answered with status {status}"
