"""A phase: a planned set of episodes of a run. Both jobs are made of phases; resuming fills the gaps of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from rl_harness.jobs.assembly import Assembly
from rl_harness.records import Episode, EpisodeKey, SamplingParams, Turn
from rl_harness.records.seeds import derive_seed
from rl_harness.reports import View
from rl_harness.rollout import Attempt, run_attempts
from rl_harness.runs import Run
from rl_harness.tasks import Task


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """``samples`` episodes of each task, all sampled alike. ``name`` and ``step`` make it unique in its run."""

    name: str
    split: str
    tasks: tuple[Task, ...]
    samples: int
    sampling: SamplingParams
    step: int = 0

    def planned(self) -> Iterator[tuple[EpisodeKey, Task]]:
        for task in self.tasks:
            for sample in range(self.samples):
                yield EpisodeKey(phase=self.name, step=self.step, task=task.name, sample=sample), task


def is_complete(phase: Phase, episodes: Sequence[Episode], retries: int) -> bool:
    """Whether nothing is left to do: every episode is scored, or has used up its retries."""
    settled = {e.key for e in episodes if e.unscored is None or e.attempt > retries}
    return all(key in settled for key, _ in phase.planned())


async def run_phase(
    phase: Phase, parts: Assembly, run: Run, view: View, stopping: Callable[[], bool], *, again: bool = False
) -> list[Episode]:
    """Run the episodes of a phase that are not on record yet; return those that count, one a key.

    With ``again``, episodes that stayed unscored after all their attempts get as many once more. When
    ``stopping()`` the list may be shorter than planned.
    """
    config = parts.config
    counted = {episode.key: episode for episode in run.store.episodes(phase=phase.name, step=phase.step)}
    last = 1 + config.retries
    todo: list[Attempt] = []
    for key, task in phase.planned():
        earlier = counted.get(key)
        if earlier is not None and (earlier.unscored is None or (earlier.attempt >= last and not again)):
            continue
        number = earlier.attempt + 1 if earlier is not None else 1
        sampling = msgspec.structs.replace(phase.sampling, seed=derive_seed(config.seed, str(key).encode(), number))
        todo.append(Attempt(key=key, task=task, split=phase.split, sampling=sampling, number=number))
    if not todo:
        return in_plan_order(phase, list(counted.values()))
    view.phase(_title(phase), len(todo))
    runner = parts.runner(run)
    parts.expect(runner, [attempt.task for attempt in todo])

    async def sink(episode: Episode, turns: list[Turn]) -> None:
        await run.store.add_episode(episode, turns)
        view.episode(episode)

    def stop() -> bool:
        if stopping():
            parts.expect(runner, ())
            return True
        return False

    try:
        await run_attempts(
            runner, todo, concurrency=config.concurrency, retries=config.retries, sink=sink, stopping=stop
        )
    finally:
        parts.record_supply(run)
    return in_plan_order(phase, run.store.episodes(phase=phase.name, step=phase.step))


def expect_phase(phase: Phase, parts: Assembly, run: Run) -> None:
    """Have sandboxes made ready for a phase that will run next."""
    parts.expect(parts.runner(run), [task for _, task in phase.planned()])


def in_plan_order(phase: Phase, episodes: Sequence[Episode]) -> list[Episode]:
    """The counted episodes in the order they were planned, whatever order they ended in."""
    by_key = {episode.key: episode for episode in episodes}
    return [by_key[key] for key, _ in phase.planned() if key in by_key]


def _title(phase: Phase) -> str:
    return f"{phase.name} step {phase.step}" if phase.step or phase.name == "train" else phase.name
