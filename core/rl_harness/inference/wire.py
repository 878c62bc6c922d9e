"""A small HTTP/1.1 client for one address: connections are kept open and bodies handed on as they come. An engine's
events are many and short, and a general client spends more on each than all else does."""

from __future__ import annotations

import asyncio
import contextlib
import math
import ssl
from collections.abc import Mapping
from types import TracebackType
from typing import cast
from urllib.parse import urlsplit

import httptools

#: So much of a body waits to be read before the other side has to wait.
_BUFFERED = 256 << 10
#: An answer's head is no longer.
_HEAD_BYTES = 64 << 10
#: An answer whose reader has all it wants may take so many seconds to end before its connection is given up.
_REST_SECONDS = 1.0


class WireError(Exception):
    """The address cannot be reached, or what it sends broke off, made no sense or stopped."""


class Client:
    """Requests to what lies below ``base_url``. Raises ``ValueError`` for an address that is none.

    ``idle_timeout``: seconds without a byte of an answer before it counts as dead. There is no other time limit.
    """

    def __init__(
        self, base_url: str, *, headers: Mapping[str, str], connect_timeout: float, idle_timeout: float
    ) -> None:
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"{base_url!r} is no http or https address")
        self._host = url.hostname
        self._port = url.port or (443 if url.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if url.scheme == "https" else None
        self._path = url.path.rstrip("/")
        given = {"host": url.netloc.rpartition("@")[2], "content-type": "application/json", **headers}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in given.items()).encode("latin-1")
        self._connect_timeout = connect_timeout
        self._idle_timeout = idle_timeout
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()

    async def request(self, method: str, path: str, body: bytes = b"") -> Response:
        """The response once its head is there; used as a context, which drops what is not read of it. Raises
        :class:`WireError`."""
        head = b"%b %b HTTP/1.1\r\n%bcontent-length: %d\r\n\r\n" % (
            method.encode(),
            (self._path + path).encode(),
            self._headers,
            len(body),
        )
        while True:
            connection = self._idle.pop() if self._idle else None
            kept = connection is not None
            if connection is None:
                connection = await self._connect()
            try:
                return await connection.ask(head + body)
            except WireError:
                # The other side may have closed it while nobody used it; what it had not begun it has not seen.
                if not kept or connection.answering:
                    raise
            except BaseException:
                connection.close()
                raise

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self, self._idle_timeout), self._host, self._port, ssl=self._ssl
                )
        except TimeoutError:
            raise WireError(f"no connection within {self._connect_timeout:g} s") from None
        except OSError as error:
            raise WireError(str(error) or type(error).__name__) from error
        self._all.add(connection)
        return connection

    def _free(self, connection: _Connection) -> None:
        self._idle.append(connection)

    def _lost(self, connection: _Connection) -> None:
        self._all.discard(connection)
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)

    def close(self) -> None:
        for connection in list(self._all):
            connection.close()


class Response:
    """``headers`` have lower-case names."""

    def __init__(self, connection: _Connection, status: int, headers: Mapping[bytes, bytes]) -> None:
        self._connection = connection
        self.status = status
        self.headers = headers
        self._ends = False

    async def chunk(self) -> bytes:
        """What has arrived of the body since the last time; empty at its end. Raises :class:`WireError`."""
        return await self._connection.chunk()

    async def read(self, limit: int) -> bytes:
        """The body, or its first ``limit`` bytes."""
        pieces: list[bytes] = []
        size = 0
        while size < limit and (piece := await self.chunk()):
            pieces.append(piece)
            size += len(piece)
        return b"".join(pieces)[:limit]

    def drop_rest(self) -> None:
        """Nothing that may still come is of interest, and it is about to end: the connection is kept for that."""
        self._ends = True

    async def __aenter__(self) -> Response:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.done_with(ends=self._ends)


class _Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self, client: Client, idle_timeout: float) -> None:
        self._client = client
        self._idle_timeout = idle_timeout
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        # What has arrived of the body. An engine sends a chunk for each token: each is put here by the parser itself.
        self._body: list[bytes] = []
        self.on_body = self._body.append
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        # One timer for whatever is waited for, set anew only when it goes off: no request costs one.
        self._heard = 0.0
        self._patience = math.inf
        self._error: WireError | None = None
        self._paused = False
        self._reset()

    def _reset(self) -> None:
        self.answering = self._idle = False
        self._headers: dict[bytes, bytes] = {}
        self._head_complete = False
        self._complete = False
        self._keep = False
        self._left = False
        self._body.clear()
        self._waiting = 0  # bytes that came since the body was last read

    async def ask(self, request: bytes) -> Response:
        if self._error is not None:
            raise self._error
        self._reset()
        assert self._transport is not None
        self._transport.write(request)
        self._expect(self._idle_timeout)
        while not self._head_complete:
            await self._wait()
        return Response(self, self._parser.get_status_code(), self._headers)

    async def chunk(self) -> bytes:
        while not self._body:
            if self._complete:
                return b""
            await self._wait()
        data = b"".join(self._body)
        self._body.clear()
        self._waiting = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    async def _wait(self) -> None:
        """Until something has arrived. Raises :class:`WireError` when nothing more will."""
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def done_with(self, *, ends: bool) -> None:
        """Kept for the next request where this one's answer is whole, or about to be (``ends``); closed otherwise."""
        if self._error is not None:
            return
        if self._complete:
            self._settle()
        elif ends and not self._paused:
            self._left = True
            self._expect(_REST_SECONDS)
        else:
            self.close()

    def _settle(self) -> None:
        self._patience = math.inf
        if self._keep and self._transport is not None and not self._transport.is_closing():
            self._idle = True
            self._client._free(self)
        else:
            self.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._fail("the connection was closed")

    def _fail(self, reason: str) -> None:
        if self._error is None:
            self._error = WireError(reason)
            self._client._lost(self)
        if self._timer is not None:
            self._timer.cancel()
        self._wake()

    def _expect(self, seconds: float) -> None:
        """Something has to arrive within that time, or the connection is given up."""
        self._heard = self._loop.time()
        self._patience = seconds
        if self._timer is None or self._timer.when() > self._heard + seconds + 1:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_later(seconds, self._due)

    def _due(self) -> None:
        self._timer = None
        if self._patience == math.inf:
            return
        left = self._heard + self._patience - self._loop.time()
        if self._paused or left > 0:
            self._timer = self._loop.call_later(max(left, 1.0), self._due)
            return
        self._fail(f"nothing arrived for {self._patience:g} s")
        if self._transport is not None:
            self._transport.abort()

    # ------------------------------------------------------------------------------ what the transport and parser call

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by their class

    def data_received(self, data: bytes) -> None:
        if self._idle:
            self.close()  # nobody asked: it would be taken for the answer to the next request
            return
        if not self._left:
            self._heard = self._loop.time()
        self.answering = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"the answer is no HTTP: {error}")
            if self._transport is not None:
                self._transport.abort()
        if self._left:
            self._body.clear()
            return
        self._waiting += len(data)
        if not self._head_complete and self._waiting > _HEAD_BYTES:
            self._fail(f"the answer's head is larger than {_HEAD_BYTES} bytes")
            if self._transport is not None:
                self._transport.abort()
        # Only for what a reader can take: nobody would have it read on else.
        if self._body and self._waiting > _BUFFERED and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._complete:
            self._fail(f"the connection was lost{f': {error}' if error else ''}")
        else:
            self._fail("the connection was closed by the other side")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self._head_complete = True

    def on_message_complete(self) -> None:
        self._complete = True
        self._keep = self._parser.should_keep_alive()
        if self._left:
            self._settle()
