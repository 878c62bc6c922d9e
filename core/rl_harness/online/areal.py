"""The routes of AReaL's proxy for online training, so that programs written for it run unchanged: sessions with one key
for calling and for rewarding, and model calls without ``/v1``.

The shapes are those of ``areal/experimental/openai/proxy`` in AReaL's repository, which its ``examples/openclaw`` uses
(at 4aef98d, May 2026). Two things are ours: an episode without a reward is unscored and not a 0, and nobody waits for
capacity.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from rl_harness.gateway import Gateway
from rl_harness.gateway.errors import ApiError, bad_request
from rl_harness.gateway.exchange import Exchange
from rl_harness.online.keys import Keys
from rl_harness.online.rewards import Reward
from rl_harness.online.routes import BODY_LIMIT, PREFIX, Routes, key_of, respond
from rl_harness.online.sessions import OnlineSessions

#: Where its clients post model calls, below an address without ``/v1``.
_CALLS = ("/chat/completions", "/responses")


class _Start(msgspec.Struct):
    task_id: str = "task"
    api_key: str | None = None


class _SetReward(msgspec.Struct):
    reward: float
    interaction_id: str | None = None


class ArealRoutes:
    """Before ``routes``, which have the others."""

    def __init__(self, sessions: OnlineSessions, routes: Routes) -> None:
        self._sessions = sessions
        self._routes = routes

    def mount(self, gateway: Gateway) -> None:
        """Answer below ``/rl``, and model calls that are posted without ``/v1``."""

        async def call(exchange: Exchange) -> None:
            exchange.path = f"/v1{exchange.path}"
            await gateway.route_inference(exchange)

        gateway.mount(PREFIX, self)
        for path in _CALLS:
            gateway.mount(path, call)

    async def __call__(self, exchange: Exchange) -> None:
        handlers = {
            ("POST", "/rl/start_session"): self._start,
            ("POST", "/rl/set_reward"): self._set_reward,
            ("POST", "/rl/end_session"): self._end,
        }
        handler = handlers.get((exchange.method, exchange.path))
        if handler is None:
            await self._routes(exchange)
            return
        try:
            told = await handler(exchange)
        except ApiError as error:
            await respond(exchange, {"detail": error.message}, status=error.status)
        else:
            await respond(exchange, told)

    async def _start(self, exchange: Exchange) -> dict[str, Any]:
        """A new session, or with the key of one its next episode."""
        self._routes.require_admin(exchange)
        body = _decode(await exchange.body(BODY_LIMIT) or b"{}", _Start)
        row = self._sessions.of_api_key(body.api_key) if body.api_key else None
        if row is not None and body.api_key is not None:
            if row.key_digest != row.reward_digest:
                raise ApiError(409, "this key belongs to a session that was not started here")
            if row.ended_at is None:
                await self._sessions.refresh(row.id, next_episode=True, group=body.task_id)
            else:
                await self._sessions.reopen(row, group=body.task_id)
            return {"session_id": row.id, "api_key": body.api_key}
        keys = Keys.new()
        keys = msgspec.structs.replace(keys, reward=keys.api)
        session, _ = await self._sessions.start(group=body.task_id, keys=keys)
        return {"session_id": session.row.id, "api_key": keys.api}

    async def _set_reward(self, exchange: Exchange) -> dict[str, Any]:
        """It may be set again until the session ends; without an interaction it is the whole's."""
        session = self._sessions.of_reward_key(key_of(exchange))
        body = _decode(await exchange.body(BODY_LIMIT), _SetReward)
        if not math.isfinite(body.reward):
            raise bad_request("a reward is a finite number")
        if session.current is None:
            raise bad_request("No interactions in session")
        reward = Reward(reward=body.reward, turn=body.interaction_id, replace=True)
        await self._sessions.reward(session, reward, close=False)
        return {"message": "success"}

    async def _end(self, exchange: Exchange) -> dict[str, Any]:
        session = self._sessions.of_reward_key(key_of(exchange))
        count = 0 if session.current is None else len(session.current.turns)
        await self._sessions.end(session.row.id)
        return {"message": "success", "interaction_count": count}


def _decode(data: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"the body cannot be read: {error}") from None
