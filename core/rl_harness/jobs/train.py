"""The training job: evaluate, then sample groups, learn, update the weights, and evaluate again. Synchronous.

Crash safety: every episode is on disk before it is reported; a step is reported after its checkpoint is complete.
A step that was cut off is taken again from the episodes it already has, which the checkpoint's weights sampled.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec

from rl_harness.contracts import Algorithm
from rl_harness.jobs.assembly import Assembly, TaskSource, assembled
from rl_harness.jobs.evaluate import sampling_params
from rl_harness.jobs.learner import Learner, check_algorithm
from rl_harness.jobs.model import model_identity
from rl_harness.jobs.outcome import Outcome, Status
from rl_harness.jobs.phases import Phase, expect_phase, is_complete, run_phase
from rl_harness.jobs.stop import StopSignal
from rl_harness.plugins import Registry
from rl_harness.records import Episode, Group
from rl_harness.reports import Summary, View, summarise, write_plot
from rl_harness.runs import Run, open_run
from rl_harness.runs.config import RunConfig
from rl_harness.tasks import Task


async def train(
    config: RunConfig, registry: Registry, view: View, *, fresh: bool = False, stop: StopSignal | None = None
) -> Outcome:
    """Train the model behind the harness. Continues an interrupted run of the same configuration."""
    stop = stop or StopSignal()
    with stop.installed():
        source = TaskSource.of(registry, config)
        await source.preflight()
        pool = tuple(await source.tasks(config.training.split, limit=None, seed=config.seed))
        heldout = tuple(await source.tasks(config.evaluation.split, limit=config.evaluation.limit, seed=config.seed))
        async with assembled(config, registry, source, (*pool, *heldout)) as parts:
            algorithm = registry.create("algorithms", config.trainer.name, config.trainer.plugin_options)
            assert isinstance(algorithm, Algorithm)
            assert parts.backend is not None
            await algorithm.preflight()
            check_algorithm(
                algorithm,
                parts.backend,
                group_size=config.training.group_size,
                sampling=sampling_params(config.sampling),
            )
            inputs = {
                "tasks": {task.name: task.digest for task in (*pool, *heldout)},
                "plugins": registry.versions(),
                **model_identity(config.model),
            }
            with open_run(config, inputs, fresh=fresh) as run:
                view.start(f"{source.name}: train {config.trainer.name}", run)
                if shared := {task.name for task in pool} & {task.name for task in heldout}:
                    view.note(f"{len(shared)} of {len(heldout)} tasks that are evaluated are also trained on")
                await parts.start(run, view.note)
                parts.remember_model(run)
                outcome = await _Training(parts, algorithm, run, view, pool, heldout, stop).run_all()
                run.close(outcome.status)
                view.finish(outcome)
    return outcome


class _Training:
    """The state of one training run between its steps."""

    def __init__(
        self,
        parts: Assembly,
        algorithm: Algorithm,
        run: Run,
        view: View,
        pool: tuple[Task, ...],
        heldout: tuple[Task, ...],
        stop: StopSignal,
    ) -> None:
        self.parts, self.run, self.view = parts, run, view
        self.config = parts.config
        self.learner = Learner(parts, algorithm, run, view)
        self.pool, self.heldout, self.stop = pool, heldout, stop
        self.evaluations: dict[str, Summary] = {}
        self.complete = True

    async def run_all(self) -> Outcome:
        step = await self.learner.start()
        await self._evaluate("before")
        while self.complete and not self.stop.requested:
            await self._evaluate_in_between(step)
            if step >= self.config.training.steps or self._saturated(step):
                break
            await self._step(step)
            step += self.complete
        if self.complete and not self.stop.requested:
            await self._evaluate("after")
        latest = self.run.checkpoints.latest()
        return Outcome(
            run=self.run.path,
            status=self._status(),
            resumed=self.run.resumed,
            evaluations=self.evaluations,
            steps=step,
            model=latest[1] if latest else None,
            plot=write_plot(self.run.path),
        )

    def _status(self) -> Status:
        if "after" not in self.evaluations or not self.complete:
            return "interrupted"
        return "done" if all(summary.scored for summary in self.evaluations.values()) else "failed"

    async def _evaluate(self, name: str) -> None:
        """Run (or, where all of it is on record, recall) one evaluation."""
        for phase in self._evaluation_phases(name):
            episodes = await run_phase(phase, self.parts, self.run, self.view, self.stop)
            self.complete = is_complete(phase, episodes, self.config.retries)
            if not self.complete:
                return
            self.evaluations[phase.name] = summarise(episodes)

    async def _evaluate_in_between(self, step: int) -> None:
        """The evaluation due at this step, and for the outcome those of earlier ones."""
        every = self.config.evaluation.every
        if every and step < self.config.training.steps:
            for due in range(every, step + 1, every):
                await self._evaluate(f"step-{due}")

    def _evaluation_phases(self, name: str) -> list[Phase]:
        evaluation, sampling = self.config.evaluation, self.config.sampling
        sampled = Phase(
            name=name,
            split=self.parts.source.split(evaluation.split),
            tasks=self.heldout,
            samples=1,
            sampling=sampling_params(sampling),
        )
        if not evaluation.greedy:
            return [sampled]
        greedy = sampling_params(sampling, temperature=0)
        return [sampled, msgspec.structs.replace(sampled, name=f"{name}-greedy", sampling=greedy)]

    async def _step(self, step: int) -> None:
        started = time.perf_counter()
        phase = self._sampling(step)
        episodes = await run_phase(phase, self.parts, self.run, self.view, self.stop)
        self.complete = is_complete(phase, episodes, self.config.retries)
        if not self.complete:
            return
        sampled = time.perf_counter()
        self._look_ahead(step + 1)
        metrics = {**_rollout_metrics(episodes), "seconds_rollout": sampled - started}
        await self.learner.step(step, self._groups(phase, episodes), metrics)

    def _sampling(self, step: int) -> Phase:
        return Phase(
            name="train",
            split=self.parts.source.split(self.config.training.split),
            tasks=self._tasks_of(step),
            samples=self.config.training.group_size,
            sampling=sampling_params(self.config.sampling),
            step=step,
        )

    def _look_ahead(self, step: int) -> None:
        """While the model learns, have the sandboxes of the next step's first episodes made ready."""
        every = self.config.evaluation.every
        if step < self.config.training.steps and not (every and step % every == 0):
            expect_phase(self._sampling(step), self.parts, self.run)

    def _tasks_of(self, step: int) -> tuple[Task, ...]:
        """The step's tasks: the pool in its seeded order, round and round."""
        count = min(self.config.training.tasks_per_step, len(self.pool))
        return tuple(self.pool[(step * count + i) % len(self.pool)] for i in range(count))

    def _groups(self, phase: Phase, episodes: list[Episode]) -> list[Group]:
        """Scored episodes by task; what may not be trained on is left out, so that the group is partial."""
        groups = []
        for task in phase.tasks:
            members = [e for e in episodes if e.key.task == task.name and self._trainable(e, task)]
            if members:
                turns = tuple(tuple(self.run.store.turns(e.id)) for e in members)
                groups.append(
                    Group(id=members[0].key.group(), expected=phase.samples, episodes=tuple(members), turns=turns)
                )
        return groups

    def _trainable(self, episode: Episode, task: Task) -> bool:
        tampered = "tampered" in episode.flags
        return episode.unscored is None and (not tampered or task.allow_tampered or self.config.training.allow_tampered)

    def _saturated(self, step: int) -> bool:
        """Two steps in a row whose pass rate reached the threshold: more training only narrows the policy."""
        threshold = self.config.training.stop_at_pass_rate
        if threshold is None or step < 2:
            return False
        rates = [metrics["pass_rate"] for metrics in self.run.store.metrics("train")[-2:]]
        if min(rates) < threshold:
            return False
        self.view.note(f"stopping after step {step}: the last two steps passed {rates[0]:.0%} and {rates[1]:.0%}")
        return True


def _rollout_metrics(episodes: list[Episode]) -> Mapping[str, float]:
    summary = summarise(episodes)
    tokens = sum(episode.usage.completion_tokens for episode in episodes)
    return {
        "reward": summary.reward_mean or 0.0,
        "pass_rate": summary.pass_rate or 0.0,
        "scored": summary.scored,
        "unscored": summary.unscored_total,
        "sampled_tokens": tokens,
    }
