"""``--json``: one JSON document on standard output when the job is done, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TextIO

import msgspec

from rl_harness.records import Episode
from rl_harness.reports.run_report import show_run
from rl_harness.reports.view import Ended, OpenRun, View, Waiting


class JsonView(View):
    """The document is a :class:`~rl_harness.reports.run_report.RunReport` with the job's ``notes``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._notes: list[str] = []

    def start(self, title: str, run: OpenRun) -> None: ...

    def phase(self, name: str, total: int) -> None: ...

    def episode(self, episode: Episode) -> None: ...

    def waiting(self, waiting: Waiting) -> None: ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def note(self, text: str) -> None:
        self._notes.append(text)

    def finish(self, outcome: Ended) -> None:
        document: dict[str, Any] = msgspec.to_builtins(show_run(outcome.run))
        print(json_text({**document, "notes": self._notes}), file=self._stream, flush=True)


def json_text(value: object) -> str:
    """Any report as JSON. Numbers that JSON does not have (NaN, infinity) become null."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
