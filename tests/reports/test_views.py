"""What a user sees while a job runs: in a terminal, in a pipe, as JSON."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TextIO

import pytest
from rl_harness.records import Termination
from rl_harness.reports import View, Waiting, make_view
from rl_harness.reports.plain_view import PlainView
from rl_harness.reports.progress import Progress
from rl_harness.reports.tables import Table, duration, fitting, number, rate, text_of
from rl_harness.testing.records import an_episode


class Outcome(NamedTuple):
    run: Path
    status: str = "done"


class Started(NamedTuple):
    path: Path
    resumed: bool = False


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal:
    """A pseudo-terminal; ``shown()`` is what was written to it."""

    def __init__(self) -> None:
        master, slave = pty.openpty()
        self.stream: TextIO = os.fdopen(slave, "w")
        self._chunks: list[bytes] = []
        self._thread = threading.Thread(target=self._drain, args=(master,))
        self._thread.start()

    def _drain(self, master: int) -> None:
        try:
            while chunk := os.read(master, 65536):
                self._chunks.append(chunk)
        except OSError:
            pass  # the other side is closed
        os.close(master)

    def shown(self) -> str:
        self.stream.close()
        self._thread.join()
        return b"".join(self._chunks).decode()


STEP = {"reward": 0.25, "pass_rate": 0.25, "grad_norm": 1.25}


def play(view: View, run: Path) -> None:
    """A small training job as a view sees it."""
    view.start("bench: train grpo", Started(run))
    view.phase("before", 2)
    view.episode(an_episode("a", 1.0))
    view.episode(an_episode("b", None))
    view.episode(an_episode("b", 0.0, attempt=2, termination=Termination.TURN_LIMIT))
    view.phase("train step 0", 1)
    view.episode(an_episode("a", 1.0))
    view.step(0, STEP)
    view.note("stopping after step 0")
    view.finish(Outcome(run))


def test_plain_lines(trained):
    stream = io.StringIO()
    with make_view(stream=stream) as view:
        play(view, trained)
    lines = stream.getvalue().splitlines()
    assert lines[:2] == ["bench: train grpo", f"run {trained}"]
    assert lines[2] == "before: 2 episodes"
    assert re.fullmatch(
        r"before: 2/2  \S+/(s|min)  passed 0\.50 \(1/2\)  failed after turn_limit 1  retries 1", lines[3]
    )
    assert lines[4] == "train step 0: 1 episodes"
    assert lines[5].startswith("step 0: reward 0.25  pass 0.25  ")
    assert lines[6] == "stopping after step 0"
    assert any(line.startswith("sampled  0.10 [0.03, 0.30]") for line in lines)
    assert "\x1b" not in stream.getvalue()


def test_plain_lines_come_at_intervals():
    clock, stream = Clock(), io.StringIO()
    view = PlainView(stream, clock)
    view.phase("evaluate", 100)
    for i in range(40):
        clock.now += 1.0
        view.episode(an_episode(f"task-{i}", float(i % 2)))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 5
    assert lines[1] == "evaluate: 10/100  1.0/s  ETA 1:30  passed 0.50 (5/10)  failed after answer 5"
    view.close()
    assert stream.getvalue().splitlines()[5:] == []  # the last one said it all already


def serve(view: View, run: Path) -> None:
    """Live assistants as a view sees them."""
    view.start("serve m: reinforce", Started(run))
    view.phase("online step 0", 0)
    view.waiting(Waiting(sessions=1, rewarded=0, batch_size=8))
    view.episode(an_episode("s-1", 1.0))
    view.waiting(Waiting(sessions=3, rewarded=1, batch_size=8))


def test_what_a_server_waits_for_is_in_its_line(trained, monkeypatch):
    clock, stream = Clock(), io.StringIO()
    view = PlainView(stream, clock)
    serve(view, trained)
    clock.now += 11.0
    view.waiting(Waiting(sessions=4, rewarded=1, batch_size=8))
    line = stream.getvalue().splitlines()[-1]
    assert line.startswith("online step 0: 1  4 sessions  1 of 8 rewarded for the next update  ")
    view.step(0, STEP)
    view.phase("online step 1", 0)  # it is known from before
    view.episode(an_episode("s-1", 1.0))
    view.close()
    assert "online step 1: 1  4 sessions" in stream.getvalue()

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    terminal = Terminal()
    with make_view(stream=terminal.stream) as view:
        serve(view, trained)
    assert "3 sessions  1 of 8 rewarded for the next update" in terminal.shown()

    stream = io.StringIO()
    with make_view(json=True, lines=True, stream=stream) as view:
        serve(view, trained)
        view.waiting(Waiting(sessions=1, rewarded=0, batch_size=None))
    told = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert told[3] == {"event": "waiting", "sessions": 3, "rewarded": 1, "batch_size": 8}
    assert Waiting(sessions=1, rewarded=0, batch_size=None).parts() == ["1 session"]


def test_a_resumed_run_says_so():
    stream = io.StringIO()
    PlainView(stream).start("title", Started(Path("runs/x"), resumed=True))
    assert "resuming runs/x" in stream.getvalue()


def test_json_is_one_document(trained):
    stream = io.StringIO()
    with make_view(json=True, stream=stream) as view:
        play(view, trained)
    document = json.loads(stream.getvalue())
    assert document["changes"][0]["after"]["passed"] == 18
    assert document["notes"] == ["stopping after step 0"]


@pytest.fixture
def in_terminal(monkeypatch) -> Callable[[str], str]:
    def show(run, **environment):
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setenv("COLUMNS", "160")
        monkeypatch.delenv("NO_COLOR", raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        terminal = Terminal()
        with make_view(stream=terminal.stream) as view:
            kind = type(view).__name__
            play(view, run)
        return kind, terminal.shown()

    return show


def test_a_terminal_gets_a_live_view_and_is_left_in_order(trained, in_terminal):
    kind, shown = in_terminal(trained)
    assert kind == "RichView"
    for part in (
        "bench: train grpo",
        "before",
        "passed 0.50",
        "stopping after step 0",
        "0.10 [0.03, 0.30]",
        "grad norm",
    ):
        assert part in shown
    assert "\x1b[?25l" in shown  # the cursor is hidden …
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # … and comes back


def test_no_color_is_honoured(trained, in_terminal):
    colours = re.compile(r"\x1b\[[0-9;]*(3[0-8]|4[0-8]|9[0-7])[0-9;]*m")
    assert colours.search(in_terminal(trained)[1])
    assert not colours.search(in_terminal(trained, NO_COLOR="1")[1])


def test_a_dumb_terminal_gets_plain_lines(trained, in_terminal):
    kind, shown = in_terminal(trained, TERM="dumb")
    assert kind == "PlainView"
    assert "\x1b" not in shown


def test_a_job_that_fails_leaves_the_terminal_in_order(trained, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()

    def job():
        with make_view(stream=terminal.stream) as view:
            view.start("title", Started(trained))
            view.phase("evaluate", 2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job()
    shown = terminal.shown()
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_rich_and_matplotlib_are_imported_only_when_needed():
    code = (
        "import io, sys, rl_harness.reports as r; r.make_view(stream=io.StringIO());"
        "print([m for m in ('rich', 'matplotlib', 'torch') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_progress_counts_keys_not_attempts():
    clock = Clock()
    progress = Progress("p", 3, clock)
    clock.now = 2.0
    progress.add(an_episode("a", None))
    assert (progress.done, progress.scored, +progress.unscored) == (1, 0, {"sandbox_error": 1})
    progress.add(an_episode("a", 1.0, attempt=2))
    progress.add(an_episode("a", 0.0, attempt=3))  # a scored one is not replaced
    assert (progress.done, progress.scored, progress.passed, +progress.unscored) == (1, 1, 1, {})
    assert progress.rate == 0.5
    assert progress.seconds_left == 4.0
    assert progress.retries == 2


def test_numbers_for_people():
    assert [number(v) for v in (None, 0.0, 12.0, 0.01234, 1234.5, float("nan"))] == [
        "-",
        "0",
        "12",
        "0.0123",
        "1234",
        "nan",
    ]
    assert [duration(v) for v in (None, 0.04, 7.25, 59.4, 60, 750, 3723)] == [
        *("-", "0.0 s", "7.2 s", "59 s", "1:00", "12:30", "1:02:03")
    ]
    assert rate(0.11, 0.0625, 0.186) == "0.11 [0.06, 0.19]"
    assert rate(-0.5, -0.75, 0.0, sign=True) == "-0.50 [-0.75, +0.00]"
    assert rate(None) == "-"


def test_tables_align_and_fit():
    table = Table(title="T", columns=("", "one", "two"), rows=(("a", "1", "10"), ("long", "100", "2")))
    assert text_of(table) == "T\n      one  two\na       1   10\nlong  100    2"
    assert fitting(table, 14) == table
    assert fitting(table, 13).columns == ("", "one")
    assert fitting(table, 1).columns == ("", "one")
