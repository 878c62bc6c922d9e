"""Stores, runs, and real processes that can be killed."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rl_harness.runs.config import RunConfig
from rl_harness.runs.store import RunStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    store = RunStore(tmp_path / "db.sqlite")
    yield store
    store.close()


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return RunConfig(runs_dir=tmp_path / "runs", benchmark="bench", model="model")


class Child:
    """A forked process running a function that is given a ``say(text)`` to print lines to its parent."""

    def __init__(self, body: Callable[[Callable[[str], None]], None]) -> None:
        read_end, write_end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.close(read_end)
                body(lambda text: void(os.write(write_end, f"{text}\n".encode())))
                status = 0
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(status)
        os.close(write_end)
        self._out = os.fdopen(read_end, "rb")
        self._status: int | None = None

    def line(self) -> str:
        """The next line it says; empty when it is gone."""
        return self._out.readline().decode().rstrip("\n")

    def rest(self) -> list[str]:
        return self._out.read().decode().splitlines()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Its exit status, or minus the signal that killed it."""
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status

    def end(self) -> None:
        if self._status is None:
            self.kill()
            self.wait()
        self._out.close()


def void(_: object) -> None: ...


@pytest.fixture
def child() -> Iterator[Callable[[Callable[[Callable[[str], None]], None]], Child]]:
    children: list[Child] = []

    def start(body: Callable[[Callable[[str], None]], None]) -> Child:
        children.append(Child(body))
        return children[-1]

    yield start
    for each in children:
        each.end()
