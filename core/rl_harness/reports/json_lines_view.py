"""``--json`` of a job that has no end of its own: an object a line on standard output, as things happen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TextIO

import msgspec

from rl_harness.records import Episode
from rl_harness.reports.run_report import show_run
from rl_harness.reports.view import Ended, OpenRun, View, Waiting


class JsonLinesView(View):
    """Each object has an ``event``: ``start``, ``waiting``, ``episode``, ``step``, ``note``, ``finish`` (with the
    report)."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def start(self, title: str, run: OpenRun) -> None:
        self._say("start", title=title, run=str(run.path), resumed=run.resumed)

    def phase(self, name: str, total: int) -> None: ...

    def episode(self, episode: Episode) -> None:
        self._say(
            "episode",
            id=episode.id,
            session=episode.key.task,
            reward=episode.reward,
            unscored=episode.unscored,
            turns=episode.usage.turns,
        )

    def waiting(self, waiting: Waiting) -> None:
        self._say("waiting", **waiting._asdict())

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._say("step", step=step, metrics=dict(metrics))

    def note(self, text: str) -> None:
        self._say("note", text=text)

    def finish(self, outcome: Ended) -> None:
        self._say("finish", report=show_run(outcome.run))

    def _say(self, event: str, **data: Any) -> None:
        print(msgspec.json.encode({"event": event, **data}).decode(), file=self._stream, flush=True)
