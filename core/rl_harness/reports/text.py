"""Reports as tables and lines for people; the data is :mod:`rl_harness.reports.run_report`'s."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

from rl_harness.excerpts import excerpt, printable
from rl_harness.reports.plot import MISSING, can_plot
from rl_harness.reports.run_report import Change, Evaluation, RunReport, RunRow
from rl_harness.reports.sandboxes import sandbox_lines
from rl_harness.reports.summary import Summary
from rl_harness.reports.tables import Table, counts, duration, listed, number, rate, text_of
from rl_harness.reports.training import gap_warning, steps_table

#: Characters of one line of what went wrong, and how many of its last lines are shown.
_WIDTH = 300
_LAST_LINES = 8

#: A share of episodes that cannot be passed over in silence.
_MANY = 0.1


def report_parts(report: RunReport) -> Iterator[Table | str]:
    """A run's report from top to bottom, as tables and lines; what matters most is at the end, where one looks."""
    yield "\n".join(_heading(report))
    if report.training:
        yield steps_table(report.training)
        if warnings := [w for step in report.training if (w := gap_warning(int(step["step"]), step))]:
            yield "\n".join(warnings[:3] + [f"... and {len(warnings) - 3} more steps like these"] * (len(warnings) > 3))
    for evaluation in report.evaluations:
        yield "\n".join(_details(evaluation.phase, evaluation.summary))
    if report.training_episodes is not None:
        name = "episodes trained on" if report.online is None else "episodes that are over"
        yield "\n".join(_details(name, report.training_episodes))
    if report.online is not None:
        yield _online(report.online, trains=report.trainer is not None)
    if report.sandboxes and (lines := list(sandbox_lines(report.sandboxes))):
        yield "\n".join(lines)
    if report.evaluations:
        yield evaluations_table(report.evaluations)
    if report.changes:
        yield changes_table(report.changes)
        if notes := list(_about_changes(report.changes)):
            yield "\n".join(notes)
    yield "\n".join(_files(report))


def report_text(report: RunReport) -> str:
    """The whole report in plain characters."""
    return "\n\n".join(part if isinstance(part, str) else text_of(part) for part in report_parts(report))


def runs_text(rows: Sequence[RunRow]) -> str:
    """``runs list``."""
    if not rows:
        return "no runs yet"
    table = Table(
        columns=("run", "status", "started", "benchmark", "model", "trainer", "steps", "episodes", "pass rate"),
        rows=tuple(
            (
                row.name,
                f"{row.status} (pid {row.pid})" if row.pid is not None else row.status,
                time.strftime("%Y-%m-%d %H:%M", time.localtime(row.started_at)) if row.started_at is not None else "-",
                row.benchmark or "-",
                row.model or "-",
                row.trainer or "-",
                number(row.steps),
                number(row.episodes),
                f"{row.evaluation}: {rate(row.pass_rate, row.low, row.high)}" if row.evaluation else "-",
            )
            for row in rows
        ),
    )
    problems = [f"{row.path}: {row.problem}" for row in rows if row.problem]
    return "\n".join([text_of(table), *problems])


def evaluations_table(evaluations: Sequence[Evaluation]) -> Table:
    """A row an evaluation: the rates with what is missing from their denominator beside it."""
    ks = sorted({p.k for e in evaluations for p in e.summary.pass_at_k if p.k > 1})
    return Table(
        title="Evaluation (95 % intervals: pass rate by Wilson, mean reward by bootstrap over tasks)",
        columns=("", "pass rate", "passed", *(f"pass@{k}" for k in ks), "mean reward", "unscored"),
        rows=tuple(
            (
                e.phase,
                rate(e.summary.pass_rate, e.summary.low, e.summary.high),
                f"{e.summary.passed}/{e.summary.scored}",
                *(_pass_at(e.summary, k) for k in ks),
                rate(e.summary.reward_mean, e.summary.reward_low, e.summary.reward_high),
                unscored(e.summary),
            )
            for e in evaluations
        ),
    )


def changes_table(changes: Sequence[Change]) -> Table:
    """Before and after training."""
    return Table(
        title="Before and after training (pass rate with 95 % interval)",
        columns=("", "before", "after", "change, task by task"),
        rows=tuple(
            (
                change.name,
                rate(change.before.pass_rate, change.before.low, change.before.high),
                rate(change.after.pass_rate, change.after.low, change.after.high),
                rate(change.difference.value, change.difference.low, change.difference.high, sign=True)
                if change.difference
                else "-",
            )
            for change in changes
        ),
    )


def unscored(summary: Summary) -> str:
    """``0``, or how many with their reasons."""
    return f"{summary.unscored_total} ({counts(summary.unscored)})" if summary.unscored else "0"


def _pass_at(summary: Summary, k: int) -> str:
    found = next((p for p in summary.pass_at_k if p.k == k), None)
    if found is None or found.value is None:
        return "-"
    return f"{found.value:.2f}" + (f" (of {found.tasks} tasks)" if found.left_out else "")


def _heading(report: RunReport) -> list[str]:
    state = report.status if report.pid is None else f"{report.status}, pid {report.pid}"
    times = f", resumed {report.resumed} x" if report.resumed else ""
    pairs = {
        "benchmark": report.benchmark,
        "model": report.model,
        "harness": report.harness,
        "sandbox": report.sandbox,
        "trainer": report.trainer,
    }
    return [
        f"{report.path}: {state}{times}",
        "  ".join(f"{name} {value}" for name, value in pairs.items() if value),
    ]


def _about_changes(changes: Sequence[Change]) -> Iterator[str]:
    gains = {change.name: change.difference.value for change in changes if change.difference}
    if "sampled" in gains and "greedy" in gains and gains["sampled"] > max(gains["greedy"], 0.0):
        yield (
            f"The sampled gain is {gains['sampled']:+.2f}, the greedy one {gains['greedy']:+.2f}: what "
            "sampling gained beyond that is sharpening, a policy surer of what it could already do."
        )
    for change in changes:
        shares = [s.out_of_time / s.episodes if s.episodes else 0.0 for s in (change.before, change.after)]
        if abs(shares[1] - shares[0]) >= _MANY:
            yield (
                f"warning: {change.name}: {change.before.out_of_time} of {change.before.episodes} episodes before and "
                f"{change.after.out_of_time} of {change.after.episodes} after training ran out of time as they waited "
                "for the model, so this change is one of speed too, not only of what the model learned. Give agents "
                "more time (-o agent_timeout=SECONDS), or lower the concurrency, and run it again"
            )
        if change.difference and change.difference.unscored:
            yield f"{change.name}: {change.difference.unscored} tasks are left out of the change, being unscored."


def _details(name: str, summary: Summary) -> list[str]:
    lines = [f"{name}: {summary.episodes} episodes of {summary.tasks} tasks"]
    lines.append(f"  ended by {counts(summary.terminations)}")
    if summary.out_of_time >= _MANY * summary.episodes and summary.out_of_time:
        lines.append(
            f"  warning: {summary.out_of_time} of {summary.episodes} episodes ran out of time while they waited for "
            "the model: their grades say how fast it is served here, not what it can do. Give agents more time "
            "(-o agent_timeout=SECONDS), or lower the concurrency"
        )
    lines.append(
        f"  turns {summary.turns}  tokens: prompt {summary.prompt_tokens} (cached {summary.cached_tokens}), "
        f"completion {summary.completion_tokens}"
    )
    if (speeds := summary.tokens_per_second) is not None:
        lines.append(
            f"  tokens/s: prompt {number(speeds['prompt'])} (cached {number(speeds['cached'])}), "
            f"sampled {number(speeds['sampled'])}, over {duration(summary.wall_seconds)}"
        )
    if summary.seconds:
        each = [f"{phase} {number(seconds / summary.episodes)}" for phase, seconds in summary.seconds.items()]
        lines.append(f"  seconds an episode: {', '.join(each)}")
    for reason, detail in summary.because.items():
        lines += _because(reason, detail)
    if summary.flags:
        lines.append(f"  flags: {counts(summary.flags)}")
    if summary.slowest:
        slowest = [f"{slow.task} {duration(slow.seconds)} ({slow.termination})" for slow in summary.slowest]
        lines.append(f"  slowest: {listed(slowest, 3)}")
    return lines


def _because(reason: str, detail: str) -> Iterator[str]:
    """What went wrong, on one line where it fits; otherwise what it is about and its last lines, which say why."""
    whole = " ".join(detail.split())
    if len(whole) <= _WIDTH:
        yield f"  {reason}, such as {printable(whole)}"
        return
    first, *others = (line.rstrip() for line in detail.splitlines() if line.strip())
    yield f"  {reason}, such as {printable(excerpt(first, _WIDTH))}"
    if len(others) > _LAST_LINES:
        yield f"    [... {len(others) - _LAST_LINES} lines left out; runs show --task has more ...]"
    yield from (f"    | {printable(excerpt(line, _WIDTH))}" for line in others[-_LAST_LINES:])


def _online(counted: Mapping[str, int], *, trains: bool) -> str:
    text = (
        f"sessions {counted['sessions']}, {counted['sessions_open']} of them open; "
        f"episodes {counted['episodes']}, {counted['going_on']} going on, {counted['rewarded']} rewarded"
    )
    if trains:
        aside = f", {counted['set_aside']} set aside" if counted["set_aside"] else ""
        text += f"\n  {counted['trained']} trained on, {counted['waiting']} wait for an update{aside}"
    return text


def _files(report: RunReport) -> list[str]:
    found = {"model": report.checkpoint, "plot": report.plot, "log": report.log}
    missing = [MISSING] if report.training and report.plot is None and not can_plot() else []
    return [*(f"{name}: {path}" for name, path in found.items() if path), *missing]
