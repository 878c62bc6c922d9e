"""An older database becomes a current one, whole or not at all; a newer one is left alone."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest
from rl_harness.errors import RunError
from rl_harness.runs.schema import MIGRATIONS, check, migrate
from rl_harness.runs.store import RunStore


@pytest.fixture
def path(tmp_path):
    return tmp_path / "db.sqlite"


def connect(path):
    return closing(sqlite3.connect(path, isolation_level=None))


def test_a_database_is_migrated_step_by_step_and_remembers_it(path):
    newer = (*MIGRATIONS, ("ALTER TABLE state ADD COLUMN note TEXT",), ("CREATE TABLE extra (a)",))
    with connect(path) as db:
        migrate(db, path)
        db.execute("INSERT INTO state VALUES ('kept', '1')")
        migrate(db, path, newer)
        migrate(db, path, newer)
        assert check(db, path, newest=len(newer)) == len(newer)
        assert [row[0] for row in db.execute("SELECT version FROM migrations")] == list(range(1, len(newer) + 1))
        assert db.execute("SELECT * FROM state").fetchall() == [("kept", "1", None)]


def test_a_migration_that_fails_leaves_the_database_as_it_was(path):
    with connect(path) as db:
        migrate(db, path)
        broken = (*MIGRATIONS, ("CREATE TABLE half (a)", "CREATE NONSENSE"))
        with pytest.raises(sqlite3.OperationalError):
            migrate(db, path, broken)
        assert check(db, path) == len(MIGRATIONS)
        assert db.execute("SELECT name FROM sqlite_master WHERE name = 'half'").fetchall() == []


@pytest.mark.parametrize("readonly", [True, False])
def test_a_database_of_a_newer_version_is_refused(path, readonly):
    RunStore(path).close()
    with connect(path) as db:
        db.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    with pytest.raises(RunError, match="newer rl-harness") as error:
        RunStore(path, readonly=readonly)
    assert "upgrade" in str(error.value)
