"""Sessions: what one key opens, the turns recorded under it, and the requests that run for it now."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol
from urllib.parse import quote

from rl_harness.errors import UsageError
from rl_harness.gateway.calls import Call, Finish, Piece
from rl_harness.gateway.errors import ApiError
from rl_harness.gateway.limits import Budget, Limits
from rl_harness.gateway.sampling import DEFAULT_SAMPLING, DISTRIBUTION
from rl_harness.gateway.scanning import Scanner
from rl_harness.gateway.storing import storable
from rl_harness.gateway.tree import TurnTree
from rl_harness.records.turn import SamplingParams, Turn
from rl_harness.redaction import KEY_MARK, PATH_MARK, Secrets

_GOODBYE_SECONDS = 1.0
_SECRET_BYTES = 24


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
    again. ``stalled``: the policy gives no tokens. ``since``: when the policy was asked, on the event loop's clock; 0
    while it waits."""

    task: asyncio.Task[None]
    policy: str
    key: bytes = b""
    turns: int = 1
    gone: bool = False
    replaced: bool = False
    stalled: bool = False
    since: float = 0.0


class KeyDigests(NamedTuple):
    """What is known of keys that were given out before, perhaps by another process: of a session's key, and of the
    secret in its path."""

    key: bytes
    secret: bytes


@dataclass(slots=True, eq=False, weakref_slot=True)
class Session:
    """One key's conversation with one policy. Made by :meth:`Sessions.open`. ``secret`` opens it without the key, as a
    part of the path. Both are empty where only their digests are known."""

    id: str
    api_key: str = field(repr=False)
    secret: str = field(repr=False)
    policy: Policy
    sampling: SamplingParams
    fixed: frozenset[str]
    max_turns: int | None
    cache_key: str
    calls: Budget
    bodies: Budget
    scanner: Scanner
    digests: KeyDigests
    tree: TurnTree = field(default_factory=TurnTree)
    running: set[Running] = field(default_factory=set)
    closed: bool = False
    #: How the engine failed the last call, for whoever must tell that from the agent's own failure.
    engine_error: str | None = None
    #: Whether a call was refused because all turns were used.
    exhausted: bool = False
    #: Why the last call was refused, if its conversation did not fit the context.
    too_long: str | None = None
    #: Turn ids: what secrets their prompts and completions hold.
    held: dict[str, tuple[str, ...]] = field(default_factory=dict)
    #: Turn ids whose replies got lost on their way to the client, and those of which nobody knows: their connection
    #: broke when all was sent, as it does when an agent is killed, with its answer read or unread.
    undelivered: set[str] = field(default_factory=set)
    doubtful: set[str] = field(default_factory=set)
    #: For how long at least one call was being answered, those included of which no turn came.
    seconds: float = 0.0
    _since: float = 0.0

    def began(self, running: Running) -> None:
        if not self.running:
            self._since = time.monotonic()
        self.running.add(running)

    def ended(self, running: Running) -> None:
        self.running.discard(running)
        if not self.running:
            self.seconds += time.monotonic() - self._since

    @property
    def turns(self) -> list[Turn]:
        """Recorded so far, in the order they were completed, with all they hold. To be stored: :meth:`storable`."""
        return list(self.tree.turns)

    @property
    def path(self) -> str:
        """The base path that opens it together with its key: instead of ``/v1``, with nothing else to tell it by."""
        return f"/s/{quote(self.id, safe='')}/v1"

    @property
    def secret_path(self) -> str:
        """The base path that opens it without a key; as secret as one."""
        return f"/s/{self.secret}/v1"

    def storable(self) -> list[Turn]:
        """The turns as they may be kept: without secrets, and without replies that nobody received."""
        return storable(self.tree.turns, held=self.held, undelivered=self.undelivered, secrets=self.scanner.secrets)

    def admit(self, running: Running, call: Call) -> Turn | None:
        """Count a request in. Raises :class:`ApiError` when the session has no turns left.

        A request that its client sends again replaces the one given up on. If that was answered, but the answer
        got lost on its way, the result is the turn that answers this one too: nothing is sampled beside it.
        """
        self.tree.meet(call.conversation)
        running.key = call.conversation.key
        running.turns = call.n
        if call.retry:
            for other in self.running:
                if other is not running and other.key == running.key:
                    other.replaced = True
                    other.task.cancel()
        lost = self._lost(call)
        if lost is not None:
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

    def _lost(self, call: Call) -> Turn | None:
        """The turn that answers a call whose client has not seen it yet."""
        if call.logprobs or call.n > 1:
            return None  # what is recorded has not all of it
        if call.retry:
            return self.tree.unused_answer(call.conversation)
        if self.undelivered or self.doubtful:
            for turn in self.tree.answered(call.conversation):
                if turn.id in self.undelivered or turn.id in self.doubtful:
                    self.undelivered.discard(turn.id)
                    self.doubtful.discard(turn.id)
                    return turn
        return None

    def completed(self, call: Call, turn: Turn) -> None:
        """Look for secrets in what a turn was asked and said."""
        found = self.scanner.in_call(call.conversation, turn.message)
        if found:
            self.held[turn.id] = found


class Sessions:
    """Every open session, found by id, by key or by secret path. Keys are kept as digests: looking one up takes the
    same time whatever the key is, and nothing here can leak one."""

    def __init__(self, secrets: Secrets, limits: Limits) -> None:
        self.secrets = secrets
        self.limits = limits
        self._by_id: dict[str, Session] = {}
        self._by_key: dict[bytes, Session] = {}
        self._by_secret: dict[bytes, Session] = {}

    def open(
        self,
        id: str,
        policy: Policy,
        *,
        sampling: SamplingParams = DEFAULT_SAMPLING,
        fixed: frozenset[str] = DISTRIBUTION,
        max_turns: int | None = None,
        cache_key: str | None = None,
        digests: KeyDigests | None = None,
    ) -> Session:
        if id in self._by_id:
            raise UsageError(f"session {id!r} is already open", remedy="close it first, or choose another id")
        key = secret = ""
        if digests is None:
            key = KEY_MARK + secrets.token_urlsafe(_SECRET_BYTES)
            secret = PATH_MARK + secrets.token_urlsafe(_SECRET_BYTES)
            digests = KeyDigests(digest(key), digest(secret))
        if digests.key in self._by_key or digests.secret in self._by_secret:
            raise UsageError(f"session {id!r} cannot have another session's key")
        session = Session(
            id=id,
            api_key=key,
            secret=secret,
            policy=policy,
            sampling=sampling,
            fixed=fixed,
            max_turns=max_turns,
            cache_key=id if cache_key is None else cache_key,
            calls=Budget(self.limits.calls),
            bodies=Budget(self.limits.session_bodies),
            scanner=Scanner(self.secrets),
            digests=digests,
        )
        self._by_id[id] = self._by_key[digests.key] = self._by_secret[digests.secret] = session
        return session

    def of_key(self, key: bytes) -> Session | None:
        return self._by_key.get(digest(key))

    def of_secret(self, secret: str) -> Session | None:
        return self._by_secret.get(digest(secret))

    def __len__(self) -> int:
        return len(self._by_id)

    async def close(self, id: str) -> list[Turn]:
        """Forget a session, then cancel what runs for it; its turns. Nothing is left to close twice: []."""
        session = self._by_id.pop(id, None)
        if session is None:
            return []
        del self._by_key[session.digests.key]
        del self._by_secret[session.digests.secret]
        session.closed = True
        tasks = {running.task for running in session.running}
        while tasks:
            for task in tasks:
                task.cancel()
            # Each says goodbye to its client, who may have stopped reading: then it is cancelled again.
            _, tasks = await asyncio.wait(tasks, timeout=_GOODBYE_SECONDS)
        return session.storable()

    async def close_all(self) -> None:
        for id in list(self._by_id):
            await self.close(id)


def digest(text: str | bytes) -> bytes:
    return hashlib.sha256(text if isinstance(text, bytes) else text.encode(errors="replace")).digest()
