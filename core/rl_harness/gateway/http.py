"""HTTP/1.1 on asyncio transports: one request after the other on each connection, read only as far as somebody wants
it. Strict, because what one reader takes for a body another may take for a request. Knows no route."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, cast

import httptools
import msgspec

from rl_harness.gateway.errors import ApiError
from rl_harness.gateway.exchange import Disconnected, Exchange

log = logging.getLogger("rl_harness.gateway")

Handler = Callable[[Exchange], Awaitable[None]]

HEAD_BYTES = 64 << 10
HEAD_LINES = 200
#: What chunked bodies may have beside their content: for each chunk, and for the whole.
_CHUNK_EXTRA = 64
_BODY_EXTRA = 64 << 10
#: Seconds. Between requests; for a request's head; without a byte of a body that is waited for; for a whole body;
#: without a byte read by a client who is sent an answer; for a client to take notice that no more is read;
#: for what runs while the server is closed.
IDLE_SECONDS = 600.0
HEAD_SECONDS = 30.0
PROGRESS_SECONDS = 30.0
BODY_SECONDS = 600.0
STALLED_SECONDS = 300.0
LINGER_SECONDS = 5.0
CLOSE_SECONDS = 5.0
#: Headers that a request has once, or is refused.
_ONCE = frozenset({b"host", b"content-length", b"transfer-encoding", b"authorization", b"x-api-key"})


class HttpServer:
    """Gives each request to ``handle``, which answers it. What it raises ends the connection."""

    def __init__(self, handle: Handler) -> None:
        self.handle = handle
        self.connections: set[Connection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.listening: asyncio.Server | None = None

    async def listen(self, sock: socket.socket) -> None:
        self.listening = await asyncio.get_running_loop().create_server(self.protocol, sock=sock)

    def protocol(self) -> Connection:
        """What serves one connection, over any transport."""
        return Connection(self)

    async def close(self) -> None:
        """Accept nothing more, let what runs end if it does so soon, and close every connection."""
        if self.listening is not None:
            self.listening.close()
        for connection in list(self.connections):
            connection.close_when_idle()
        if self.tasks:
            _, late = await asyncio.wait(list(self.tasks), timeout=CLOSE_SECONDS)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
        for connection in list(self.connections):
            if connection.congested:
                connection.abort()  # its client does not read
            else:
                connection.close()


class Connection(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._parser: Any = httptools.HttpRequestParser(self)
        self._queue: deque[Exchange] = deque()  # that came before the current one was answered
        self._current: Exchange | None = None
        self._last: Exchange | None = None  # answered, and nothing came after it
        self._incoming: Exchange | None = None  # whose body is being read
        self._upgrading: Exchange | None = None  # the last one: it asks to go on in another protocol
        self._closing = False
        self._ended = False  # for input: nothing that comes is read any more
        self._reading = True
        self.congested = False
        self._drain: asyncio.Future[None] | None = None
        # One timer for whatever is waited for, set anew only when it goes off.
        self._deadline = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._body_deadline = math.inf
        # Of the message being read.
        self._in_head = self._head_waited = False
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._head_size = 0
        self._raw = 0
        self._body_size = 0
        self._chunks = 0
        self._fault: ApiError | None = None

    # The transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by their class
        self._server.connections.add(self)
        self._expect(IDLE_SECONDS)

    def data_received(self, data: bytes) -> None:
        if self._ended:
            return
        if self._upgrading is not None:
            self._receive_rest(self._upgrading, data)
            return
        self._raw += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # Answered as the request it is, whose body the parser leaves to us; what follows that is not read.
            self._upgrading, self._incoming = self._incoming, None
            if self._upgrading is not None and self._fault is None:
                self._receive_rest(self._upgrading, data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            if isinstance(error, httptools.HttpParserCallbackError):
                log.error("reading a request failed", exc_info=error.__context__)
            self._fail(ApiError(400, "this is no HTTP request that can be read", code="bad_request"))
            return
        if self._fault is not None:
            self._fail(self._fault)
        elif self._in_head:
            if self._raw > HEAD_BYTES:
                self._fail(_head_too_large())
            elif self._current is None and not self._head_waited:
                self._head_waited = True
                self._expect(HEAD_SECONDS)
        elif self._incoming is not None:
            if self._raw - self._body_size > _BODY_EXTRA + _CHUNK_EXTRA * self._chunks + self._head_size:
                self._fail(ApiError(400, "the body has more framing than content", code="bad_request"))
            elif self._incoming.wanted:
                self._expect(PROGRESS_SECONDS)

    def eof_received(self) -> None:
        """The client hung up: nobody who does so still reads an answer."""
        self._gone()

    def connection_lost(self, error: Exception | None) -> None:
        self._closing = self._ended = True
        self._server.connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        answered = self._current or self._last
        if answered is not None and answered.on_undelivered is not None and (self.congested or error is not None):
            answered.on_undelivered(self.congested)
        self._last = None
        self._gone()
        self._unblock()
        self._parser = None  # which holds this connection

    def pause_writing(self) -> None:
        self.congested = True
        self._expect(STALLED_SECONDS)

    def resume_writing(self) -> None:
        self._unblock()
        if self._current is None:
            self._expect(IDLE_SECONDS)
        else:
            self._deadline = math.inf

    def _unblock(self) -> None:
        self.congested = False
        if self._drain is not None and not self._drain.done():
            self._drain.set_result(None)

    def _gone(self) -> None:
        self._queue.clear()
        if self._current is not None:
            self._current.lose()

    # The parser's side

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_waited = False
        self._url = b""
        self._headers = {}
        self._head_size = self._raw = self._body_size = self._chunks = 0

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        if not self._in_head:
            return  # after the body: nothing there has any meaning here
        name = name.lower()
        headers = self._headers
        if name not in headers:
            headers[name] = value
        elif name in _ONCE:
            self._fault = ApiError(400, f"the header {name.decode('latin-1')} is there twice", code="bad_request")
        else:
            headers[name] += b", " + value

    def on_headers_complete(self) -> None:
        self._in_head = False
        headers = self._headers
        length = headers.get(b"content-length")
        coding = headers.get(b"transfer-encoding")
        announced: int | None = 0
        if coding is not None:
            announced = None
            if length is not None or coding.lower() != b"chunked" or self._parser.should_upgrade():
                self._fault = ApiError(400, "the body's length is not clear", code="bad_request")
        elif length is not None:
            if length.isdigit() and len(length) < 20:
                announced = int(length)
            else:
                self._fault = ApiError(400, "content-length is no number", code="bad_request")
        recent = self._parser.get_http_version() == "1.1"
        if recent and b"host" not in headers:
            self._fault = self._fault or ApiError(400, "there is no host header", code="bad_request")
        exchange = Exchange(
            self,
            self._parser.get_method().decode("ascii"),
            _path(self._url),
            headers,
            announced=announced,
            chunked=recent,
            keep=recent and self._parser.should_keep_alive() and not self._parser.should_upgrade(),
            expects=recent and headers.get(b"expect", b"").lower() == b"100-continue",
        )
        self._incoming = exchange
        if self._fault is not None:
            return
        if self._current is None:
            self._begin(exchange)
        else:
            self._queue.append(exchange)
            self.hold()

    def on_body(self, body: bytes) -> None:
        self._body_size += len(body)
        if self._incoming is not None:
            self._incoming.receive(body)

    def on_chunk_header(self) -> None:
        self._chunks += 1

    def on_message_complete(self) -> None:
        if self._parser.should_upgrade():
            return
        incoming, self._incoming = self._incoming, None
        if incoming is not None:
            incoming.receive_end()

    def _receive_rest(self, exchange: Exchange, data: bytes) -> None:
        """Of the body of a request that asks for another protocol."""
        left = (exchange.announced or 0) - self._body_size
        self._body_size += len(data)
        if data:
            exchange.receive(data[:left])
        if len(data) >= left:
            self._ended = True
            exchange.receive_end()
        elif exchange.wanted:
            self._expect(PROGRESS_SECONDS)

    def _count(self, size: int) -> None:
        self._head_size += size
        if self._head_size > HEAD_BYTES or len(self._headers) > HEAD_LINES:
            self._fault = _head_too_large()

    # One request after the other

    def _begin(self, exchange: Exchange) -> None:
        self._current, self._last = exchange, None
        self._deadline = math.inf
        task = self._loop.create_task(self._run(exchange))
        self._server.tasks.add(task)
        task.add_done_callback(self._server.tasks.discard)

    async def _run(self, exchange: Exchange) -> None:
        try:
            await self._server.handle(exchange)
        except Disconnected:
            pass
        except Exception:
            log.exception("a request failed")
        finally:
            self._done(exchange)

    def _done(self, exchange: Exchange) -> None:
        """Answered, or given up."""
        self._current = None
        exchange.on_gone = None
        if self._closing:
            return
        if not exchange.complete:
            self._transport.abort()  # the client must not take what it has for the whole
            return
        self._last = exchange
        if self._ended or not exchange.keeps_open:
            self._linger(exchange)
        else:
            self._body_deadline = math.inf
            if self._queue:
                self._begin(self._queue.popleft())
            else:
                self._expect(IDLE_SECONDS)
            if not self._queue:
                self._resume()

    def _linger(self, exchange: Exchange) -> None:
        """Close, but let a client that is still sending read why: a reset would take the answer from it."""
        if exchange.arrived:
            self.close()
            return
        self._ended = True
        self._transport.write_eof()
        self._resume()
        self._expect(LINGER_SECONDS)

    def _fail(self, error: ApiError) -> None:
        """What came is not HTTP, or too much: answer and close. A request before it keeps its own answer."""
        self._ended = True
        if self._incoming is not None:
            self._incoming.fail_body(error)
        if self._current is None and not self._closing:
            exchange = Exchange(self, "GET", "", {}, announced=None)
            told = {"message": error.message, "type": error.type, "param": None, "code": error.code}
            exchange.send_response(error.status, msgspec.json.encode({"error": told}))
            self._done(exchange)

    def close_when_idle(self) -> None:
        """Close, after the response to what is being answered."""
        self._ended = True
        self._queue.clear()
        if self._current is None:
            self.close()

    def close(self) -> None:
        """Close once what was written is on its way, if it gets away in time."""
        self._closing = self._ended = True
        self._transport.close()
        self._expect(STALLED_SECONDS)

    def abort(self) -> None:
        self._closing = self._ended = True
        self._transport.abort()

    # The exchange's side

    def send(self, data: bytes) -> None:
        if not self._closing and not self._transport.is_closing():
            self._transport.write(data)

    async def drained(self) -> None:
        while self.congested and not self._closing:
            if self._drain is None or self._drain.done():
                self._drain = self._loop.create_future()
            await self._drain

    def hold(self) -> None:
        if self._reading and not self._closing:
            self._reading = False
            self._transport.pause_reading()

    def pull(self) -> None:
        self._body_deadline = self._loop.time() + BODY_SECONDS
        self._expect(PROGRESS_SECONDS)
        self._resume()

    def _resume(self) -> None:
        if not self._reading and not self._closing:
            self._reading = True
            self._transport.resume_reading()

    # Time

    def _expect(self, seconds: float) -> None:
        """Something has to happen within that time, or the connection is given up."""
        self._deadline = self._loop.time() + seconds
        if self._timer is None or self._timer.when() > self._deadline + 1:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_later(seconds, self._due)

    def _due(self) -> None:
        self._timer = None
        now = self._loop.time()
        deadline = min(self._deadline, self._body_deadline)
        if now < deadline:
            if deadline < math.inf:
                self._timer = self._loop.call_at(deadline, self._due)
            return
        self._deadline = self._body_deadline = math.inf
        if self._current is not None and self._current.wanted:
            self._current.fail_body(ApiError(408, "the request's body did not come", code="timeout"))
        elif self._current is None or self.congested or self._ended:
            self._transport.abort()


def _path(target: bytes) -> str:
    """The path of a request's target, as it was sent."""
    path = target.partition(b"?")[0].partition(b"#")[0]
    if not path.startswith(b"/") and b"://" in path:  # as it is asked of a proxy
        path = b"/" + path.partition(b"://")[2].partition(b"/")[2]
    return path.decode("latin-1")


def _head_too_large() -> ApiError:
    return ApiError(431, f"the request's head is larger than {HEAD_BYTES} bytes", code="head_too_large")
