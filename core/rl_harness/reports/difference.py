"""The difference between two evaluations of the same tasks, paired task by task."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rl_harness.records import Episode
from rl_harness.reports.statistics import bootstrap_mean
from rl_harness.reports.summary import passes

TaskId = tuple[str, str]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """``second`` minus ``first``: mean over ``tasks`` of the difference in the task's pass rate.

    ``low`` and ``high`` bound it at 95 % (percentile bootstrap over tasks, seeded), None where that does not vary. Only
    tasks of one name and digest that are scored on both sides are compared; the others are counted: ``changed``
    have another digest, ``unscored`` lack a score on a side, ``only_first`` and ``only_second`` are on one side.
    ``gained`` and ``lost`` name the tasks whose pass rate went up and down.
    """

    value: float
    low: float | None
    high: float | None
    tasks: int
    changed: tuple[str, ...]
    unscored: int
    only_first: int
    only_second: int
    gained: tuple[str, ...]
    lost: tuple[str, ...]


def paired_difference(first: Sequence[Episode], second: Sequence[Episode], *, seed: int = 0) -> Difference | None:
    """None when no task can be compared."""
    left, right = by_task(first), by_task(second)
    common = sorted(task for task in left if task in right)
    same = [task for task in common if digests(left[task]) == digests(right[task])]
    pairs = {task: (_pass_rate(left[task]), _pass_rate(right[task])) for task in same}
    gains = {task: b - a for task, (a, b) in pairs.items() if a is not None and b is not None}
    if not gains:
        return None
    values = list(gains.values())
    interval = bootstrap_mean(values, [1] * len(values), seed=seed)
    return Difference(
        value=sum(values) / len(values),
        low=interval.low if interval else None,
        high=interval.high if interval else None,
        tasks=len(gains),
        changed=tuple(task[1] for task in common if task not in pairs),
        unscored=len(same) - len(gains),
        only_first=len(left) - len(common),
        only_second=len(right) - len(common),
        gained=tuple(task[1] for task, gain in gains.items() if gain > 0),
        lost=tuple(task[1] for task, gain in gains.items() if gain < 0),
    )


def by_task(episodes: Sequence[Episode]) -> dict[TaskId, list[Episode]]:
    """Benchmark and name to the episodes of that task."""
    tasks: dict[TaskId, list[Episode]] = {}
    for episode in episodes:
        tasks.setdefault((episode.task.benchmark, episode.task.name), []).append(episode)
    return tasks


def digests(episodes: Sequence[Episode]) -> set[str]:
    return {episode.task.digest for episode in episodes}


def _pass_rate(episodes: Sequence[Episode]) -> float | None:
    scored = [episode for episode in episodes if episode.reward is not None]
    return sum(passes(episode) for episode in scored) / len(scored) if scored else None
