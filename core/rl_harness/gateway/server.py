"""The gateway: the address agents point at. Routes keyed requests to a session's policy, in the caller's event
loop, and stops what nobody waits for any more."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import aclosing
from typing import Any, ClassVar

import uvicorn

from rl_harness.errors import EngineError, RequestRefused, RlHarnessError, Unavailable, UsageError
from rl_harness.gateway.calls import Call, Finish, Piece, replay
from rl_harness.gateway.choices import several
from rl_harness.gateway.errors import ApiError
from rl_harness.gateway.exchange import Disconnected, Exchange, Header, Receive, Scope, Send
from rl_harness.gateway.protocols import BY_HEADER, DEFAULT, PROTOCOLS, Protocol
from rl_harness.gateway.protocols.base import Request
from rl_harness.gateway.sampling import DEFAULT_SAMPLING, DISTRIBUTION
from rl_harness.gateway.sessions import Policy, Running, Session, Sessions
from rl_harness.records.turn import SamplingParams, Turn

log = logging.getLogger("rl_harness.gateway")

VERSION = "/v1"
BODY_LIMIT = 32 << 20
KEEP_ALIVE_SECONDS = 15.0

#: What a chat API answered with that its client is answered with too: asking again does not help.
_TOLD = frozenset({401, 402, 403, 404})


class Gateway:
    """Serves ``policies`` to sessions. Listens on loopback unless given another ``host``; port 0 is any free one."""

    #: What it answers to, in the words of a harness's capabilities.
    protocols: ClassVar[frozenset[str]] = frozenset(protocol.name for protocol in PROTOCOLS.values())

    def __init__(
        self,
        policies: Mapping[str, Policy],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        body_limit: int = BODY_LIMIT,
        keep_alive: float = KEEP_ALIVE_SECONDS,
    ) -> None:
        self._policies = dict(policies)
        self._host = host
        self._port = port
        self._body_limit = body_limit
        self._keep_alive = keep_alive
        self._sessions = Sessions()
        self._server: Server | None = None
        self._inference: Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen. Raises ``Unavailable`` when the address cannot be had."""
        listening = listen(self._host, self._port)
        self._port = listening.getsockname()[1]
        self._server = Server(self._app)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]), name="gateway")
        await self._server.ready.wait()
        self._inference = Server(self._inference_app)

    @property
    def base_url(self) -> str:
        """What an OpenAI client takes as its base URL."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}/v1"

    def inference_protocol(self) -> asyncio.Protocol:
        """What serves one connection, over any transport, with the routes that an agent needs to call its model and no
        others: the target of a relay into a sandbox. Raises ``ConnectionRefusedError`` when the gateway is closed."""
        if self._inference is None:
            raise ConnectionRefusedError("the gateway is not open")
        return self._inference.protocol()

    async def close(self) -> None:
        """Close every session, then stop listening. Idempotent."""
        await self._sessions.close_all()
        if self._server is not None and self._serving is not None:
            self._server.stop()
            await self._serving
            self._server = self._serving = None
        if self._inference is not None:
            inference, self._inference = self._inference, None
            await inference.shutdown()

    async def __aenter__(self) -> Gateway:
        await self.start()
        return self

    async def __aexit__(self, *reason: object) -> None:
        await self.close()

    def open_session(
        self,
        session_id: str,
        *,
        policy: str,
        sampling: SamplingParams = DEFAULT_SAMPLING,
        fixed: frozenset[str] = DISTRIBUTION,
        max_turns: int | None = None,
        cache_key: str | None = None,
    ) -> Session:
        """A session with a key of its own. Raises ``UsageError`` for an id in use or an unknown policy.

        ``sampling`` holds the defaults; those of its fields named in ``fixed`` hold whatever a client asks for.
        """
        if policy not in self._policies:
            raise UsageError(f"no policy is named {policy!r}; there are {', '.join(sorted(self._policies))}")
        return self._sessions.open(
            session_id,
            self._policies[policy],
            sampling=sampling,
            fixed=fixed,
            max_turns=max_turns,
            cache_key=cache_key,
        )

    async def close_session(self, session_id: str) -> list[Turn]:
        """Cancel what runs for a session and forget it; its turns. [] for one that is not open."""
        return await self._sessions.close(session_id)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._serve(Exchange(scope, receive, send), self._route)

    async def _inference_app(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._serve(Exchange(scope, receive, send), self._route_inference)

    async def _serve(self, exchange: Exchange, route: Callable[[Exchange], Awaitable[None]]) -> None:
        try:
            await route(exchange)
        except Disconnected:
            return
        except Exception as error:
            await _fail(exchange, _as_api_error(error))

    async def _route(self, exchange: Exchange) -> None:
        if exchange.path == "/health" and exchange.method in ("GET", "HEAD"):
            await exchange.respond(200, b"", content_type=b"text/plain")
        else:
            await self._route_inference(exchange)

    async def _route_inference(self, exchange: Exchange) -> None:
        """What an agent may call: nothing that administers, nothing that rewards."""
        if exchange.path == "/" and exchange.method == "HEAD":
            # Some agents look whether anybody is there before they send their key.
            await exchange.respond(200, b"", content_type=b"text/plain")
            return
        protocol = _protocol(exchange)
        if protocol is not None and exchange.method == "GET" and b"upgrade" in exchange.headers:
            # Told this, clients that prefer a WebSocket post instead, at once.
            raise ApiError(426, "there are no WebSockets here; post to this address", code="upgrade_not_supported")
        session = self._session(exchange)
        if protocol is not None and exchange.method == "POST":
            await self._call(exchange, session, protocol)
        elif (exchange.method, exchange.path) == ("GET", f"{VERSION}/models"):
            await exchange.respond(200, _spoken(exchange).models(session.policy.name))
        elif (exchange.method, exchange.path) == ("GET", f"{VERSION}/models/{session.policy.name}"):
            await exchange.respond(200, _spoken(exchange).model(session.policy.name))
        else:
            raise ApiError(404, f"there is no {exchange.method} {exchange.path} here", code="not_found")

    def _session(self, exchange: Exchange) -> Session:
        scheme, _, key = exchange.headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not key:
            key = exchange.headers.get(b"x-api-key", b"")
        session = self._sessions.of_key(key.strip()) if key else None
        if session is None:
            raise ApiError(401, "no open session has this API key", type="authentication_error", code="invalid_api_key")
        return session

    async def _call(self, exchange: Exchange, session: Session, protocol: Protocol) -> None:
        retry = exchange.headers.get(b"x-stainless-retry-count", b"0") not in (b"", b"0")
        data = await exchange.body(self._body_limit)
        request = protocol.parse(data, session, retry=retry)
        if request.counts:
            await exchange.respond(200, request.reply.counted(await session.policy.count(session, request.call)))
            return
        with _watched(exchange, session) as running:
            lost = session.admit(running, request.call)
            answer = _answers(session, request.call) if lost is None else replay(lost)
            try:
                await self._answer(exchange, request, answer)
                session.engine_error = None
            except RequestRefused:
                raise
            except EngineError as error:
                session.engine_error = str(error)
                raise

    async def _answer(
        self,
        exchange: Exchange,
        request: Request,
        answer: AsyncGenerator[Piece | Finish],
    ) -> None:
        reply = request.reply
        headers: list[Header] = []
        if request.overridden:
            headers.append((b"x-rl-harness-overridden", ", ".join(request.overridden).encode()))
        left = request.call.n
        async with aclosing(answer) as pieces:
            if not request.stream:
                turns: list[tuple[int, Turn]] = []
                async for piece in pieces:
                    if isinstance(piece, Finish):
                        turns.append((piece.choice, piece.turn))
                        if len(turns) == left:
                            whole = reply.whole([turn for _, turn in sorted(turns, key=lambda one: one[0])])
                            await exchange.respond(200, whole, headers=headers)
                    else:
                        reply.collect(piece)
                return
            opened = False
            exchange.on_error = reply.failed
            with exchange.keep_alive(self._keep_alive, headers):
                try:
                    async for piece in pieces:
                        data = b""
                        if not opened:
                            # Nothing is sent before the first chunk, so that an early failure still has its status.
                            opened = True
                            await exchange.start_stream(headers)
                            data = reply.first(Piece() if isinstance(piece, Finish) else piece)
                        if isinstance(piece, Finish):
                            left -= 1
                            data += reply.last(piece)
                        else:
                            data += reply.piece(piece)
                        if not left:
                            await exchange.end(data)
                        elif data:
                            await exchange.write(data)
                except (ApiError, RequestRefused) as error:
                    if reply.streams(_as_api_error(error)):
                        await exchange.start_stream(headers)
                    raise


def _answers(session: Session, call: Call) -> AsyncGenerator[Piece | Finish]:
    return session.policy.answer(session, call) if call.n == 1 else several(session.policy, session, call)


def _as_api_error(error: Exception) -> ApiError:
    """What a client is told of an error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UsageError):
        return ApiError(400, str(error))
    if isinstance(error, RequestRefused):
        return ApiError(error.status or 400, str(error), code=error.code)
    if isinstance(error, EngineError):
        status = error.status if error.status in _TOLD else None
        return ApiError(status or 502, str(error), type="engine_error", code="engine_error")
    log.error("a request failed", exc_info=error)
    if isinstance(error, RlHarnessError):
        return ApiError(500, str(error), type="server_error")
    return ApiError(500, "the gateway failed; its log says more", type="server_error")


def _protocol(exchange: Exchange) -> Protocol | None:
    """The one whose path it is."""
    return PROTOCOLS.get(exchange.path.removeprefix(VERSION)) if exchange.path.startswith(f"{VERSION}/") else None


def _spoken(exchange: Exchange) -> Protocol:
    """The one whose words a client understands."""
    found = _protocol(exchange)
    if found is None:
        found = next((protocol for header, protocol in BY_HEADER.items() if header in exchange.headers), DEFAULT)
    return found


@contextlib.contextmanager
def _watched(exchange: Exchange, session: Session) -> Generator[Running]:
    """Run a request as one of ``session``'s: it is cancelled when its client hangs up or the session closes."""
    task = asyncio.current_task()
    assert task is not None
    running = Running(task)
    watcher = asyncio.ensure_future(exchange.disconnected())

    def hung_up(_: object) -> None:
        if not exchange.complete and not watcher.cancelled():
            running.gone = True
            task.cancel()

    watcher.add_done_callback(hung_up)
    session.running.add(running)
    try:
        if session.closed:
            raise _closed()
        yield running
    except asyncio.CancelledError:
        if session.closed:
            task.uncancel()
            raise _closed() from None
        if running.gone:
            task.uncancel()
            raise Disconnected from None
        if running.replaced:
            task.uncancel()
            raise ApiError(409, "this request was sent again; the later one is answered", code="replaced") from None
        raise
    finally:
        session.running.discard(running)
        watcher.remove_done_callback(hung_up)
        watcher.cancel()


def _closed() -> ApiError:
    return ApiError(401, "this session is closed", type="authentication_error", code="session_closed")


async def _fail(exchange: Exchange, error: ApiError) -> None:
    if exchange.complete:
        return
    if exchange.started:
        assert exchange.on_error is not None, "a stream was started without a reply"
        await exchange.end(exchange.on_error(error))
    else:
        # A body that was not read would be taken for the next request.
        headers = [(b"connection", b"close")] if error.status == 413 else []
        await exchange.respond(error.status, _spoken(exchange).error(error), headers=headers)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ``Unavailable`` when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio sets TCP_NODELAY on what is accepted; without, each answer waits 40 ms.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(2048)
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise Unavailable(
                f"port {port} on {host} is in use", remedy="choose another port, or 0 for any free one"
            ) from error
        raise Unavailable(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
    return listening


class Server(uvicorn.Server):
    """uvicorn without signal handlers (the caller has its own) and without a clock that ticks when idle."""

    def __init__(self, app: Callable[..., Any]) -> None:
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            date_header=False,
            server_header=False,
            timeout_keep_alive=600,
        )
        super().__init__(config)
        self.servers: list[asyncio.Server] = []
        self.ready = asyncio.Event()
        self._stopping = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def main_loop(self) -> None:
        await self.on_tick(0)
        self.ready.set()
        await self._stopping.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Sessions are closed by now, so that no response is left to wait for: no grace, no polling."""
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        if self.server_state.tasks:
            await asyncio.wait(list(self.server_state.tasks))

    def protocol(self) -> asyncio.Protocol:
        """What serves one connection that was made in another way than by listening."""
        if not self.config.loaded:
            self.config.load()
        make: Any = self.config.http_protocol_class
        protocol: asyncio.Protocol = make(config=self.config, server_state=self.server_state, app_state={})
        return protocol

    def stop(self) -> None:
        """Let :meth:`serve` return."""
        self._stopping.set()
