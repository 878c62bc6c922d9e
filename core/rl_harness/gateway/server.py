"""The gateway: the address agents point at. Routes keyed requests to a session's policy, in the caller's event
loop, and stops what nobody waits for any more."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Mapping
from contextlib import aclosing
from functools import partial
from typing import ClassVar
from urllib.parse import unquote

from rl_harness.errors import EngineError, RequestRefused, RlHarnessError, UsageError
from rl_harness.gateway.calls import Call, Finish, Piece, replay
from rl_harness.gateway.choices import several
from rl_harness.gateway.errors import ApiError, ContextTooLong
from rl_harness.gateway.exchange import Disconnected, Exchange, Header
from rl_harness.gateway.http import HttpServer
from rl_harness.gateway.limits import Budget, Limits
from rl_harness.gateway.listening import Hosts, listen
from rl_harness.gateway.protocols import BY_HEADER, DEFAULT, PROTOCOLS, Protocol
from rl_harness.gateway.protocols.base import Request
from rl_harness.gateway.sampling import DEFAULT_SAMPLING, DISTRIBUTION
from rl_harness.gateway.sessions import KeyDigests, Policy, Running, Session, Sessions
from rl_harness.records.turn import SamplingParams, Turn
from rl_harness.redaction import RedactingFilter, Secrets

log = logging.getLogger("rl_harness.gateway")

VERSION = "/v1"
PREFIX = "/s/"

Handler = Callable[[Exchange], Awaitable[None]]
"""Answers an exchange, or raises :class:`ApiError`. It checks for itself who asks."""

#: What a chat API answered with that its client is answered with too: asking again does not help.
_TOLD = frozenset({401, 402, 403, 404})


class Gateway:
    """Serves ``policies`` to sessions. Listens on loopback unless given another ``host``; port 0 is any free one.

    On loopback, a request must name this machine in its host header, or one of ``hosts``: a web page whose name was
    pointed here is refused. ``secrets`` are those looked for in what is recorded.
    """

    #: What it answers to, in the words of a harness's capabilities.
    protocols: ClassVar[frozenset[str]] = frozenset(protocol.name for protocol in PROTOCOLS.values())

    def __init__(
        self,
        policies: Mapping[str, Policy],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        limits: Limits | None = None,
        secrets: Secrets | None = None,
        hosts: Iterable[str] = (),
    ) -> None:
        self.limits = limits or Limits()
        self.secrets = secrets if secrets is not None else Secrets.of_environment()
        self._policies = dict(policies)
        self._host = host
        self._port = port
        self._hosts = Hosts(host, hosts)
        self._sessions = Sessions(self.secrets, self.limits)
        self._bodies = Budget(self.limits.bodies)
        self._mounted: dict[str, Handler] = {}
        self._server: HttpServer | None = None
        self._inference: HttpServer | None = None
        self._draining = False
        self._calls: set[Running] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._progress: dict[str, float] = {}
        self._watchdog: asyncio.TimerHandle | None = None
        self._filter = RedactingFilter(self.secrets)

    def mount(self, path: str, handler: Handler) -> None:
        """Let ``handler`` answer ``path`` and all below it, on the listening socket only: agents in a sandbox, who come
        by :meth:`inference_protocol`, never reach it. No session's key is asked for; the handler must ask for its own.
        """
        if not path.startswith("/") or path == "/" or (path + "/").startswith((f"{VERSION}/", PREFIX)):
            raise ValueError(f"{path!r} cannot be mounted")
        self._mounted[path.rstrip("/")] = handler

    async def start(self) -> None:
        """Listen. Raises ``Unavailable`` when the address cannot be had."""
        listening = listen(self._host, self._port)
        self._port = listening.getsockname()[1]
        self._server = HttpServer(self._app)
        await self._server.listen(listening)
        self._inference = HttpServer(self._inference_app)
        log.addFilter(self._filter)

    @property
    def root_url(self) -> str:
        """The address without a path."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    @property
    def base_url(self) -> str:
        """What an OpenAI client takes as its base URL."""
        return self.root_url + VERSION

    def inference_protocol(self) -> asyncio.Protocol:
        """What serves one connection, over any transport, with the routes that an agent needs to call its model and no
        others: the target of a relay into a sandbox. Raises ``ConnectionRefusedError`` when the gateway is closed."""
        if self._inference is None:
            raise ConnectionRefusedError("the gateway is not open")
        return self._inference.protocol()

    async def drain(self, timeout: float | None = None) -> bool:
        """Take no more model calls (503) and wait for those that run; whether all ended in time. Nothing is
        cancelled: :meth:`close` does that."""
        self._draining = True
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Close every session, then stop listening. Idempotent."""
        await self._sessions.close_all()
        server, self._server = self._server, None
        inference, self._inference = self._inference, None
        for one in (server, inference):
            if one is not None:
                await one.close()
        if self._watchdog is not None:
            self._watchdog.cancel()
        log.removeFilter(self._filter)

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
        digests: KeyDigests | None = None,
    ) -> Session:
        """A session with a key of its own. Raises ``UsageError`` for an id or a key in use or an unknown policy.

        ``sampling`` holds the defaults; those of its fields named in ``fixed`` hold whatever a client asks for.
        ``digests``: of keys given out before, for a session that goes on; new ones are made otherwise.
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
            digests=digests,
        )

    async def close_session(self, session_id: str) -> list[Turn]:
        """Cancel what runs for a session and forget it; its turns as they may be stored, see :meth:`Session.storable`.
        [] for one that is not open."""
        return await self._sessions.close(session_id)

    async def _app(self, exchange: Exchange) -> None:
        await _answered(exchange, self._route)

    async def _inference_app(self, exchange: Exchange) -> None:
        await _answered(exchange, self.route_inference)

    async def _route(self, exchange: Exchange) -> None:
        if not self._hosts.allow(exchange.headers.get(b"host", b"")):
            raise ApiError(421, "this is not the host that the request names", code="misdirected_request")
        if exchange.path == "/health" and exchange.method in ("GET", "HEAD"):
            await exchange.respond(200, b"", content_type=b"text/plain")
            return
        for path, handler in self._mounted.items():
            if exchange.path == path or exchange.path.startswith(path + "/"):
                if exchange.method == "OPTIONS":
                    raise _no_options()
                await handler(exchange)
                return
        await self.route_inference(exchange)

    async def route_inference(self, exchange: Exchange) -> None:
        """What an agent may call: nothing that administers, nothing that rewards."""
        if exchange.method == "OPTIONS":
            raise _no_options()
        named = _named(exchange)
        if exchange.method == "HEAD" and exchange.path == "/":
            # Some agents look whether anybody is there before they send their key.
            await exchange.respond(200, b"", content_type=b"text/plain")
            return
        protocol = _protocol(exchange)
        if protocol is not None and exchange.method == "GET" and b"upgrade" in exchange.headers:
            # Told this, clients that prefer a WebSocket post instead, at once.
            raise ApiError(426, "there are no WebSockets here; post to this address", code="upgrade_not_supported")
        session = self._session(exchange, named)
        if protocol is not None and exchange.method == "POST":
            await self._call(exchange, session, protocol)
        elif (exchange.method, exchange.path) == ("GET", f"{VERSION}/models"):
            await exchange.respond(200, _spoken(exchange).models(session.policy.name))
        elif (exchange.method, exchange.path) == ("GET", f"{VERSION}/models/{session.policy.name}"):
            await exchange.respond(200, _spoken(exchange).model(session.policy.name))
        else:
            raise ApiError(
                404, f"there is no {exchange.method} {exchange.path} here{_meant(exchange.path)}", code="not_found"
            )

    def _session(self, exchange: Exchange, named: str | None) -> Session:
        """Whose request it is, by its key or by the secret in its path. ``named``: what its path names."""
        scheme, _, key = exchange.headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not key.strip():
            key = exchange.headers.get(b"x-api-key", b"")
        session = self._sessions.of_key(key.strip()) if key else None
        if named is not None:
            by_secret = self._sessions.of_secret(named)
            if by_secret is not None and session in (None, by_secret):
                return by_secret
            if session is not None and (by_secret is not None or not _same(unquote(named), session.id)):
                raise ApiError(403, "this key is not this session's", type="permission_error", code="foreign_key")
        if session is None:
            raise ApiError(401, "no open session has this API key", type="authentication_error", code="invalid_api_key")
        return session

    async def _call(self, exchange: Exchange, session: Session, protocol: Protocol) -> None:
        if self._draining:
            raise ApiError(503, "the gateway is about to close", type="server_error", code="draining")
        if exchange.headers.get(b"content-encoding", b"identity") != b"identity":
            raise ApiError(415, "send the body uncompressed", code="unsupported_encoding")
        retry = exchange.headers.get(b"x-stainless-retry-count", b"0") not in (b"", b"0")
        limit = self.limits.body
        with self._running(exchange, session) as running:
            room = await self._room(exchange, session, limit)
            try:
                data = await exchange.body(limit)
                if len(data) < room:
                    session.bodies.give(room - len(data))
                    self._bodies.give(room - len(data))
                    room = len(data)
                request = protocol.parse(data, session, retry=retry)
                del data
                if request.counts:
                    tokens = await session.policy.count(session, request.call)
                    await exchange.respond(200, request.reply.counted(tokens))
                else:
                    await self._perform(exchange, session, running, request)
            finally:
                session.bodies.give(room)
                self._bodies.give(room)

    async def _room(self, exchange: Exchange, session: Session, limit: int) -> int:
        """Wait until there is room for a request's body, which is kept until the request is answered; how much."""
        room = limit if exchange.announced is None else min(exchange.announced, limit)
        if not session.bodies.take_now(room):
            await session.bodies.take(room)
        if not self._bodies.take_now(room):
            try:
                await self._bodies.take(room)
            except BaseException:
                session.bodies.give(room)
                raise
        return room

    async def _perform(self, exchange: Exchange, session: Session, running: Running, request: Request) -> None:
        """Answer a call, when it is its turn among those of its session."""
        headers: list[Header] = []
        if request.overridden:
            headers.append((b"x-rl-harness-overridden", ", ".join(request.overridden).encode()))
        exchange.on_error = request.reply.failed
        silence = exchange.keep_alive(self.limits.keep_alive, headers) if request.stream else contextlib.nullcontext()
        with silence:
            lost = session.admit(running, request.call)
            if not session.calls.take_now(1):
                if self.limits.refuse:
                    raise ApiError(429, "this session has too many calls running", type="rate_limit_error", code="busy")
                await session.calls.take(1)
            try:
                running.since = asyncio.get_running_loop().time()
                answer = _answers(session, request.call) if lost is None else replay(lost)
                await self._answer(exchange, session, request, answer, headers)
                session.engine_error = session.too_long = None
            except ContextTooLong as error:
                session.too_long = error.message
                raise
            except RequestRefused:
                raise
            except EngineError as error:
                session.engine_error = str(error)
                raise
            finally:
                session.calls.give(1)

    async def _answer(
        self,
        exchange: Exchange,
        session: Session,
        request: Request,
        answer: AsyncGenerator[Piece | Finish],
        headers: list[Header],
    ) -> None:
        reply, left = request.reply, request.call.n
        opened, held = False, b""
        policy, now = session.policy.name, asyncio.get_running_loop().time
        finished: list[Finish] = []
        try:
            async with aclosing(answer) as pieces:
                async for piece in pieces:
                    self._progress[policy] = now()
                    if isinstance(piece, Finish):
                        session.completed(request.call, piece.turn)
                        finished.append(piece)
                        left -= 1
                        if not left:
                            turns = [one.turn.id for one in finished]
                            exchange.on_undelivered = partial(_lost, weakref.ref(session), turns)
                    if request.stream:
                        data, held = held, b""
                        if not opened:
                            # Nothing is sent before the first chunk, so that an early failure still has its status.
                            opened = True
                            exchange.start_stream(headers)
                            data += reply.first(Piece() if isinstance(piece, Finish) else piece)
                        data += reply.last(piece) if isinstance(piece, Finish) else reply.piece(piece)
                        if not left:
                            await exchange.end(data)
                        elif not isinstance(piece, Finish) and piece.final:
                            held = data  # goes out with what follows at once
                        elif data:
                            await exchange.write(data)
                    elif not isinstance(piece, Finish):
                        reply.collect(piece)
                    elif not left:
                        finished.sort(key=lambda one: one.choice)
                        await exchange.respond(200, reply.whole([one.turn for one in finished]), headers=headers)
        finally:
            if left:
                session.undelivered.update(one.turn.id for one in finished)

    @contextlib.contextmanager
    def _running(self, exchange: Exchange, session: Session) -> Generator[Running]:
        """Run a request as one of ``session``'s: it is cancelled when its client hangs up or the session closes."""
        task = asyncio.current_task()
        assert task is not None
        running = Running(task, policy=session.policy.name)

        def hung_up() -> None:
            running.gone = True
            task.cancel()

        exchange.on_gone = hung_up
        session.began(running)
        self._calls.add(running)
        self._idle.clear()
        if self._watchdog is None:
            self._watch()
        try:
            if session.closed:
                raise _closed()
            yield running
        except asyncio.CancelledError:
            error = _why_cancelled(running, session, self.limits.stall)
            if error is None:
                raise
            task.uncancel()
            raise error from None
        finally:
            exchange.on_gone = None
            session.ended(running)
            self._calls.discard(running)
            if not self._calls:
                self._idle.set()

    def _watch(self) -> None:
        """Give up on calls of policies that give no tokens at all any more. Goes off while there are calls."""
        self._watchdog = None
        if not self._calls:
            return
        loop = asyncio.get_running_loop()
        now, stall = loop.time(), self.limits.stall
        for running in self._calls:
            if running.since and now - max(running.since, self._progress.get(running.policy, 0.0)) > stall:
                running.stalled = True
                running.task.cancel()
        self._watchdog = loop.call_later(stall / 4, self._watch)


def _answers(session: Session, call: Call) -> AsyncGenerator[Piece | Finish]:
    return session.policy.answer(session, call) if call.n == 1 else several(session.policy, session, call)


def _lost(session: weakref.ref[Session], turns: list[str], certain: bool) -> None:
    """The reply of these turns did not reach its client, or may not have, who may ask for it again."""
    alive = session()
    if alive is not None:
        (alive.undelivered if certain else alive.doubtful).update(turns)


def _named(exchange: Exchange) -> str | None:
    """What stands for a session in the path, which is taken off it."""
    if not exchange.path.startswith(PREFIX):
        return None
    named, slash, rest = exchange.path.removeprefix(PREFIX).partition("/")
    exchange.path = slash + rest
    return named


def _protocol(exchange: Exchange) -> Protocol | None:
    """The one whose path it is."""
    return PROTOCOLS.get(exchange.path.removeprefix(VERSION)) if exchange.path.startswith(f"{VERSION}/") else None


def _meant(path: str) -> str:
    """What to do where a client was given the address of another: some add the version themselves, some do not."""
    if path.startswith(VERSION * 2 + "/"):
        return f"; this client adds {VERSION} itself, as Anthropic's do: give it the address without {VERSION}"
    if path in PROTOCOLS:
        return f"; give this client the address that ends in {VERSION}"
    return ""


def _spoken(exchange: Exchange) -> Protocol:
    """The one whose words a client understands."""
    found = _protocol(exchange)
    if found is None:
        found = next((protocol for header, protocol in BY_HEADER.items() if header in exchange.headers), DEFAULT)
    return found


def _same(named: str, id: str) -> bool:
    return hmac.compare_digest(named.encode(errors="replace"), id.encode(errors="replace"))


def _why_cancelled(running: Running, session: Session, stall: float) -> Exception | None:
    """What a cancelled request ends with; None if it was cancelled for another reason than ours."""
    if session.closed:
        return _closed()
    if running.gone:
        return Disconnected()
    if running.replaced:
        return ApiError(409, "this request was sent again; the later one is answered", code="replaced")
    if running.stalled:
        session.engine_error = f"the engine gave no token for {stall:g} seconds"
        return ApiError(504, session.engine_error, type="engine_error", code="engine_timeout")
    return None


def _closed() -> ApiError:
    return ApiError(401, "this session is closed", type="authentication_error", code="session_closed")


def _no_options() -> ApiError:
    return ApiError(405, "OPTIONS is not answered: no web page of another origin may call this", code="not_allowed")


async def _answered(exchange: Exchange, route: Handler) -> None:
    """Every failure is answered in the words of its protocol."""
    try:
        await route(exchange)
    except Disconnected:
        raise
    except Exception as error:
        await _fail(exchange, _as_api_error(error))


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


async def _fail(exchange: Exchange, error: ApiError) -> None:
    if exchange.complete:
        return
    if not exchange.started:
        await exchange.respond(error.status, _spoken(exchange).error(error))
    elif exchange.on_error is not None:
        await exchange.end(exchange.on_error(error))
