"""The database's tables and how an older database becomes a current one."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path

from rl_harness import __version__
from rl_harness.errors import RunError

#: ``PRAGMA application_id`` of every run database ("rlhr"): tells ours from somebody else's.
APPLICATION_ID = 0x726C6872

#: Each entry takes the schema one version up. Entries are never edited once released, only added.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        # One row an attempt. `counts` marks the one attempt of a key that statistics and training see.
        """CREATE TABLE episodes (
            seq INTEGER PRIMARY KEY,
            id TEXT NOT NULL UNIQUE,
            phase TEXT NOT NULL, step INTEGER NOT NULL, task TEXT NOT NULL, sample INTEGER NOT NULL,
            attempt INTEGER NOT NULL,
            counts INTEGER NOT NULL,
            reward REAL, unscored TEXT, termination TEXT NOT NULL, policy_version INTEGER NOT NULL,
            record TEXT NOT NULL,
            UNIQUE (phase, step, task, sample, attempt)
        )""",
        "CREATE UNIQUE INDEX one_counts ON episodes (phase, step, task, sample) WHERE counts",
        # `context` is what the prompt adds to the first `shared` ids of `parent`: see records.turn.
        """CREATE TABLE turns (
            episode INTEGER NOT NULL REFERENCES episodes (seq),
            id TEXT NOT NULL,
            position INTEGER NOT NULL,
            record TEXT NOT NULL,
            context BLOB NOT NULL, completion BLOB NOT NULL, logps BLOB NOT NULL, versions BLOB NOT NULL,
            PRIMARY KEY (episode, id)
        )""",
        """CREATE TABLE metrics (
            phase TEXT NOT NULL, step INTEGER NOT NULL, name TEXT NOT NULL, value REAL,
            PRIMARY KEY (phase, step, name)
        ) WITHOUT ROWID""",
        "CREATE TABLE events (seq INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, data TEXT NOT NULL)",
        "CREATE TABLE state (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
        """CREATE TABLE samples (
            step INTEGER NOT NULL, position INTEGER NOT NULL,
            episode TEXT NOT NULL, turn TEXT NOT NULL, grouping TEXT NOT NULL, policy TEXT NOT NULL,
            temperature REAL NOT NULL, tokens INTEGER NOT NULL,
            advantage BLOB NOT NULL, weight BLOB NOT NULL, mask BLOB NOT NULL,
            PRIMARY KEY (step, position)
        ) WITHOUT ROWID""",
        """CREATE TABLE checkpoints (
            step INTEGER PRIMARY KEY, at REAL NOT NULL, files TEXT NOT NULL, state TEXT NOT NULL
        )""",
    ),
    (
        # Sessions of live assistants: see runs.online. Of keys there are only digests.
        """CREATE TABLE online_sessions (
            id TEXT PRIMARY KEY, grouping TEXT,
            key_digest BLOB NOT NULL UNIQUE, reward_digest BLOB NOT NULL UNIQUE, secret_digest BLOB NOT NULL UNIQUE,
            created_at REAL NOT NULL, expires_at REAL NOT NULL, ended_at REAL, ended_by TEXT,
            turns INTEGER NOT NULL DEFAULT 0
        ) WITHOUT ROWID""",
        # `trained_in` is the step that is given a closed and scored episode, or -1 where it was set aside.
        """CREATE TABLE online_episodes (
            id TEXT PRIMARY KEY, session TEXT NOT NULL, number INTEGER NOT NULL, started_at REAL NOT NULL,
            active_at REAL NOT NULL, closed_at REAL, scored INTEGER NOT NULL DEFAULT 0, trained_in INTEGER,
            rewards TEXT NOT NULL, turn_rewards TEXT NOT NULL,
            UNIQUE (session, number)
        ) WITHOUT ROWID""",
        "CREATE INDEX untrained ON online_episodes (trained_in) WHERE closed_at IS NOT NULL AND scored",
        # Turns of the open episode of each session and of the one before: what its conversations go on from.
        """CREATE TABLE online_turns (
            episode TEXT NOT NULL, position INTEGER NOT NULL, id TEXT NOT NULL,
            record TEXT NOT NULL,
            context BLOB NOT NULL, completion BLOB NOT NULL, logps BLOB NOT NULL, versions BLOB NOT NULL,
            request BLOB NOT NULL, link BLOB NOT NULL, opening INTEGER NOT NULL, follows TEXT, reply TEXT NOT NULL,
            PRIMARY KEY (episode, position)
        ) WITHOUT ROWID""",
    ),
)


def migrate(db: sqlite3.Connection, path: Path, migrations: Sequence[Sequence[str]] = MIGRATIONS) -> None:
    """Bring a new or older database to the current version, each step in one transaction."""
    found = check(db, path, newest=len(migrations))
    for number, statements in enumerate(migrations[found:], start=found + 1):
        db.execute("BEGIN IMMEDIATE")
        try:
            if number == 1:
                db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                db.execute("CREATE TABLE migrations (version INTEGER PRIMARY KEY, at REAL NOT NULL, by TEXT NOT NULL)")
            for statement in statements:
                db.execute(statement)
            db.execute("INSERT INTO migrations VALUES (?, ?, ?)", (number, time.time(), __version__))
            db.execute(f"PRAGMA user_version = {number}")
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise


def check(db: sqlite3.Connection, path: Path, *, newest: int = len(MIGRATIONS)) -> int:
    """The schema version found. Refuses a database that is not ours, or that a newer rl-harness wrote."""
    (application,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    (objects,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application != APPLICATION_ID and objects:
        raise RunError(f"{path}: not a database of rl-harness", remedy="choose another --name, or move the file away")
    if version > newest:
        raise RunError(
            f"{path}: written by a newer rl-harness (schema {version}, this one knows {newest})",
            remedy="upgrade rl-harness, or start a new run with --fresh",
        )
    return int(version)
