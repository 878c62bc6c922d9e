"""One HTTP exchange: the body in, within a limit and only when somebody wants it, and a response or an event stream
out, with comments while there is nothing to say. Knows no route, no protocol and no session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Protocol

from rl_harness.gateway.errors import ApiError

Header = tuple[bytes, bytes]

#: What a stream has to say within that time of what it said before goes out with what comes until then.
_TOGETHER_SECONDS = 0.005
#: Bytes of a body that nobody asked for yet, beyond which no more are read.
_HELD = 64 << 10
_STATUS = {status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode()) for status in HTTPStatus}
_JSON = b"application/json"
_EVENTS = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"x-accel-buffering: no\r\n"
)


class Disconnected(Exception):
    """The client hung up: there is nobody to answer."""


class Wire(Protocol):
    """The connection an exchange is part of."""

    #: So much is waiting to be sent that writers should pause.
    congested: bool

    def send(self, data: bytes) -> None: ...

    async def drained(self) -> None:
        """Returns when it is not congested, or gone."""

    def hold(self) -> None:
        """Read no further for now."""

    def pull(self) -> None:
        """Read on; a body is waited for."""


class Exchange:
    """A request and its response. ``path`` is as it was sent, without the query; ``announced`` the size of the body as
    far as it is known before it is read."""

    __slots__ = (
        "_arrived",
        "_chunked",
        "_expects",
        "_fault",
        "_head",
        "_keep",
        "_limit",
        "_loop",
        "_out",
        "_pieces",
        "_sent",
        "_size",
        "_timer",
        "_waiter",
        "_wire",
        "announced",
        "complete",
        "gone",
        "headers",
        "method",
        "on_error",
        "on_gone",
        "on_undelivered",
        "path",
        "started",
    )

    def __init__(
        self,
        wire: Wire,
        method: str,
        path: str,
        headers: dict[bytes, bytes],
        *,
        announced: int | None,
        chunked: bool = True,
        keep: bool = True,
        expects: bool = False,
    ) -> None:
        self.method = method
        self.path = path
        self.headers = headers
        self.announced = announced
        self.started = False
        self.complete = False
        #: What ends a stream that was started, when something fails.
        self.on_error: Callable[[ApiError], bytes] | None = None
        self.gone = False
        #: Called once if the client hangs up before the response is complete.
        self.on_gone: Callable[[], None] | None = None
        #: Called if the connection breaks when the response is complete, and no other request came after it: with True
        #: if part of it was not even sent, with False if the client may or may not have read it.
        self.on_undelivered: Callable[[bool], None] | None = None
        self._wire = wire
        self._chunked = chunked
        self._keep = keep
        self._expects = expects
        self._pieces: list[bytes] = []
        self._size = 0
        self._arrived = False
        self._limit: int | None = None
        self._fault: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._out: list[bytes] = []
        self._sent = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._head = b""
        self._loop = asyncio.get_running_loop()

    # The request

    async def body(self, limit: int) -> bytes:
        """The request's body. Raises :class:`ApiError` (413) as soon as it is known to be too large."""
        if max(self.announced or 0, self._size) > limit:
            raise _too_large(limit)
        if not self._arrived and self._fault is None:
            self._limit = limit
            if self._expects:
                self._wire.send(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._waiter = self._loop.create_future()
            self._wire.pull()
            await self._waiter
        if self._fault is not None:
            raise self._fault
        pieces, self._pieces = self._pieces, []
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    @property
    def wanted(self) -> bool:
        """Somebody waits for the body."""
        return self._waiter is not None and not self._waiter.done()

    @property
    def arrived(self) -> bool:
        """The body is here."""
        return self._arrived

    def receive(self, data: bytes) -> None:
        """A piece of the body."""
        if self.complete or self._fault is not None:
            return
        self._size += len(data)
        if self._limit is not None and self._size > self._limit:
            self.fail_body(_too_large(self._limit))
            return
        self._pieces.append(data)
        if self._limit is None and self._size > _HELD:
            self._wire.hold()

    def receive_end(self) -> None:
        self._arrived = True
        self._wake()

    def fail_body(self, error: Exception) -> None:
        """The body will not come."""
        self._pieces.clear()
        if self._fault is None and not self._arrived:
            self._fault = error
        self._wake()

    def lose(self) -> None:
        """The client hung up."""
        if self.gone:
            return
        self.gone = True
        self._out.clear()
        if self._timer is not None:
            self._timer.cancel()
        self.fail_body(Disconnected())
        on_gone, self.on_gone = self.on_gone, None
        if on_gone is not None and not self.complete:
            on_gone()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # The response

    @property
    def keeps_open(self) -> bool:
        """Another request may follow on this connection. A body that is still coming would be taken for one."""
        return self._keep and self._arrived

    async def respond(
        self, status: int, body: bytes, *, headers: Iterable[Header] = (), content_type: bytes = _JSON
    ) -> None:
        self.send_response(status, body, headers, content_type)
        if self._wire.congested:
            await self._wire.drained()

    def send_response(
        self, status: int, body: bytes, headers: Iterable[Header] = (), content_type: bytes = _JSON
    ) -> None:
        """:meth:`respond`, for who cannot wait until it is on its way."""
        self.started = self.complete = True
        parts = [
            _STATUS.get(status) or b"HTTP/1.1 %d -\r\n" % status,
            b"content-type: %b\r\ncontent-length: %d\r\n" % (content_type, len(body)),
        ]
        for name, value in headers:
            parts.append(b"%b: %b\r\n" % (name, value))
        parts.append(b"\r\n" if self.keeps_open else b"connection: close\r\n\r\n")
        if self.method != "HEAD":
            parts.append(body)
        self._wire.send(b"".join(parts))

    def start_stream(self, headers: Iterable[Header] = ()) -> None:
        """Open an event stream, unless it is open. Goes out with what is written first."""
        if self.started:
            return
        self.started = True
        parts = [_EVENTS]
        for name, value in headers:
            parts.append(b"%b: %b\r\n" % (name, value))
        if self._chunked:
            parts.append(b"transfer-encoding: chunked\r\n")
        parts.append(b"\r\n" if self.keeps_open and self._chunked else b"connection: close\r\n\r\n")
        self._head = b"".join(parts)

    async def write(self, data: bytes) -> None:
        """Send a piece of a stream: at once, unless one was sent just before. What is written in a burst goes out
        together: each system call costs more than all else that is done for a token."""
        if self.gone:
            raise Disconnected
        self._out.append(data)
        if self._timer is None:
            wait = self._sent + _TOGETHER_SECONDS - self._loop.time()
            if wait <= 0 or self._head:
                self._flush()
            else:
                self._timer = self._loop.call_later(wait, self._flush_later)
        if self._wire.congested:
            await self._wire.drained()

    async def end(self, data: bytes) -> None:
        """The last of a stream."""
        self._out.append(data)
        self.complete = True
        self._flush(last=True)
        if self._wire.congested:
            await self._wire.drained()

    @property
    def sent(self) -> float:
        """When something of a stream was sent last, on the event loop's clock."""
        return self._sent

    def comment(self) -> None:
        """Show that the stream is alive. Nothing is added for a client that does not read."""
        if not self.complete and not self.gone and not self._wire.congested:
            self._out.append(b": keep-alive\n\n")
            self._flush()

    def _flush_later(self) -> None:
        self._timer = None
        if self._out:
            self._flush()

    def _flush(self, last: bool = False) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._sent = self._loop.time()
        data = b"".join(self._out)
        self._out.clear()
        if self._chunked:
            if data:
                data = b"%x\r\n%b\r\n" % (len(data), data)
            if last:
                data += b"0\r\n\r\n"
        if self._head:
            data, self._head = self._head + data, b""
        if data:
            self._wire.send(data)

    def keep_alive(self, interval: float, headers: Iterable[Header] = ()) -> KeepAlive:
        """Within it, a stream that is silent for ``interval`` seconds is opened and gets a comment."""
        return KeepAlive(self, interval, tuple(headers))


class KeepAlive:
    """A timer that is set anew only when it goes off, so that a stream that flows costs next to nothing."""

    __slots__ = ("_exchange", "_headers", "_interval", "_loop", "_opened", "_timer")

    def __init__(self, exchange: Exchange, interval: float, headers: tuple[Header, ...]) -> None:
        self._exchange = exchange
        self._interval = interval
        self._headers = headers
        self._loop = asyncio.get_running_loop()
        self._opened = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> KeepAlive:
        self._timer = self._loop.call_later(self._interval, self._due)
        return self

    def __exit__(self, *reason: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _due(self) -> None:
        wait = max(self._exchange.sent, self._opened) + self._interval - self._loop.time()
        if wait <= 0:
            wait = self._interval
            self._exchange.start_stream(self._headers)
            self._exchange.comment()
        self._timer = self._loop.call_later(wait, self._due)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request body is larger than {limit} bytes", code="request_too_large")
