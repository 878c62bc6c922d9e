"""Progress that redraws itself in a terminal. The only module that imports rich; ``NO_COLOR`` is honoured by it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table as RichTable
from rich.text import Text

from rl_harness.excerpts import printable_lines
from rl_harness.records import Episode
from rl_harness.reports.progress import Progress
from rl_harness.reports.run_report import show_run
from rl_harness.reports.tables import Table, fitting
from rl_harness.reports.text import report_parts
from rl_harness.reports.training import steps_table
from rl_harness.reports.view import Ended, OpenRun, View, Waiting

_STEPS_SHOWN = 12
_BAR_WIDTH = 30


class RichView(View):
    """A bar for the phase that runs, under a table of the latest training steps; finished phases scroll away above."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, highlight=False)
        self._progress: Progress | None = None
        self._waiting: Waiting | None = None
        self._steps: list[dict[str, float]] = []
        self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=4, transient=True)

    def start(self, title: str, run: OpenRun) -> None:
        self._console.print(Text(title, style="bold"))
        self._console.print(Text(f"{'resuming' if run.resumed else 'run'} {run.path}", style="dim"))
        self._live.start()

    def phase(self, name: str, total: int) -> None:
        self._end_phase()
        self._progress = Progress(name, total, waiting=self._waiting)
        if self._live.is_started:
            self._live.refresh()

    def episode(self, episode: Episode) -> None:
        if self._progress is not None:
            self._progress.add(episode)

    def waiting(self, waiting: Waiting) -> None:
        self._waiting = waiting
        if self._progress is not None:
            self._progress.waiting = waiting

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._progress = None  # its row says it all
        self._steps.append({"step": step, **metrics})

    def note(self, text: str) -> None:
        self._console.print(Text(printable_lines(text)))

    def finish(self, outcome: Ended) -> None:
        self.close()
        for part in report_parts(show_run(outcome.run)):
            self._console.print()
            self._console.print(
                Text(part) if isinstance(part, str) else _rich_table(fitting(part, self._console.width))
            )

    def close(self) -> None:
        self._end_phase()
        self._live.stop()

    def _end_phase(self) -> None:
        progress, self._progress = self._progress, None
        if progress is not None and progress.done:
            self._console.print(Text(progress.line()))

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = []
        if self._steps:
            parts.append(_rich_table(fitting(steps_table(self._steps[-_STEPS_SHOWN:]), self._console.width)))
        progress = self._progress
        if progress is not None:
            line = RichTable.grid(padding=(0, 1))
            known = progress.total > 0
            line.add_row(
                Text(progress.name, style="bold"),
                ProgressBar(total=progress.total, completed=progress.done, width=_BAR_WIDTH) if known else Text(""),
                Text(f"{progress.done}/{progress.total}" if known else str(progress.done)),
                Text("  ".join(progress.parts())),
            )
            parts.append(line)
        return Group(*parts)


def _rich_table(table: Table) -> RichTable:
    out = RichTable(title=table.title or None, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for i, column in enumerate(table.columns):
        out.add_column(column, no_wrap=True, justify="left" if i == 0 else "right")
    for row in table.rows:
        out.add_row(*(Text(cell) for cell in row))
    return out
