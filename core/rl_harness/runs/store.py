"""The run's database: episodes, turns, metrics, events, samples, state; what a run knows survives its process.

SQLite in WAL mode with ``synchronous=NORMAL``: a transaction that was reported committed is in the operating
system's hands, so no kill -9 loses it; a power failure may lose the last seconds but never consistency. Other
processes may read while the run writes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from rl_harness.errors import RunError
from rl_harness.records import Episode, EpisodeKey, Sample, Turn
from rl_harness.records.arrays import LogpArray
from rl_harness.runs.files import explain
from rl_harness.runs.rows import episode_of, pack, to_json, turn_of, turn_row, unpack
from rl_harness.runs.schema import check, migrate
from rl_harness.runs.writer import Writer

T = TypeVar("T")

_BUSY_SECONDS = 30.0
_log = logging.getLogger(__name__)


class StoredEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to the run; ``at`` is seconds since the epoch."""

    at: float
    kind: str
    data: dict[str, Any]


class TrainedSample(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What an update was told about one turn; its ids, log-probs and versions are the turn's.

    The arrays have one entry per completion token.
    """

    step: int
    turn: str
    episode: str
    group: str
    policy: str
    temperature: float
    advantage: LogpArray
    weight: LogpArray
    mask: LogpArray


class RunStore:
    """The database at ``path``. One process writes (the run's lock sees to that), any number read.

    Every method that writes returns after the commit, except :meth:`add_event`, whose events are committed in
    order with, and so not later than, whatever is written next. Failures raise
    :class:`~rl_harness.errors.RunError`; after a full disk the same call can be repeated.
    """

    def __init__(self, path: Path, *, readonly: bool = False) -> None:
        self.path = path
        self._writer: Writer | None = None
        self._reading = threading.Lock()
        try:
            if not readonly:
                self._writer = Writer(_open_for_writing(path), path)
            self._reader = _open_for_reading(path)
        except sqlite3.Error as error:
            self.close()
            raise explain(path, error) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Commit what is queued and close. Safe to repeat."""
        reader = getattr(self, "_reader", None)
        if reader is not None:
            reader.close()
        if self._writer is not None:
            self._writer.close()  # last: whoever closes last folds the write-ahead log into the database

    # -- episodes and turns

    async def add_episode(self, episode: Episode, turns: Sequence[Turn]) -> bool:
        """Store one attempt with its turns; it is durable when this returns, even if the caller is cancelled.

        Of a key's attempts the first scored one counts, or the last while none is scored; the others stay visible
        with ``attempts=True``. Storing the same episode (by id) again changes nothing, and one whose attempt number
        is taken gets the next free number. Returns whether it is the attempt that counts.
        """
        check_finite(episode)
        turn_rows = [(turn.id, position, *turn_row(turn)) for position, turn in enumerate(turns)]
        return await self.transact(lambda db: insert_episode(db, episode, turn_rows))

    def episodes(
        self, phase: str | None = None, step: int | None = None, *, task: str | None = None, attempts: bool = False
    ) -> list[Episode]:
        """The episodes that count, in the order they were stored; with ``attempts`` all of them."""
        where, values = _where(phase=phase, step=step, task=task)
        if not attempts:
            where = f"{where} AND counts" if where else "WHERE counts"
        rows = self._read(f"SELECT record FROM episodes {where} ORDER BY seq", values)
        return [episode_of(record) for (record,) in rows]

    def episode(self, id: str) -> Episode:
        rows = self._read("SELECT record FROM episodes WHERE id = ?", (id,))
        if not rows:
            raise RunError(f"{self.path}: there is no episode {id}")
        return episode_of(rows[0][0])

    def tasks(self, phase: str | None = None) -> list[str]:
        """The names of the tasks that have an episode."""
        where, values = _where(phase=phase)
        return [name for (name,) in self._read(f"SELECT DISTINCT task FROM episodes {where} ORDER BY task", values)]

    def attempts(self, key: EpisodeKey) -> int:
        """How many attempts at ``key`` are stored."""
        where, values = _where(phase=key.phase, step=key.step, task=key.task, sample=key.sample)
        return int(self._read(f"SELECT count(*) FROM episodes {where}", values)[0][0])

    def turns(self, episode_id: str) -> list[Turn]:
        """The turns of an episode in the order they were stored; empty for an unknown episode."""
        rows = self._read(
            "SELECT t.record, t.context, t.completion, t.logps, t.versions FROM turns t"
            " JOIN episodes e ON e.seq = t.episode WHERE e.id = ? ORDER BY t.position",
            (episode_id,),
        )
        return [turn_of(*row) for row in rows]

    # -- metrics, events, state

    def add_metrics(self, phase: str, step: int, metrics: Mapping[str, float]) -> None:
        """Store the metrics of a step; a step that is done again replaces its earlier values."""
        rows = [(phase, step, name, float(value)) for name, value in metrics.items()]
        self._write(
            lambda db: db.executemany("INSERT OR REPLACE INTO metrics VALUES (?, ?, ?, ?)", rows).rowcount,
        )

    def metrics(self, phase: str) -> list[dict[str, float]]:
        """One mapping a step, in order of steps; ``step`` is among its keys. A NaN comes back as NaN."""
        steps: dict[int, dict[str, float]] = {}
        for step, name, value in self._read(
            "SELECT step, name, value FROM metrics WHERE phase = ? ORDER BY step, name", (phase,)
        ):
            steps.setdefault(step, {"step": step})[name] = float("nan") if value is None else value
        return list(steps.values())

    def add_event(self, kind: str, data: Mapping[str, Any] | None = None) -> None:
        """Note that something happened, without waiting for the disk."""
        row = (time.time(), kind, to_json(dict(data or {})))
        insert = "INSERT INTO events (at, kind, data) VALUES (?, ?, ?)"
        self._submit(lambda db: db.execute(insert, row).rowcount).add_done_callback(_report_lost_event)

    def events(self, kind: str | None = None) -> list[StoredEvent]:
        self.flush()
        where, values = _where(kind=kind)
        rows = self._read(f"SELECT at, kind, data FROM events {where} ORDER BY seq", values)
        return [StoredEvent(at=at, kind=name, data=msgspec.json.decode(data)) for at, name, data in rows]

    def set_state(self, key: str, value: Any) -> None:
        """Remember a JSON-compatible value under ``key``."""
        self.set_states({key: value})

    def set_states(self, values: Mapping[str, Any]) -> None:
        """Remember several values at once: after a crash either all are there or none."""
        rows = [(key, to_json(value)) for key, value in values.items()]
        self._write(lambda db: db.executemany("INSERT OR REPLACE INTO state VALUES (?, ?)", rows).rowcount)

    def get_state(self, key: str, default: Any = None) -> Any:
        rows = self._read("SELECT value FROM state WHERE key = ?", (key,))
        return msgspec.json.decode(rows[0][0]) if rows else default

    # -- samples: what was trained on

    def add_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Store what the update of ``step`` is given; a step that is done again replaces its earlier samples."""
        rows = [
            (
                *(step, position, sample.episode, sample.turn, sample.group, sample.policy),
                *(float(sample.temperature), len(sample.completion)),
                *(pack(array, "<f4") for array in (sample.advantage, sample.weight, sample.mask)),
            )
            for position, sample in enumerate(samples)
        ]

        def work(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM samples WHERE step = ?", (step,))
            db.executemany(f"INSERT INTO samples VALUES ({', '.join('?' * 11)})", rows)

        self._write(work)

    def samples(self, step: int) -> list[TrainedSample]:
        rows = self._read(
            "SELECT episode, turn, grouping, policy, temperature, tokens, advantage, weight, mask FROM samples"
            " WHERE step = ? ORDER BY position",
            (step,),
        )
        return [
            TrainedSample(
                step=step,
                episode=episode,
                turn=turn,
                group=group,
                policy=policy,
                temperature=temperature,
                advantage=unpack(advantage, tokens, "<f4"),
                weight=unpack(weight, tokens, "<f4"),
                mask=unpack(mask, tokens, "<f4"),
            )
            for episode, turn, group, policy, temperature, tokens, advantage, weight, mask in rows
        ]

    # -- checkpoints: the database's side (runs.checkpoints has the files' side)

    async def add_checkpoint(self, step: int, files: Mapping[str, int], state: Mapping[str, Any]) -> None:
        """Record a checkpoint's files (relative name to size) and the state that belongs to it, at once."""
        row = (step, time.time(), to_json(dict(files)), to_json(dict(state)))
        await self._written(
            lambda db: db.execute("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?)", row).rowcount
        )

    def drop_checkpoint(self, step: int) -> None:
        self._write(lambda db: db.execute("DELETE FROM checkpoints WHERE step = ?", (step,)).rowcount)

    def checkpoints(self) -> dict[int, dict[str, int]]:
        """Step to files, in order of steps."""
        rows = self._read("SELECT step, files FROM checkpoints ORDER BY step", ())
        return {step: msgspec.json.decode(files, type=dict[str, int]) for step, files in rows}

    def checkpoint_state(self, step: int) -> dict[str, Any]:
        rows = self._read("SELECT state FROM checkpoints WHERE step = ?", (step,))
        if not rows:
            raise RunError(f"{self.path}: there is no checkpoint of step {step}")
        return msgspec.json.decode(rows[0][0], type=dict[str, Any])

    # -- for other tables of the same database

    async def transact(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run ``work`` in the writer's thread, in one transaction; it is durable when this returns, even if the caller
        is cancelled."""
        result: T = await self._written(work)
        return result

    def query(self, statement: str, values: Sequence[Any] = ()) -> list[Any]:
        """The rows of a SELECT."""
        return self._read(statement, values)

    # -- plumbing

    def flush(self) -> None:
        """Return when everything written so far is committed."""
        if self._writer is not None:
            self._write(lambda db: None)

    def _submit(self, work: Any) -> Future[Any]:
        if self._writer is None:
            raise RunError(f"{self.path}: opened for reading only")
        return self._writer.submit(work)

    def _write(self, work: Any) -> None:
        self._submit(work).result()

    async def _written(self, work: Any) -> Any:
        return await asyncio.shield(asyncio.wrap_future(self._submit(work)))

    def _read(self, query: str, values: Sequence[Any]) -> list[Any]:
        with self._reading:
            try:
                return self._reader.execute(query, values).fetchall()
            except sqlite3.Error as error:
                raise explain(self.path, error) from error


@contextmanager
def reading(path: Path) -> Iterator[RunStore]:
    """The store of a run, live or not, for reading."""
    with closing(RunStore(path, readonly=True)) as store:
        yield store


def _open_for_writing(path: Path) -> sqlite3.Connection:
    # check_same_thread: opened here, then handed to the writer's thread for good.
    db = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        check(db, path)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA foreign_keys = ON")
        migrate(db, path)
    except BaseException:
        db.close()
        raise
    return db


def _open_for_reading(path: Path) -> sqlite3.Connection:
    """A connection that cannot write. In a directory this user cannot write, a database nobody has open is read as
    an immutable file, because WAL would need to create its index beside it."""
    if not path.is_file():
        raise RunError(f"{path}: there is no such database", remedy="start a new run with --fresh")
    db = _connect_readonly(path, "mode=ro")
    try:
        check(db, path)
    except sqlite3.OperationalError:
        db.close()
        if path.with_name(f"{path.name}-wal").exists():
            raise
        db = _connect_readonly(path, "immutable=1")
        check(db, path)
    except BaseException:
        db.close()
        raise
    return db


def _connect_readonly(path: Path, how: str) -> sqlite3.Connection:
    address = f"file:{quote(str(path.absolute()))}?{how}"
    return sqlite3.connect(address, uri=True, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)


def _where(**columns: str | int | None) -> tuple[str, list[str | int]]:
    """A WHERE clause over the columns that are not None (names are ours, values are bound)."""
    given = {name: value for name, value in columns.items() if value is not None}
    clause = " AND ".join(f"{name} = ?" for name in given)
    return (f"WHERE {clause}" if clause else ""), list(given.values())


def _report_lost_event(future: Future[Any]) -> None:
    error = future.exception()
    if error is not None:
        _log.warning("an event could not be stored: %s", error)


def check_finite(episode: Episode) -> None:
    """JSON has no NaN: refuse here what could not be read back."""
    rewards = [*(episode.rewards or {}).values(), *episode.turn_rewards.values()]
    numbers = [episode.reward or 0.0, *rewards, *episode.seconds.values()]
    if not all(map(math.isfinite, numbers)):
        raise ValueError(f"episode {episode.id}: a reward or a duration is not finite")


def insert_episode(db: sqlite3.Connection, episode: Episode, turn_rows: Sequence[tuple[Any, ...]]) -> bool:
    """Store an attempt within a transaction; whether it is the one of its key that counts. ``turn_rows``: id, position
    and the columns of :func:`~rl_harness.runs.rows.turn_row`."""
    key = (episode.key.phase, episode.key.step, episode.key.task, episode.key.sample)
    same = db.execute("SELECT phase, step, task, sample, counts FROM episodes WHERE id = ?", (episode.id,)).fetchone()
    if same is not None:
        if same[:4] != key:
            raise RunError(f"episode {episode.id}: stored before as an attempt at {same[:4]}, now given for {key}")
        return bool(same[4])
    earlier = db.execute(
        "SELECT seq, attempt, counts, reward IS NOT NULL FROM episodes"
        " WHERE phase = ? AND step = ? AND task = ? AND sample = ?",
        key,
    ).fetchall()
    if episode.attempt in {attempt for _, attempt, _, _ in earlier}:
        episode = msgspec.structs.replace(episode, attempt=1 + max(attempt for _, attempt, _, _ in earlier))
    counted = next((row for row in earlier if row[2]), None)
    counts = counted is None or (not counted[3] and (episode.reward is not None or episode.attempt > counted[1]))
    if counts and counted is not None:
        db.execute("UPDATE episodes SET counts = 0 WHERE seq = ?", (counted[0],))
    seq = db.execute(
        "INSERT INTO episodes (id, phase, step, task, sample, attempt, counts, reward, unscored, termination,"
        " policy_version, record) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(episode.id, *key, episode.attempt, counts, episode.reward),
            None if episode.unscored is None else episode.unscored.value,
            *(episode.termination.value, episode.policy_version, to_json(episode)),
        ),
    ).lastrowid
    db.executemany(
        "INSERT INTO turns (episode, id, position, record, context, completion, logps, versions)"
        f" VALUES ({seq}, ?, ?, ?, ?, ?, ?, ?)",
        turn_rows,
    )
    return counts
