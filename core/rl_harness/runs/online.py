"""The tables of live assistants' sessions: whatever a server of them must know again after a kill -9. Every method that
writes returns when what it wrote is durable."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from rl_harness.records import Episode, Turn
from rl_harness.runs.rows import to_json, turn_of, turn_row
from rl_harness.runs.store import RunStore, check_finite, insert_episode

#: The phase of the episodes of live assistants.
ONLINE = "online"
#: Instead of the step an episode is trained in: it is given to none.
SET_ASIDE = -1


class SessionRow(msgspec.Struct, frozen=True, kw_only=True):
    """``turns`` is how many there were so far; ``ended_by`` says why a session that is over is."""

    id: str
    group: str | None
    key_digest: bytes
    reward_digest: bytes
    secret_digest: bytes
    created_at: float
    expires_at: float
    ended_at: float | None = None
    ended_by: str | None = None
    turns: int = 0


class EpisodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """``rewards`` are those for the whole by name, ``turn_rewards`` those for single turns by id."""

    id: str
    session: str
    number: int
    started_at: float
    active_at: float
    closed_at: float | None = None
    scored: bool = False
    trained_in: int | None = None
    rewards: dict[str, float] = {}
    turn_rewards: dict[str, float] = {}


class TurnRow(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A turn with where it stands among its session's conversations (:class:`rl_harness.gateway.tree.Standing`) and the
    id that its client knows the reply by."""

    turn: Turn
    request: bytes
    link: bytes
    opening: int
    follows: str | None
    reply: str


_SESSION = "id, grouping, key_digest, reward_digest, secret_digest, created_at, expires_at, ended_at, ended_by, turns"
_EPISODE = "id, session, number, started_at, active_at, closed_at, scored, trained_in, rewards, turn_rewards"


class OnlineStore:
    """The part of a run's database that is about live assistants."""

    def __init__(self, store: RunStore) -> None:
        self._store = store

    # -- sessions

    async def add_session(self, row: SessionRow) -> bool:
        """False where there is, or was, one of this id."""
        values = (
            *(row.id, row.group, row.key_digest, row.reward_digest, row.secret_digest),
            *(row.created_at, row.expires_at, row.ended_at, row.ended_by, row.turns),
        )
        marks = ", ".join("?" * len(values))
        statement = f"INSERT INTO online_sessions ({_SESSION}) VALUES ({marks}) ON CONFLICT (id) DO NOTHING"
        return bool(await self._execute(statement, values))

    async def extend_session(self, id: str, expires_at: float, group: str | None) -> None:
        await self._execute(
            "UPDATE online_sessions SET expires_at = ?, grouping = ? WHERE id = ?", (expires_at, group, id)
        )

    async def reopen_session(self, id: str, expires_at: float, group: str | None) -> None:
        await self._execute(
            "UPDATE online_sessions SET expires_at = ?, grouping = ?, ended_at = NULL, ended_by = NULL WHERE id = ?",
            (expires_at, group, id),
        )

    async def end_session(self, id: str, at: float, by: str) -> None:
        await self._execute("UPDATE online_sessions SET ended_at = ?, ended_by = ? WHERE id = ?", (at, by, id))

    def session(self, id: str) -> SessionRow | None:
        return next(iter(self._sessions("WHERE id = ?", (id,))), None)

    def session_of_api_key(self, digest: bytes) -> SessionRow | None:
        """Also one that is long over."""
        return next(iter(self._sessions("WHERE key_digest = ?", (digest,))), None)

    def session_of_reward_key(self, digest: bytes) -> SessionRow | None:
        """Also one that is long over."""
        return next(iter(self._sessions("WHERE reward_digest = ?", (digest,))), None)

    def live_sessions(self) -> list[SessionRow]:
        """Those that are open, and those that are over but have an episode that waits for its reward."""
        return self._sessions(
            "WHERE ended_at IS NULL OR id IN (SELECT session FROM online_episodes WHERE closed_at IS NULL)", ()
        )

    def _sessions(self, where: str, values: Sequence[Any]) -> list[SessionRow]:
        rows = self._store.query(f"SELECT {_SESSION} FROM online_sessions {where} ORDER BY created_at, id", values)
        names = SessionRow.__struct_fields__
        return [SessionRow(**dict(zip(names, row, strict=True))) for row in rows]

    # -- episodes that are going on

    async def add_turn(self, episode: EpisodeRow, position: int, row: TurnRow) -> None:
        """Store a turn, with its episode if it is the first of it."""
        values = (
            *(episode.id, position, row.turn.id, *turn_row(row.turn)),
            *(row.request, row.link, row.opening, row.follows, row.reply),
        )
        first = (*_episode_values(episode),)

        def work(db: sqlite3.Connection) -> None:
            db.execute(f"INSERT OR IGNORE INTO online_episodes ({_EPISODE}) VALUES ({', '.join('?' * 10)})", first)
            db.execute("UPDATE online_episodes SET active_at = ? WHERE id = ?", (episode.active_at, episode.id))
            db.execute(f"INSERT INTO online_turns VALUES ({', '.join('?' * 13)})", values)
            db.execute(
                "UPDATE online_sessions SET turns = max(turns, ?) WHERE id = ?", (row.turn.index + 1, episode.session)
            )

        await self._store.transact(work)

    async def set_rewards(self, row: EpisodeRow) -> None:
        """Store the rewards that an episode that is going on has so far."""
        await self._execute(
            "UPDATE online_episodes SET rewards = ?, turn_rewards = ?, active_at = ? WHERE id = ?",
            (to_json(row.rewards), to_json(row.turn_rewards), row.active_at, row.id),
        )

    async def close_episode(self, row: EpisodeRow, episode: Episode, turns: Sequence[Turn]) -> None:
        """Store an episode that is over among the run's, with its turns. Those of the ones before are not gone on from
        any more."""
        check_finite(episode)
        turn_rows = [(turn.id, position, *turn_row(turn)) for position, turn in enumerate(turns)]
        values = (row.closed_at, row.scored, to_json(row.rewards), to_json(row.turn_rewards), row.id)

        def work(db: sqlite3.Connection) -> None:
            insert_episode(db, episode, turn_rows)
            db.execute(
                "UPDATE online_episodes SET closed_at = ?, scored = ?, rewards = ?, turn_rewards = ? WHERE id = ?",
                values,
            )
            db.execute(
                "DELETE FROM online_turns WHERE episode IN"
                " (SELECT id FROM online_episodes WHERE session = ? AND number < ?)",
                (row.session, row.number),
            )

        await self._store.transact(work)

    async def replace_rewards(self, row: EpisodeRow, episode: Episode) -> bool:
        """Give an episode that is over other rewards; False if it is given to a step already."""
        check_finite(episode)
        record = to_json(episode)

        def work(db: sqlite3.Connection) -> bool:
            changed = db.execute(
                "UPDATE online_episodes SET rewards = ?, turn_rewards = ? WHERE id = ? AND trained_in IS NULL",
                (to_json(row.rewards), to_json(row.turn_rewards), row.id),
            ).rowcount
            if changed:
                db.execute("UPDATE episodes SET reward = ?, record = ? WHERE id = ?", (episode.reward, record, row.id))
            return bool(changed)

        return await self._store.transact(work)

    def record(self, id: str) -> Episode:
        """An episode that is over, as the run has it."""
        return self._store.episode(id)

    def open_episodes(self) -> list[EpisodeRow]:
        return self._episodes("WHERE closed_at IS NULL ORDER BY session, number", ())

    def last_episode(self, session: str) -> EpisodeRow | None:
        """The latest episode of a session that is over."""
        where = "WHERE session = ? AND closed_at IS NOT NULL ORDER BY number DESC LIMIT 1"
        return next(iter(self._episodes(where, (session,))), None)

    def episode(self, id: str) -> EpisodeRow | None:
        return next(iter(self._episodes("WHERE id = ?", (id,))), None)

    def turns(self, episode: str) -> list[TurnRow]:
        """The turns of an episode that is going on, or that its session's next goes on from."""
        rows = self._store.query(
            "SELECT record, context, completion, logps, versions, request, link, opening, follows, reply"
            " FROM online_turns WHERE episode = ? ORDER BY position",
            (episode,),
        )
        names = TurnRow.__struct_fields__[1:]
        return [TurnRow(turn=turn_of(*row[:5]), **dict(zip(names, row[5:], strict=True))) for row in rows]

    # -- what is trained on

    def untrained(self) -> list[EpisodeRow]:
        """Rewarded episodes that no step was given yet, in the order in which they became complete."""
        return self._episodes(
            "WHERE closed_at IS NOT NULL AND scored AND trained_in IS NULL ORDER BY closed_at, id", ()
        )

    def given_to(self, step: int) -> list[EpisodeRow]:
        return self._episodes(
            "WHERE closed_at IS NOT NULL AND scored AND trained_in = ? ORDER BY closed_at, id", (step,)
        )

    async def give(self, episodes: Iterable[str], step: int) -> None:
        """Decide that these episodes are what ``step`` is given, or with :data:`SET_ASIDE`, no step."""
        rows = [(step, id) for id in episodes]
        await self._store.transact(
            lambda db: db.executemany("UPDATE online_episodes SET trained_in = ? WHERE id = ?", rows).rowcount
        )

    def _episodes(self, where: str, values: Sequence[Any]) -> list[EpisodeRow]:
        rows = self._store.query(f"SELECT {_EPISODE} FROM online_episodes {where}", values)
        return [
            EpisodeRow(
                **dict(zip(EpisodeRow.__struct_fields__[:6], row[:6], strict=True)),
                scored=bool(row[6]),
                trained_in=row[7],
                rewards=msgspec.json.decode(row[8]),
                turn_rewards=msgspec.json.decode(row[9]),
            )
            for row in rows
        ]

    def counts(self) -> dict[str, int]:
        """How many sessions and episodes there are, by what became of them."""
        row = self._store.query(
            "SELECT (SELECT count(*) FROM online_sessions),"
            " (SELECT count(*) FROM online_sessions WHERE ended_at IS NULL),"
            " count(*), coalesce(sum(closed_at IS NULL), 0), coalesce(sum(scored), 0),"
            " coalesce(sum(scored AND closed_at IS NOT NULL AND trained_in IS NULL), 0),"
            " coalesce(sum(trained_in >= 0), 0), coalesce(sum(trained_in = -1), 0) FROM online_episodes"
        )[0]
        names = ("sessions", "sessions_open", "episodes", "going_on", "rewarded", "waiting", "trained", "set_aside")
        return dict(zip(names, row, strict=True))

    async def _execute(self, statement: str, values: Sequence[Any]) -> int:
        """How many rows it changed."""
        return await self._store.transact(lambda db: db.execute(statement, values).rowcount)


def _episode_values(row: EpisodeRow) -> tuple[Any, ...]:
    return (
        *(row.id, row.session, row.number, row.started_at, row.active_at, row.closed_at, row.scored, row.trained_in),
        *(to_json(row.rewards), to_json(row.turn_rewards)),
    )
