"""The one thread that writes the database: it commits what has queued up in one transaction (group commit).

A result is delivered only after the commit. Work that fails takes nothing else down: the batch is rolled back
and each piece of it is then tried in a transaction of its own.
"""

from __future__ import annotations

import contextlib
import queue
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from rl_harness.errors import RunError
from rl_harness.runs.files import explain

T = TypeVar("T")
_Work = Callable[[sqlite3.Connection], Any]
_Job = tuple[_Work, "Future[Any]"]

#: Pieces of work that may wait. A producer that nobody awaits (events) is held back beyond this.
QUEUE_LIMIT = 4096
_BATCH_LIMIT = 256


class Writer:
    """Owns the connection ``db`` of the database at ``path`` from construction to :meth:`close`."""

    def __init__(self, db: sqlite3.Connection, path: Path) -> None:
        self._db = db
        self._path = path
        self._jobs: queue.Queue[_Job | None] = queue.Queue(QUEUE_LIMIT)
        self._closed = False
        # A daemon: an interpreter that exits without close() must not hang; whatever was acknowledged is on disk.
        self._thread = threading.Thread(target=self._serve, name="rl-harness-store", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[sqlite3.Connection], T]) -> Future[T]:
        """Queue ``work``; the future is done when its transaction is committed, or has failed."""
        if self._closed:
            raise RunError(f"{self._path}: the run is closed")
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # from here on nobody can cancel it: a queued write is a write
        self._jobs.put((work, future))
        return future

    def close(self) -> None:
        """Commit what is queued, stop the thread, close the connection."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
            self._thread.join()

    def _serve(self) -> None:
        open_ = True
        while open_:
            batch: list[_Job] = []
            job = self._jobs.get()
            while job is not None:
                batch.append(job)
                if len(batch) == _BATCH_LIMIT:
                    break
                try:
                    job = self._jobs.get_nowait()
                except queue.Empty:
                    break
            else:
                open_ = False
            if batch and not self._commit(batch):
                for single in batch:
                    self._commit([single], final=True)
        with contextlib.suppress(sqlite3.Error):  # folding in the log may fail on a full disk; the log then stays
            self._db.close()

    def _commit(self, batch: list[_Job], *, final: bool = False) -> bool:
        """Run the batch in one transaction and deliver. On failure: False, or with ``final`` deliver the error."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            results = [work(self._db) for work, _ in batch]
            self._db.execute("COMMIT")
        except Exception as error:
            self._roll_back()
            if final or len(batch) == 1:
                _fail(batch, self._translate(error))
                return True
            return False
        for (_, future), result in zip(batch, results, strict=True):
            future.set_result(result)
        return True

    def _roll_back(self) -> None:
        try:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
        except sqlite3.Error:
            pass  # SQLite rolls back by itself on a full disk; the transaction is gone either way

    def _translate(self, error: Exception) -> Exception:
        if isinstance(error, sqlite3.Error | OSError):
            translated = explain(self._path, error)
            translated.__cause__ = error
            return translated
        return error


def _fail(batch: list[_Job], error: Exception) -> None:
    for _, future in batch:
        future.set_exception(error)
