"""Sessions of live assistants: the episodes they are doing, what these are rewarded with, and when they are over.

An assistant keeps one key for as long as it lives. What it does from one reward to the next is one episode: a reward
for the whole closes it, and the next call of the model begins another. Everything is on disk before it is acknowledged.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from rl_harness.gateway.errors import ApiError
from rl_harness.gateway.sessions import Session
from rl_harness.gateway.storing import storable
from rl_harness.gateway.tree import Standing, TurnTree
from rl_harness.online.keys import Keys, digest
from rl_harness.online.rewards import Reward, conflict, total
from rl_harness.records import (
    Episode,
    EpisodeKey,
    Origin,
    TaskRef,
    Termination,
    Turn,
    UnscoredReason,
    Usage,
    ids,
    prompt_of,
)
from rl_harness.runs.online import ONLINE, EpisodeRow, OnlineStore, SessionRow, TurnRow
from rl_harness.runs.store import RunStore

#: Turns a session's tree holds before those that nothing goes on from any more are let go.
TREE_LIMIT = 256


class Host(Protocol):
    """Where sessions are served: the gateway."""

    def open(self, id: str, *, key: bytes, secret: bytes, tree: TurnTree) -> Session:
        """Serve a session to whoever has the keys with these digests."""
        ...

    async def close(self, id: str) -> None:
        """Cancel what runs for it and serve it no more."""
        ...


@dataclass(slots=True)
class _Open:
    """An episode that is going on. ``turns`` need no other episode's to be read, and are as they are stored;
    ``sampled`` are the same with the secrets that some hold. ``replies`` maps the ids that clients know replies by to
    theirs."""

    row: EpisodeRow
    turns: dict[str, Turn] = field(default_factory=dict)
    sampled: dict[str, Turn] = field(default_factory=dict)
    replies: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class OnlineSession:
    """``served`` is what the gateway has of it; None if it was ended by a process before this one and only waits for a
    reward. ``episodes`` counts those begun, ``last`` is the latest that is over."""

    row: SessionRow
    served: Session | None
    current: _Open | None = None
    last: EpisodeRow | None = None
    episodes: int = 0
    active_at: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def busy(self) -> bool:
        return self.served is not None and bool(self.served.running)


class OnlineSessions:
    """Every session that can still be called or rewarded. ``closed`` is told of each episode that is over."""

    def __init__(
        self,
        store: RunStore,
        host: Host,
        *,
        ttl: float,
        idle_timeout: float,
        needs_group: bool,
        closed: Callable[[Episode], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = OnlineStore(store)
        self._host = host
        self._ttl = ttl
        self._idle = idle_timeout
        self._needs_group = needs_group
        self._closed = closed
        self._clock = clock
        self._sessions: dict[str, OnlineSession] = {}
        self._by_reward_key: dict[bytes, OnlineSession] = {}
        #: How many can be called.
        self.count = 0

    # -- beginning, going on, ending

    def load(self) -> None:
        """Serve the sessions that were open when the process before this one ended, each where it was."""
        going_on = {row.session: row for row in self._store.open_episodes()}
        for row in self._store.live_sessions():
            last = self._store.last_episode(row.id)
            session = OnlineSession(row=row, served=None, last=last, episodes=0 if last is None else last.number + 1)
            known: list[TurnRow] = [] if last is None else self._store.turns(last.id)
            episode = going_on.get(row.id)
            if episode is not None:
                turns = self._store.turns(episode.id)
                replies = {turn.reply: turn.turn.id for turn in turns}
                stored = {turn.turn.id: turn.turn for turn in turns}
                session.current = _Open(episode, stored, dict(stored), replies)
                session.episodes = episode.number + 1
                known = [*known, *turns]
            session.active_at = row.created_at if episode is None else episode.active_at
            if row.ended_at is None:
                tree = TurnTree(first=row.turns - len(known))
                for turn in known:
                    tree.restore(turn.turn, Standing(turn.request, turn.link, turn.opening, turn.follows))
                session.served = self._host.open(row.id, key=row.key_digest, secret=row.secret_digest, tree=tree)
            self._keep(session)

    async def start(
        self,
        *,
        group: str | None = None,
        ttl: float | None = None,
        keys: Keys | None = None,
        id: str | None = None,
    ) -> tuple[OnlineSession, Keys]:
        """A new session with keys of its own. Raises :class:`ApiError` where groups are compared and it names none."""
        if group is None and self._needs_group:
            raise ApiError(
                400,
                "this run compares the episodes of a group: say with 'group' which sessions attempt the same thing",
                param="group",
            )
        keys = keys or Keys.new()
        id = id or f"s-{uuid.uuid4().hex[:16]}"
        now = self._clock()
        row = SessionRow(
            id=id,
            group=group,
            key_digest=digest(keys.api),
            reward_digest=digest(keys.reward),
            secret_digest=digest(keys.secret),
            created_at=now,
            expires_at=now + (self._ttl if ttl is None else ttl),
        )
        if not await self._store.add_session(row):
            raise conflict(f"there is, or was, a session {id!r}", "session_exists")
        served = self._host.open(id, key=row.key_digest, secret=row.secret_digest, tree=TurnTree())
        session = OnlineSession(row=row, served=served, active_at=now)
        self._keep(session)
        return session, keys

    def _keep(self, session: OnlineSession) -> None:
        self._sessions[session.row.id] = session
        self._by_reward_key[session.row.reward_digest] = session
        self.count += session.row.ended_at is None

    async def refresh(
        self, id: str, *, ttl: float | None = None, next_episode: bool = False, group: str | None = None
    ) -> OnlineSession:
        """Let a session live for another ``ttl`` seconds from now. ``next_episode`` ends the one that is going on;
        those that follow are of ``group``, if one is given."""
        session = self._open(id)
        expires = self._clock() + (self._ttl if ttl is None else ttl)
        async with session.lock:
            if next_episode:
                await self._close_episode(session, Termination.ENDED)
            group = session.row.group if group is None else group
            await self._store.extend_session(id, expires, group)
            session.row = msgspec.structs.replace(session.row, expires_at=expires, group=group)
            session.active_at = self._clock()
        return session

    async def reopen(self, row: SessionRow, *, group: str | None) -> OnlineSession:
        """Serve a session that is over again, with its keys: its next episode begins."""
        session = self._sessions.get(row.id)
        if session is not None:
            async with session.lock:
                await self._close_episode(session, Termination.ENDED)
                self._forget_if_done(session)
        last = self._store.last_episode(row.id)
        expires = self._clock() + self._ttl
        await self._store.reopen_session(row.id, expires, group)
        row = msgspec.structs.replace(row, expires_at=expires, group=group, ended_at=None, ended_by=None)
        tree = TurnTree(first=row.turns)
        served = self._host.open(row.id, key=row.key_digest, secret=row.secret_digest, tree=tree)
        episodes = 0 if last is None else last.number + 1
        session = OnlineSession(row=row, served=served, last=last, episodes=episodes, active_at=self._clock())
        self._keep(session)
        return session

    def of_api_key(self, key: str) -> SessionRow | None:
        """The session, live or over, that is called with a key."""
        return self._store.session_of_api_key(digest(key))

    async def end(self, id: str, *, by: str = "ended", wait: bool = True) -> OnlineSession:
        """No more calls. With ``wait``, its unrewarded episode waits for a reward until the idle timeout is over."""
        session = self._live(id)
        async with session.lock:
            await self._end(session, by)
            current = session.current
            if current is not None and (not wait or total(current.row.rewards, current.row.turn_rewards) is not None):
                termination = Termination.EXPIRED if by == "expired" else Termination.ENDED
                await self._close_episode(session, termination)
            self._forget_if_done(session)
        return session

    async def _end(self, session: OnlineSession, by: str) -> None:
        if session.row.ended_at is not None:
            return
        now = self._clock()
        await self._store.end_session(session.row.id, now, by)
        session.row = msgspec.structs.replace(session.row, ended_at=now, ended_by=by)
        session.active_at = now
        self.count -= 1
        await self._host.close(session.row.id)

    def _forget_if_done(self, session: OnlineSession) -> None:
        if session.row.ended_at is not None and session.current is None:
            self._sessions.pop(session.row.id, None)
            self._by_reward_key.pop(session.row.reward_digest, None)

    async def sweep(self) -> None:
        """End what has waited for too long."""
        for session in list(self._sessions.values()):
            now = self._clock()
            if session.row.ended_at is None and now >= session.row.expires_at:
                await self.end(session.row.id, by="expired", wait=False)
            elif session.current is not None and not session.busy and now - session.active_at >= self._idle:
                async with session.lock:
                    await self._close_episode(session, Termination.EXPIRED)
                    self._forget_if_done(session)

    # -- what is recorded

    async def record(self, served: Session, turn: Turn, reply: str) -> None:
        """A turn of one of the sessions is complete."""
        session = self._sessions.get(served.id)
        if session is None or session.served is not served or session.row.ended_at is not None:
            raise ApiError(401, "this session is closed", type="authentication_error", code="session_closed")
        async with session.lock:
            tree = served.tree
            if turn.id not in tree:  # the tree was renewed while this was sampled
                raise ApiError(409, "the session went on without this call", code="replaced")
            now = self._clock()
            current = session.current
            if current is None:
                row = EpisodeRow(
                    id=f"e-{uuid.uuid4().hex}",
                    session=served.id,
                    number=session.episodes,
                    started_at=turn.started_at,
                    active_at=now,
                )
                current = _Open(row)
            row = msgspec.structs.replace(current.row, active_at=now)
            standing = tree.standing(turn.id)
            own = rooted(turn, current.sampled, tree)
            sampled = {**current.sampled, own.id: own}
            kept = storable(list(sampled.values()), held=served.held, undelivered=(), secrets=served.scanner.secrets)[
                -1
            ]
            stored = TurnRow(
                turn=kept,
                request=standing.request,
                link=standing.link,
                opening=standing.opening,
                follows=standing.follows,
                reply=reply,
            )
            await self._store.add_turn(row, len(current.turns), stored)
            current.row = row
            current.turns[kept.id] = kept
            current.sampled = sampled
            current.replies[reply] = kept.id
            if session.current is None:
                session.current = current
                session.episodes += 1
            session.active_at = now

    # -- rewards

    def of_reward_key(self, key: bytes) -> OnlineSession:
        """The session that a key rewards, also one that is over. Raises :class:`ApiError` (401) where there is none."""
        known = digest(key)
        session = self._by_reward_key.get(known)
        if session is not None:
            return session
        row = self._store.session_of_reward_key(known)
        if row is None:
            raise ApiError(
                401, "no session has this reward key", type="authentication_error", code="invalid_reward_key"
            )
        return OnlineSession(row=row, served=None, last=self._store.last_episode(row.id))

    async def reward(self, session: OnlineSession, reward: Reward, *, close: bool = True) -> EpisodeRow:
        """Reward the episode that is going on, or with ``replace`` the one before it; as it is then. A reward without
        ``turn`` and ``name`` closes the episode, if ``close``.

        Raises :class:`ApiError`: 404 for an unknown turn, 409 where there is nothing to reward or a reward already, 410
        where nobody can be rewarded any more.
        """
        async with session.lock:
            current = session.current
            turn = self._turn(session, reward)
            if current is not None and (reward.turn is None or turn in current.turns):
                row = _with(current.row, reward, turn)
                row = msgspec.structs.replace(row, active_at=self._clock())
                await self._store.set_rewards(row)
                current.row = row
                session.active_at = row.active_at
                if reward.end or (close and reward.turn is None and reward.name is None):
                    row = await self._close_episode(session, Termination.REWARDED) or row
                    self._forget_if_done(session)
                return row
            return await self._reward_again(session, reward, turn)

    def _turn(self, session: OnlineSession, reward: Reward) -> str | None:
        """The id of the turn that a reward is for."""
        if reward.turn is None:
            return None
        current, last = session.current, session.last
        if current is not None and (id := current.replies.get(reward.turn, reward.turn)) in current.turns:
            return id
        if last is not None:
            for turn in self._store.turns(last.id):
                if reward.turn in (turn.reply, turn.turn.id):
                    return turn.turn.id
        raise ApiError(
            404,
            f"the session's episode has no turn {reward.turn!r}; a reply's id or a turn's id names one",
            code="unknown_turn",
            param="turn",
        )

    async def _reward_again(self, session: OnlineSession, reward: Reward, turn: str | None) -> EpisodeRow:
        """A reward that comes when no episode is going on."""
        last = session.last
        if last is None:
            if session.row.ended_at is not None:
                raise ApiError(410, "the session is over, and it called no model", code="session_over")
            raise conflict("there is nothing to reward yet: no model call of this session is complete", "no_turns")
        if not last.scored:
            raise ApiError(
                410, "too late: the episode is over, unscored, because no reward came in time", code="too_late"
            )
        stored = self._store.episode(last.id) or last
        if stored.trained_in is not None:
            raise conflict("the episode is rewarded, and trained on already", "already_trained")
        if not reward.replace:
            raise conflict(
                "the episode is rewarded already, and nothing was done since; with 'replace' it is changed",
                "already_rewarded",
            )
        row = _with(last, reward, turn)
        before = self._store.record(last.id)
        episode = msgspec.structs.replace(
            before,
            reward=total(row.rewards, row.turn_rewards),
            rewards=row.rewards or None,
            turn_rewards=row.turn_rewards,
        )
        if not await self._store.replace_rewards(row, episode):
            raise conflict("the episode is rewarded, and trained on already", "already_trained")
        session.last = row
        return row

    # -- episodes that are over

    async def _close_episode(self, session: OnlineSession, termination: Termination) -> EpisodeRow | None:
        """Make the episode that is going on one of the run's. The caller has the lock."""
        current = session.current
        if current is None:
            return None
        turns, served = list(current.turns.values()), session.served
        if served is not None:  # a reply that nobody got is nothing that anybody did
            turns = storable(turns, held={}, undelivered=served.undelivered, secrets=served.scanner.secrets)
        episode = _episode(session.row, current, turns, termination)
        row = msgspec.structs.replace(current.row, closed_at=self._clock(), scored=episode.reward is not None)
        await self._store.close_episode(row, episode, turns)
        session.current, session.last = None, row
        self._renew_tree(session, current)
        self._closed(episode)
        return row

    def _renew_tree(self, session: OnlineSession, ended: _Open) -> None:
        """Let turns go that no conversation is likely to go on from: memory must not grow while an assistant lives."""
        served = session.served
        if served is None or session.row.ended_at is not None or session.busy or len(served.tree.turns) <= TREE_LIMIT:
            return
        tree = TurnTree(first=served.tree.next_index - len(ended.sampled))
        for turn in ended.sampled.values():
            tree.restore(turn, served.tree.standing(turn.id))
        served.tree = tree

    # -- looking

    def _live(self, id: str) -> OnlineSession:
        session = self._sessions.get(id)
        if session is not None:
            return session
        if self._store.session(id) is not None:
            raise ApiError(410, f"session {id!r} is over", code="session_over")
        raise ApiError(404, f"there is no session {id!r}", code="unknown_session")

    def _open(self, id: str) -> OnlineSession:
        session = self._live(id)
        if session.row.ended_at is not None:
            raise ApiError(410, f"session {id!r} is over", code="session_over")
        return session

    def info(self, id: str) -> dict[str, Any]:
        """A session, live or over, as data without keys."""
        session = self._sessions.get(id)
        if session is None:
            row = self._store.session(id)
            if row is None:
                raise ApiError(404, f"there is no session {id!r}", code="unknown_session")
            last = self._store.last_episode(id)
            session = OnlineSession(row=row, served=None, last=last, episodes=0 if last is None else last.number + 1)
        return describe(session)

    def list(self) -> list[dict[str, Any]]:
        """The live ones."""
        return [describe(session) for session in self._sessions.values()]


def describe(session: OnlineSession) -> dict[str, Any]:
    row, current, last = session.row, session.current, session.last
    state = "open" if row.ended_at is None else "waiting for a reward" if current is not None else "over"
    return {
        "id": row.id,
        "group": row.group,
        "state": state,
        "ended_by": row.ended_by,
        "created_at": row.created_at,
        "expires_at": row.expires_at,
        "active_at": session.active_at,
        "running": 0 if session.served is None else len(session.served.running),
        "turns": row.turns if session.served is None else session.served.tree.next_index,
        "episodes": session.episodes,
        "episode": None
        if current is None
        else {
            "id": current.row.id,
            "turns": list(current.turns),
            "rewards": current.row.rewards,
            "turn_rewards": current.row.turn_rewards,
        },
        "last_episode": None
        if last is None
        else {"id": last.id, "reward": total(last.rewards, last.turn_rewards) if last.scored else None},
    }


def rooted(turn: Turn, known: Mapping[str, Turn], tree: TurnTree) -> Turn:
    """The turn as one that needs none but the ``known`` ones to be read: an episode's turns stand by themselves."""
    extra = turn.extra
    if "follows" in extra and extra["follows"] not in known:
        extra = {name: value for name, value in extra.items() if name != "follows"}
    if turn.parent is None or turn.parent in known:
        return turn if extra is turn.extra else msgspec.structs.replace(turn, extra=extra)
    prompt = ids(prompt_of(turn, tree.turn))
    return msgspec.structs.replace(turn, parent=None, shared=0, context=prompt, extra=extra)


def _with(row: EpisodeRow, reward: Reward, turn: str | None) -> EpisodeRow:
    """The episode with a reward more. Raises :class:`ApiError` (409) for one that it has."""
    if turn is not None:
        assert reward.reward is not None
        if turn in row.turn_rewards and not reward.replace:
            raise conflict(f"turn {turn} is rewarded already; with 'replace' it is changed", "already_rewarded")
        return msgspec.structs.replace(row, turn_rewards={**row.turn_rewards, turn: reward.reward})
    given = dict(reward.named)
    if (twice := sorted(given.keys() & row.rewards.keys())) and not reward.replace:
        raise conflict(f"rewarded already: {', '.join(twice)}; with 'replace' that is changed", "already_rewarded")
    return msgspec.structs.replace(row, rewards={**row.rewards, **given})


def _episode(session: SessionRow, current: _Open, turns: Sequence[Turn], termination: Termination) -> Episode:
    row = current.row
    reward = total(row.rewards, row.turn_rewards)
    versions = [int(turn.versions[0]) for turn in turns if len(turn.versions)]
    return Episode(
        id=row.id,
        key=EpisodeKey(phase=ONLINE, step=0, task=session.id, sample=row.number),
        task=TaskRef(benchmark=ONLINE, name=session.group or session.id, split=ONLINE, digest=""),
        origin=Origin.ONLINE,
        policy_version=min(versions, default=0),
        termination=termination,
        reward=reward,
        rewards=row.rewards or None,
        turn_rewards=row.turn_rewards,
        unscored=UnscoredReason.NOT_REWARDED if reward is None else None,
        detail="" if reward is not None else "no reward came before the session or the episode was over",
        usage=Usage(
            turns=len(turns),
            prompt_tokens=sum(turn.prompt_tokens for turn in turns),
            cached_tokens=sum(turn.cached_tokens for turn in turns),
            completion_tokens=sum(turn.completion_tokens for turn in turns),
        ),
        started_at=row.started_at,
        seconds={"agent": max(0.0, row.active_at - row.started_at)},
    )
