"""How a job shows what it does, while it runs and when it is done. Jobs call a view and know nothing of terminals."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from rl_harness.records import Episode


class OpenRun(Protocol):
    """What a view needs of a run that starts."""

    @property
    def path(self) -> Path: ...
    @property
    def resumed(self) -> bool: ...


class Ended(Protocol):
    """What a view needs of a job that ended; the rest it reads from the run's directory."""

    @property
    def run(self) -> Path: ...
    @property
    def status(self) -> str: ...


class Waiting(NamedTuple):
    """What a server of live assistants waits for: ``sessions`` that can be called, ``rewarded`` episodes that no update
    was given yet, and how many make one (None where nothing is trained)."""

    sessions: int
    rewarded: int
    batch_size: int | None

    def parts(self) -> list[str]:
        """The pieces of a status line."""
        sessions = f"{self.sessions} session{'' if self.sessions == 1 else 's'}"
        if self.batch_size is None:
            return [sessions]
        return [sessions, f"{self.rewarded} of {self.batch_size} rewarded for the next update"]


class View(abc.ABC):
    """A context manager, so that a terminal is put right however the job ends.

    :meth:`start` once; then phases, each with its episodes (every attempt, retries included), and after a training
    phase its step; :meth:`finish` when the run is closed. Methods return at once and are called in one thread.
    """

    @abc.abstractmethod
    def start(self, title: str, run: OpenRun) -> None: ...

    @abc.abstractmethod
    def phase(self, name: str, total: int) -> None:
        """``total`` episodes are about to run; 0 where nobody knows."""

    @abc.abstractmethod
    def episode(self, episode: Episode) -> None: ...

    @abc.abstractmethod
    def waiting(self, waiting: Waiting) -> None:
        """What the phase waits for has changed, where it waits for assistants and their rewards."""

    @abc.abstractmethod
    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    @abc.abstractmethod
    def note(self, text: str) -> None: ...

    @abc.abstractmethod
    def finish(self, outcome: Ended) -> None: ...

    def close(self) -> None:
        """Put the terminal right. Safe to repeat."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
