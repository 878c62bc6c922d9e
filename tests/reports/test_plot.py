"""The picture of a training run, and no fuss where it cannot be drawn."""

from __future__ import annotations

import sys

import pytest
from rl_harness.reports import report_text, show_run, write_plot
from rl_harness.reports.plot import MISSING


def test_a_training_run_is_plotted(trained):
    pytest.importorskip("matplotlib")
    path = write_plot(trained)
    assert path == trained / "plots" / "training.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in path.parent.iterdir()] == ["training.png"]
    assert f"plot: {path}" in report_text(show_run(trained))
    assert write_plot(trained) == path  # again


def test_an_evaluation_has_nothing_to_plot(evaluated):
    assert write_plot(evaluated) is None
    assert not (evaluated / "plots").exists()


def test_without_matplotlib_there_is_a_note_and_no_error(trained, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert write_plot(trained) is None
    assert MISSING in report_text(show_run(trained))
    assert "pip install 'rl-harness[plot]'" in MISSING
