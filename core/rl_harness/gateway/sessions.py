"""Sessions: what one key opens, the turns recorded under it, and the requests that run for it now."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Protocol

from rl_harness.errors import UsageError
from rl_harness.gateway.calls import Call, Finish, Piece
from rl_harness.gateway.errors import ApiError
from rl_harness.gateway.sampling import DEFAULT_SAMPLING, DISTRIBUTION
from rl_harness.gateway.tree import TurnTree
from rl_harness.records.turn import SamplingParams, Turn

_GOODBYE_SECONDS = 1.0


class Policy(Protocol):
    """Who answers a session's calls. ``name`` is what clients see as the model."""

    name: str
    #: ``tokens`` or ``chat``: whether turns are exact.
    protocol: str

    def answer(self, session: Session, call: Call) -> AsyncGenerator[Piece | Finish]:
        """Pieces as they come, then one Finish. Closing it early cancels the generation and records nothing."""
        ...

    async def count(self, session: Session, call: Call) -> int:
        """How many tokens a call's prompt has. Raises :class:`ApiError` (404) where nobody knows."""
        ...


@dataclass(slots=True, eq=False)
class Running:
    """A request being answered, by ``turns`` turns. ``gone``: its client hung up. ``replaced``: its client sent it
    again."""

    task: asyncio.Task[None]
    key: bytes = b""
    turns: int = 1
    gone: bool = False
    replaced: bool = False


@dataclass(slots=True, eq=False, weakref_slot=True)
class Session:
    """One key's conversation with one policy. Made by :meth:`Sessions.open`."""

    id: str
    api_key: str
    policy: Policy
    sampling: SamplingParams
    fixed: frozenset[str]
    max_turns: int | None
    cache_key: str
    tree: TurnTree = field(default_factory=TurnTree)
    running: set[Running] = field(default_factory=set)
    closed: bool = False
    #: How the engine failed the last call, for whoever must tell that from the agent's own failure.
    engine_error: str | None = None
    #: Whether a call was refused because all turns were used.
    exhausted: bool = False

    @property
    def turns(self) -> list[Turn]:
        """Recorded so far, in the order they were completed."""
        return list(self.tree.turns)

    def admit(self, running: Running, call: Call) -> Turn | None:
        """Count a request in. Raises :class:`ApiError` when the session has no turns left.

        A request that its client sends again replaces the one given up on. If that was answered, but the answer
        got lost on its way, the result is the turn that answers this one too: nothing is sampled beside it.
        """
        running.key = call.conversation.key
        running.turns = call.n
        if call.retry:
            for other in self.running:
                if other is not running and other.key == running.key:
                    other.replaced = True
                    other.task.cancel()
            lost = self.tree.unused_answer(call.conversation)
            if lost is not None and not call.logprobs and call.n == 1:
                return lost
        if self.max_turns is not None:
            others = sum(other.turns for other in self.running if other.key not in (b"", running.key))
            if len(self.tree.turns) + others + call.n > self.max_turns:
                self.exhausted = True
                raise ApiError(
                    403,
                    f"this session's limit of {self.max_turns} model calls is reached",
                    type="turn_limit",
                    code="turn_limit",
                )
        return None


class Sessions:
    """Every open session, found by id or by key. Keys are kept as digests: looking one up takes the same time
    whatever the key is, and nothing here can leak one."""

    def __init__(self) -> None:
        self._by_id: dict[str, Session] = {}
        self._by_key: dict[bytes, Session] = {}

    def open(
        self,
        id: str,
        policy: Policy,
        *,
        sampling: SamplingParams = DEFAULT_SAMPLING,
        fixed: frozenset[str] = DISTRIBUTION,
        max_turns: int | None = None,
        cache_key: str | None = None,
    ) -> Session:
        if id in self._by_id:
            raise UsageError(f"session {id!r} is already open", remedy="close it first, or choose another id")
        key = f"rlh-{secrets.token_urlsafe(24)}"
        session = Session(id, key, policy, sampling, fixed, max_turns, id if cache_key is None else cache_key)
        self._by_id[id] = self._by_key[_digest(key.encode())] = session
        return session

    def of_key(self, key: bytes) -> Session | None:
        return self._by_key.get(_digest(key))

    def __len__(self) -> int:
        return len(self._by_id)

    async def close(self, id: str) -> list[Turn]:
        """Forget a session, then cancel what runs for it; its turns. Nothing is left to close twice: []."""
        session = self._by_id.pop(id, None)
        if session is None:
            return []
        del self._by_key[_digest(session.api_key.encode())]
        session.closed = True
        tasks = {running.task for running in session.running}
        while tasks:
            for task in tasks:
                task.cancel()
            # Each says goodbye to its client, who may have stopped reading: then it is cancelled again.
            _, tasks = await asyncio.wait(tasks, timeout=_GOODBYE_SECONDS)
        return session.turns

    async def close_all(self) -> None:
        for id in list(self._by_id):
            await self.close(id)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
