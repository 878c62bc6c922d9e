"""``plots/training.png``: reward and pass rate a step, and the evaluations with their intervals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_harness.reports.run_report import Evaluation, RunReport, show_run

#: What to tell a user who has no matplotlib.
MISSING = "no plot: matplotlib is not installed (pip install 'rl-harness[plot]')"

_SAMPLED, _GREEDY, _TRAINING, _MUTED = "#2563eb", "#ea580c", "#64748b", "#cbd5e1"


def can_plot() -> bool:
    """Whether the optional dependency is there."""
    import importlib.util

    return importlib.util.find_spec("matplotlib") is not None


def write_plot(run: Path) -> Path | None:
    """Plot a training run's directory; returns the picture's path.

    None when there is nothing to plot (no training step yet) or no matplotlib: see :func:`can_plot` and
    :data:`MISSING`.
    """
    if not can_plot():
        return None
    report = show_run(run)
    if not report.training:
        return None
    path = run / "plots" / "training.png"
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(".training.png")
    figure = _figure(report)
    figure.savefig(partial, format="png", dpi=120)
    partial.replace(path)
    return path


def _figure(report: RunReport) -> Any:
    # Figure without pyplot: no global state, no display, safe in any thread.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    # A step's episodes were sampled after `step` updates, so training and evaluations share one axis.
    for name, label, style in (("pass_rate", "training: pass rate", "-o"), ("reward", "training: mean reward", "--")):
        points = [(step["step"], step[name]) for step in report.training if name in step]
        if points and (
            name == "pass_rate" or any(step.get("reward") != step.get("pass_rate") for step in report.training)
        ):
            axes.plot(*zip(*points, strict=True), style, color=_TRAINING, markersize=3, linewidth=1.2, label=label)
    _evaluations(axes, [e for e in report.evaluations if not e.greedy], "evaluation, sampled", _SAMPLED, "o", -0.06)
    _evaluations(axes, [e for e in report.evaluations if e.greedy], "evaluation, greedy", _GREEDY, "s", 0.06)
    axes.set_xlabel("updates")
    axes.set_ylabel("pass rate")
    axes.set_ylim(-0.03, 1.03)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color=_MUTED, linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    subject = " · ".join(part for part in (report.benchmark, report.model, report.trainer) if part)
    axes.set_title(f"{subject}\nbars: 95 % intervals", fontsize=10, loc="left")
    return figure


def _evaluations(axes: Any, evaluations: list[Evaluation], label: str, color: str, marker: str, shift: float) -> None:
    """Points with interval bars, moved a little sideways so that two kinds do not cover each other."""
    points = [
        (e.after_steps + shift, s.pass_rate, s.low, s.high)
        for e in evaluations
        if e.after_steps is not None
        and (s := e.summary).pass_rate is not None
        and s.low is not None
        and s.high is not None
    ]
    if not points:
        return
    points.sort()
    where, values = [p[0] for p in points], [p[1] for p in points]
    errors = [[max(0.0, p[1] - p[2]) for p in points], [max(0.0, p[3] - p[1]) for p in points]]
    axes.errorbar(where, values, yerr=errors, fmt=marker, color=color, capsize=4, markersize=6, label=label)
