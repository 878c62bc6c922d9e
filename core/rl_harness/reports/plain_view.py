"""Progress as lines, for pipes, files and continuous integration: no colour, no control characters."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TextIO

from rl_harness.excerpts import printable_lines
from rl_harness.records import Episode
from rl_harness.reports.progress import Progress
from rl_harness.reports.run_report import show_run
from rl_harness.reports.text import report_text
from rl_harness.reports.training import step_line
from rl_harness.reports.view import Ended, OpenRun, View, Waiting

_SECONDS_BETWEEN_LINES = 10.0


class PlainView(View):
    """A line when a phase starts and ends, one every ten seconds between, one a step, and the report."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._progress: Progress | None = None
        self._said_at = 0.0
        self._said_done = 0
        self._waiting: Waiting | None = None

    def start(self, title: str, run: OpenRun) -> None:
        self._say(title)
        self._say(f"{'resuming' if run.resumed else 'run'} {run.path}")

    def phase(self, name: str, total: int) -> None:
        self._end_phase()
        self._progress = Progress(name, total, self._clock, waiting=self._waiting)
        self._said_at, self._said_done = self._clock(), 0
        self._say(f"{name}: {total} episodes" if total else name)

    def episode(self, episode: Episode) -> None:
        if self._progress is None:
            return
        self._progress.add(episode)
        if self._clock() - self._said_at >= _SECONDS_BETWEEN_LINES:
            self._say_progress(self._progress)

    def waiting(self, waiting: Waiting) -> None:
        self._waiting = waiting
        if self._progress is None:
            return
        self._progress.waiting = waiting
        if self._clock() - self._said_at >= _SECONDS_BETWEEN_LINES:
            self._say_progress(self._progress)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._progress = None  # the step's line says it all
        self._say(step_line(step, metrics))

    def note(self, text: str) -> None:
        if self._progress is not None and self._progress.done == self._progress.total:
            self._end_phase()
        self._say(text)

    def finish(self, outcome: Ended) -> None:
        self._end_phase()
        self._say("")
        self._say(report_text(show_run(outcome.run)))

    def close(self) -> None:
        self._end_phase()

    def _end_phase(self) -> None:
        progress, self._progress = self._progress, None
        if progress is not None and progress.done > self._said_done:
            self._say_progress(progress)

    def _say_progress(self, progress: Progress) -> None:
        self._said_at, self._said_done = self._clock(), progress.done
        self._say(progress.line())

    def _say(self, text: str) -> None:
        print(printable_lines(text), file=self._stream, flush=True)
