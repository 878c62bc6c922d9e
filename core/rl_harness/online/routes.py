"""The routes for whoever administers sessions (with the admin key) and for whoever rewards (with a session's reward
key). They are on the address that ``serve`` listens on, never on the way into a sandbox."""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from rl_harness.gateway.errors import ApiError, bad_request
from rl_harness.gateway.exchange import Exchange
from rl_harness.online.keys import Keys, digest
from rl_harness.online.rewards import parse_reward, total
from rl_harness.online.sessions import OnlineSession, OnlineSessions, describe

T = TypeVar("T")

PREFIX = "/rl"
BODY_LIMIT = 1 << 20
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MOST_SECONDS = 10 * 366 * 86400.0


class Start(msgspec.Struct, forbid_unknown_fields=True):
    id: str | None = None
    group: str | None = None
    ttl: float | None = None


class Refresh(msgspec.Struct, forbid_unknown_fields=True):
    ttl: float | None = None
    next_episode: bool = False
    group: str | None = None


class End(msgspec.Struct, forbid_unknown_fields=True):
    pass


class Routes:
    """``base_url`` is what agents are pointed at, given the host that a request named; ``status`` says how training
    goes."""

    def __init__(
        self,
        sessions: OnlineSessions,
        *,
        admin_digest: bytes,
        base_url: Callable[[str], str],
        status: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._sessions = sessions
        self._admin_digest = admin_digest
        self._base_url = base_url
        self._status = status

    async def __call__(self, exchange: Exchange) -> None:
        """Answer a request for something below ``/rl``."""
        method, path = exchange.method, exchange.path.removeprefix(f"{PREFIX}/")
        if (method, path) == ("POST", "reward"):
            await self._reward(exchange)
            return
        self.require_admin(exchange)
        parts = path.split("/")
        if path == "sessions" and method == "POST":
            await self._start(exchange)
        elif path == "sessions" and method == "GET":
            await respond(exchange, {"sessions": self._sessions.list()})
        elif path == "status" and method == "GET":
            await respond(exchange, dict(self._status()))
        elif parts[0] == "sessions" and len(parts) == 2 and method in ("GET", "DELETE"):
            await self._one(exchange, method, parts[1])
        elif parts[0] == "sessions" and len(parts) == 3 and method == "POST" and parts[2] in ("refresh", "end"):
            await (self._refresh if parts[2] == "refresh" else self._end)(exchange, parts[1])
        else:
            raise ApiError(404, f"there is no {method} {exchange.path} here", code="not_found")

    def require_admin(self, exchange: Exchange) -> None:
        if not hmac.compare_digest(digest(key_of(exchange)), self._admin_digest):
            raise ApiError(401, "this needs the admin key", type="authentication_error", code="invalid_admin_key")

    async def _start(self, exchange: Exchange) -> None:
        body = await read(exchange, Start)
        if body.id is not None and not _ID.fullmatch(body.id):
            raise bad_request(f"id: {body.id[:80]!r} is not letters, digits, '.', '_' and '-', at most 64", param="id")
        session, keys = await self._sessions.start(
            id=body.id, group=_checked_group(body.group), ttl=_checked_ttl(body.ttl)
        )
        await respond(exchange, self._opened(exchange, session, keys), status=201)

    def _opened(self, exchange: Exchange, session: OnlineSession, keys: Keys) -> dict[str, Any]:
        base = self._base_url(exchange.headers.get(b"host", b"").decode("latin-1"))
        return {
            "id": session.row.id,
            "base_url": base,
            "api_key": keys.api,
            "reward_key": keys.reward,
            # Whoever has this address needs no key: for agents that can be given nothing else.
            "secret_url": f"{base.removesuffix('/v1')}/s/{keys.secret}/v1",
            "group": session.row.group,
            "expires_at": session.row.expires_at,
        }

    async def _one(self, exchange: Exchange, method: str, id: str) -> None:
        if method == "DELETE":
            session = await self._sessions.end(id, by="deleted", wait=False)
            await respond(exchange, describe(session))
        else:
            await respond(exchange, self._sessions.info(id))

    async def _refresh(self, exchange: Exchange, id: str) -> None:
        body = await read(exchange, Refresh)
        session = await self._sessions.refresh(
            id, ttl=_checked_ttl(body.ttl), next_episode=body.next_episode, group=_checked_group(body.group)
        )
        await respond(exchange, describe(session))

    async def _end(self, exchange: Exchange, id: str) -> None:
        await read(exchange, End)
        await respond(exchange, describe(await self._sessions.end(id)))

    async def _reward(self, exchange: Exchange) -> None:
        session = self._sessions.of_reward_key(key_of(exchange))
        reward = parse_reward(await exchange.body(BODY_LIMIT))
        row = await self._sessions.reward(session, reward)
        told = {
            "session": row.session,
            "episode": row.id,
            "reward": total(row.rewards, row.turn_rewards),
            "closed": row.closed_at is not None,
        }
        await respond(exchange, {**told, **self._status()})


def key_of(exchange: Exchange) -> bytes:
    """The key that a request brings; Raises :class:`ApiError` (401) if it brings none."""
    scheme, _, key = exchange.headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() != b"bearer" or not key.strip():
        key = exchange.headers.get(b"x-api-key", b"")
    if not key.strip():
        raise ApiError(
            401, "this needs a key: Authorization: Bearer KEY", type="authentication_error", code="missing_key"
        )
    return key.strip()


async def read(exchange: Exchange, kind: type[T]) -> T:
    """The body as ``kind``; an empty one is ``{}``."""
    data = await exchange.body(BODY_LIMIT)
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise bad_request(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise bad_request("the body is not JSON") from None


async def respond(exchange: Exchange, body: Mapping[str, Any], *, status: int = 200) -> None:
    await exchange.respond(status, msgspec.json.encode(body))


def _checked_ttl(ttl: float | None) -> float | None:
    if ttl is not None and not 0 < ttl <= _MOST_SECONDS:
        raise bad_request(f"ttl: {ttl} is not a number of seconds above 0, at most ten years", param="ttl")
    return ttl


def _checked_group(group: str | None) -> str | None:
    if group is not None and not 0 < len(group) <= 200:
        raise bad_request("group: from 1 to 200 characters", param="group")
    return group
