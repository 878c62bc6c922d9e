"""One HTTP exchange over plain ASGI: the body in, within a limit, and a response or an event stream out, with
keep-alives while there is nothing to say. Knows no protocol and no session."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from rl_harness.gateway.errors import ApiError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Header = tuple[bytes, bytes]


class Disconnected(Exception):
    """The client hung up while it was sending its request."""


class Exchange:
    """A request and its response."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self._receive = receive
        self._send = send
        self.started = False
        self.complete = False
        #: What ends a stream that was started, when something fails.
        self.on_error: Callable[[ApiError], bytes] | None = None
        self._keep_alive: _KeepAlive | None = None

    async def body(self, limit: int) -> bytes:
        """The request's body. Raises :class:`ApiError` (413) as soon as it is known to be too large."""
        declared = self.headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > limit:
            raise _too_large(limit)
        pieces: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            piece = message.get("body", b"")
            size += len(piece)
            if size > limit:
                raise _too_large(limit)
            pieces.append(piece)
            if not message.get("more_body", False):
                return b"".join(pieces) if len(pieces) > 1 else pieces[0]

    async def disconnected(self) -> None:
        """Returns when the client has hung up or the response is complete."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def respond(
        self, status: int, body: bytes, *, headers: Iterable[Header] = (), content_type: bytes = b"application/json"
    ) -> None:
        self.started = True
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [
                    (b"content-type", content_type),
                    (b"content-length", b"%d" % len(body)),
                    *headers,
                ],
            }
        )
        self.complete = True
        await self._send({"type": "http.response.body", "body": body})

    async def start_stream(self, headers: Iterable[Header] = ()) -> None:
        """Open an event stream, unless it is open."""
        if self.started:
            return
        self.started = True
        await self._send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [
                    (b"content-type", b"text/event-stream; charset=utf-8"),
                    (b"cache-control", b"no-cache"),
                    (b"x-accel-buffering", b"no"),
                    *headers,
                ],
            }
        )

    async def write(self, data: bytes) -> None:
        if self._keep_alive is not None:
            self._keep_alive.touch()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes) -> None:
        """The last of a stream."""
        self.complete = True
        await self._send({"type": "http.response.body", "body": data})

    def keep_alive(self, interval: float, headers: Iterable[Header]) -> _KeepAlive:
        """Within it, a stream that is silent for ``interval`` seconds is opened and gets a comment."""
        self._keep_alive = _KeepAlive(self, interval, tuple(headers))
        return self._keep_alive


class _KeepAlive:
    def __init__(self, exchange: Exchange, interval: float, headers: tuple[Header, ...]) -> None:
        self._exchange = exchange
        self._interval = interval
        self._headers = headers
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def touch(self) -> None:
        self._last = self._loop.time()

    def __enter__(self) -> _KeepAlive:
        self._timer = self._loop.call_later(self._interval, self._due)
        return self

    def __exit__(self, *reason: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _due(self) -> None:
        wait = self._last + self._interval - self._loop.time()
        if wait <= 0:
            wait = self._interval
            self._task = self._loop.create_task(self._comment())
        self._timer = self._loop.call_later(wait, self._due)

    async def _comment(self) -> None:
        if not self._exchange.complete:
            await self._exchange.start_stream(self._headers)
            await self._exchange.write(b": keep-alive\n\n")


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request body is larger than {limit} bytes", code="request_too_large")
