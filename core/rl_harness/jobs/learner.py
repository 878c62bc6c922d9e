"""The part of training that is the same wherever episodes come from: groups in, an updated policy that serves, a
checkpoint and a record of the step out.

Crash safety: a step is on record after its checkpoint is complete. One that was cut off is taken again, from what the
previous checkpoint, the algorithm's state included, holds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rl_harness.contracts import Algorithm, Backend, Learned, LossSpec, OptimizerSpec, TokenEngine
from rl_harness.errors import BackendError
from rl_harness.jobs.model import ModelParts, transport
from rl_harness.learning import check_loss
from rl_harness.records import Group, Sample, SamplingParams, logps
from rl_harness.reports import View, gap_warning
from rl_harness.runs import Run

_log = logging.getLogger(__name__)

#: The keys of the run's state that hold how many steps are done, and what the algorithm carries from one to the next.
STEPS, ALGORITHM = "steps", "algorithm"


def check_algorithm(algorithm: Algorithm, backend: Backend, *, group_size: int, sampling: SamplingParams) -> None:
    """Refuse what cannot be learned from, or what the backend cannot compute."""
    algorithm.check(group_size=group_size, sampling=sampling)
    check_loss(algorithm.loss(), backend.capabilities)


class Learner:
    """One policy in training: the backend that learns and the replicas that serve what it learned."""

    def __init__(self, parts: ModelParts, algorithm: Algorithm, run: Run, view: View) -> None:
        assert parts.backend is not None
        assert isinstance(parts.engine, TokenEngine)
        self._parts = parts
        self._backend: Backend = parts.backend
        self._algorithm = algorithm
        self._run = run
        self._view = view
        self._transport = transport(parts.engine, parts.backend)
        self._loss: LossSpec = algorithm.loss()

    @property
    def version(self) -> int:
        """The policy version in training; steps without signal do not count."""
        return self._backend.version()

    async def works(self) -> bool:
        """Whether the backend is there: if so, what it refused is to blame for a failure."""
        try:
            source = await self._backend.weights(self._transport)
            await source.release()
        except BackendError:
            return False
        return True

    async def start(self) -> int:
        """Load the model, or the newest checkpoint, into the backend and from there into the engine; how many steps are
        done. Also of the model as it is: what is in the way of new weights is found before anything is learned, and
        the memory for them is there when somebody waits for the first."""
        assert self._parts.model is not None
        training = self._parts.config.training
        optimizer = OptimizerSpec(
            learning_rate=training.learning_rate,
            weight_decay=training.weight_decay,
            warmup_steps=training.warmup_steps,
            max_grad_norm=training.max_grad_norm,
        )
        await self._backend.start(str(self._parts.model.path), optimizer, seed=self._parts.config.seed)
        return await self._restore()

    async def _restore(self) -> int:
        """A step without signal updates nothing and leaves no checkpoint, so the count, and with it what the algorithm
        carries on, is kept beside them."""
        store = self._run.store
        done = int(store.get_state(STEPS) or 0)
        carried: dict[str, Any] | None = store.get_state(ALGORITHM)
        latest = self._run.checkpoints.latest()
        if latest is not None:
            step, path = latest
            await self._backend.load(path)
            if step > done:  # it was cut off between these two
                done, carried = step, self._run.checkpoints.state(step).get(ALGORITHM)
        await self._serve_weights()
        if carried:
            self._algorithm.restore(carried)
        if self._run.resumed:
            self._view.note(f"continuing after step {done}")
        return done

    async def step(
        self, step: int, groups: Sequence[Group], metrics: Mapping[str, float], *, max_staleness: int | None = None
    ) -> None:
        """Learn from these groups. ``metrics`` are those of how the groups came about. Tokens that are more than
        ``max_staleness`` versions old count for the statistics of their groups and are not trained on."""
        began = time.perf_counter()
        learned = await asyncio.to_thread(self._algorithm.learn, groups)
        told = {**metrics, **learned.metrics, "seconds_advantages": time.perf_counter() - began}
        if max_staleness is not None:
            samples = without_old(learned.samples, self.version, max_staleness)
            told["turns_too_old"] = sum(new is not old for new, old in zip(samples, learned.samples, strict=True))
            trained = any(sample.weight.any() for sample in samples)
            learned = Learned(samples=tuple(samples) if trained else (), metrics=learned.metrics)
        if learned.samples:
            told |= await self._update(step, learned)
        self._run.store.add_metrics("train", step, told)
        carried = {ALGORITHM: dict(self._algorithm.state())}
        if learned.samples:
            await self._run.checkpoints.commit(step + 1, carried)
            await asyncio.to_thread(self._run.checkpoints.prune, self._parts.config.training.keep_checkpoints)
        self._run.store.set_states({STEPS: step + 1, **carried})
        self._view.step(step, told)
        if warning := gap_warning(step, told):
            _log.warning("%s", warning)
            self._view.note(warning)

    async def _update(self, step: int, learned: Learned) -> dict[str, float]:
        """One optimizer step, the weights moved to the engine, and a checkpoint (not yet committed): who waits for the
        new weights does not wait for the disk."""
        began = time.perf_counter()
        result = await self._backend.train_step(learned.samples, self._loss)
        trained = time.perf_counter()
        moved = await self._serve_weights()
        serving = time.perf_counter()
        self._run.store.add_samples(step, learned.samples)
        await self._backend.save(self._run.checkpoints.path(step + 1), optimizer=True)
        seconds = {
            "seconds_train": trained - began,
            "seconds_weights": serving - trained,
            "seconds_checkpoint": time.perf_counter() - serving,
        }
        return {**result.metrics, **seconds, **moved}

    async def _serve_weights(self) -> dict[str, float]:
        """Move the backend's weights into every replica; the seconds of each part of that."""
        assert self._parts.replicas is not None
        began = time.perf_counter()
        source = await self._backend.weights(self._transport)
        given = time.perf_counter()
        try:
            seconds = await self._parts.replicas.update(source, source.manifest.version)
        finally:
            await source.release()
        return {
            "seconds_weights_export": given - began,
            "seconds_weights_prepare": seconds.prepare,
            "seconds_weights_commit": seconds.commit,
        }


def without_old(samples: Sequence[Sample], version: int, limit: int) -> list[Sample]:
    """The samples, with tokens that were sampled more than ``limit`` versions before ``version`` masked."""
    kept = []
    for sample in samples:
        young = version - sample.versions <= limit
        if not young.all():
            sample = msgspec.structs.replace(
                sample, mask=logps(sample.mask * young), weight=logps(sample.weight * young)
            )
        kept.append(sample)
    return kept
