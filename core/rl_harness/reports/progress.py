"""How far a phase is: rate, time left, pass rate so far and failures by kind, from the episodes as they end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from rl_harness.records import Episode, EpisodeKey
from rl_harness.reports.summary import passes
from rl_harness.reports.tables import counts, duration
from rl_harness.reports.view import Waiting


class Progress:
    """A retry replaces the attempt before it, so nothing counts twice."""

    def __init__(
        self,
        name: str,
        total: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        waiting: Waiting | None = None,
    ) -> None:
        self.name = name
        self.total = total
        self.waiting = waiting
        self._clock = clock
        self._started = clock()
        self._latest: dict[EpisodeKey, Episode] = {}
        self.passed = 0
        self.scored = 0
        self.unscored: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.retries = 0

    @property
    def done(self) -> int:
        return len(self._latest)

    def add(self, episode: Episode) -> None:
        earlier = self._latest.get(episode.key)
        if earlier is not None:
            self.retries += 1
            if earlier.reward is not None:
                return
            self._count(earlier, -1)
        self._latest[episode.key] = episode
        self._count(episode, 1)

    def _count(self, episode: Episode, by: int) -> None:
        if episode.unscored is not None:
            self.unscored[episode.unscored.value] += by
            return
        self.scored += by
        if passes(episode):
            self.passed += by
        else:
            self.failed[episode.termination.value] += by

    @property
    def rate(self) -> float | None:
        """Episodes a second."""
        elapsed = self._clock() - self._started
        return self.done / elapsed if elapsed > 0 and self.done else None

    @property
    def seconds_left(self) -> float | None:
        return (self.total - self.done) / self.rate if self.rate else None

    def parts(self) -> list[str]:
        """The pieces of a status line after the count: what is waited for, speed, pass rate, failures."""
        pieces = [] if self.waiting is None else self.waiting.parts()
        if self.rate:
            pieces.append(f"{self.rate:.1f}/s" if self.rate >= 1 else f"{60 * self.rate:.1f}/min")
        if self.done < self.total:
            pieces.append(f"ETA {duration(self.seconds_left)}")
        if self.scored:
            pieces.append(f"passed {self.passed / self.scored:.2f} ({self.passed}/{self.scored})")
        if failed := +self.failed:
            pieces.append(f"failed after {counts(dict(failed.most_common(3)))}")
        if unscored := +self.unscored:
            pieces.append(f"unscored {unscored.total()} ({counts(dict(unscored.most_common(3)))})")
        if self.retries:
            pieces.append(f"retries {self.retries}")
        return pieces

    def line(self) -> str:
        count = f"{self.done}/{self.total}" if self.total else str(self.done)
        return "  ".join([f"{self.name}: {count}", *self.parts()])
