"""Comparing two runs on the tasks they share: same name, same digest. What is not shared is said, never mixed in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rl_harness.errors import RunError
from rl_harness.records import Episode
from rl_harness.reports.difference import Difference, by_task, digests, paired_difference
from rl_harness.reports.run_report import GREEDY, TRAIN
from rl_harness.reports.summary import Summary, summarise
from rl_harness.reports.tables import Table, listed, rate, text_of
from rl_harness.reports.text import unscored
from rl_harness.runs.info import DATABASE, differences, read_config, read_info
from rl_harness.runs.store import reading


class ComparedPhase(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation of each run, both summarised over the ``shared`` tasks only.

    ``difference`` is second minus first, None when no shared task is scored on both sides.
    """

    first_phase: str
    second_phase: str
    shared: int
    changed: tuple[str, ...]
    only_first: int
    only_second: int
    first: Summary
    second: Summary
    difference: Difference | None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """``settings`` maps each configuration key that differs to the values of the first and the second run."""

    first: str
    second: str
    settings: dict[str, tuple[Any, Any]]
    phases: tuple[ComparedPhase, ...]


def compare_runs(first: Path, second: Path) -> Comparison:
    """Compare evaluations of equal name or, where none has an equal, the last sampled evaluation of each run.

    Raises :class:`~rl_harness.errors.RunError` when the runs share no task of the same digest.
    """
    left, right = _evaluations(first), _evaluations(second)
    names = [(name, name) for name in left if name in right] or [(_last(left), _last(right))]
    phases = [_compare(a, b, left[a], right[b]) for a, b in names]
    if not any(phase.shared for phase in phases):
        changed = phases[0].changed
        reason = f"{len(changed)} have the same name but other contents" if changed else "no name occurs in both"
        raise RunError(
            f"{first} and {second}: no task in common ({reason})",
            remedy="compare runs of the same benchmark, version and split",
        )
    return Comparison(
        first=str(first),
        second=str(second),
        settings=differences(read_config(first), read_config(second)),
        phases=tuple(phase for phase in phases if phase.shared),
    )


def comparison_text(comparison: Comparison) -> str:
    """``runs compare`` in plain characters."""
    parts = [f"first:  {comparison.first}\nsecond: {comparison.second}"]
    if comparison.settings:
        settings = tuple((key, str(a), str(b)) for key, (a, b) in comparison.settings.items())
        parts.append(text_of(Table(title="Settings that differ", columns=("", "first", "second"), rows=settings)))
    rows = tuple(
        (
            phase.first_phase
            if phase.first_phase == phase.second_phase
            else f"{phase.first_phase}, {phase.second_phase}",
            str(phase.shared),
            rate(phase.first.pass_rate, phase.first.low, phase.first.high),
            rate(phase.second.pass_rate, phase.second.low, phase.second.high),
            rate(d.value, d.low, d.high, sign=True) if (d := phase.difference) else "-",
            f"{unscored(phase.first)}, {unscored(phase.second)}",
        )
        for phase in comparison.phases
    )
    columns = ("", "tasks", "first", "second", "change, task by task", "unscored")
    parts.append(text_of(Table(title="Pass rate with 95 % interval", columns=columns, rows=rows)))
    parts += ["\n".join(lines) for phase in comparison.phases if (lines := list(_notes(phase)))]
    return "\n\n".join(parts)


def _evaluations(path: Path) -> dict[str, list[Episode]]:
    """Phase name to its episodes, of the phases that are evaluations."""
    read_info(path)
    phases: dict[str, list[Episode]] = {}
    with reading(path / DATABASE) as store:
        for episode in store.episodes():
            if episode.key.phase != TRAIN:
                phases.setdefault(episode.key.phase, []).append(episode)
    if not phases:
        raise RunError(f"{path}: nothing was evaluated yet")
    return phases


def _last(phases: dict[str, list[Episode]]) -> str:
    sampled = [name for name in phases if not name.endswith(GREEDY)]
    return (sampled or list(phases))[-1]


def _compare(first_phase: str, second_phase: str, first: Sequence[Episode], second: Sequence[Episode]) -> ComparedPhase:
    left, right = by_task(first), by_task(second)
    common = [task for task in left if task in right]
    shared = [task for task in common if digests(left[task]) == digests(right[task])]
    return ComparedPhase(
        first_phase=first_phase,
        second_phase=second_phase,
        shared=len(shared),
        changed=tuple(task[1] for task in common if task not in set(shared)),
        only_first=len(left) - len(common),
        only_second=len(right) - len(common),
        first=summarise(episode for task in shared for episode in left[task]),
        second=summarise(episode for task in shared for episode in right[task]),
        difference=paired_difference(first, second),
    )


def _notes(phase: ComparedPhase) -> Iterator[str]:
    if phase.changed:
        yield f"left out, same name but other contents: {listed(phase.changed)}"
    if phase.only_first or phase.only_second:
        yield f"left out, in one run only: {phase.only_first} in the first, {phase.only_second} in the second"
    if phase.difference:
        if phase.difference.unscored:
            yield f"left out of the change, unscored in a run: {phase.difference.unscored} tasks"
        if phase.difference.gained:
            yield f"gained: {listed(phase.difference.gained)}"
        if phase.difference.lost:
            yield f"lost: {listed(phase.difference.lost)}"
