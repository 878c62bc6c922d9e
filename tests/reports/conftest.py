"""Small runs with everything a report can show."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from rl_harness.records import Episode
from rl_harness.runs import Run, open_run
from rl_harness.runs.config import PluginChoice, RunConfig
from rl_harness.testing.records import a_conversation, an_episode

STEP = {
    "reward": 0.25,
    "pass_rate": 0.25,
    "unscored": 0.0,
    "loss": -0.01,
    "kl": 0.002,
    "entropy": 0.4,
    "clip_fraction": 0.05,
    "grad_norm": 1.25,
    "logp_gap": 0.015,
    "groups_partial": 0.0,
    "sampled_tokens": 900.0,
    "seconds_rollout": 10.0,
    "tokens": 1300.0,
    "seconds_train": 6.5,
}


@pytest.fixture
def phase() -> Callable[..., list[Episode]]:
    """Episodes of a phase, one a task, with these rewards."""

    def make(name: str, rewards: Sequence[float | None], *, step: int = 0, digest: str = "sha256:0") -> list[Episode]:
        return [
            an_episode(f"task-{i}", reward, phase=name, step=step, digest=digest) for i, reward in enumerate(rewards)
        ]

    return make


@pytest.fixture
def record() -> Callable[[Run, Sequence[Episode]], None]:
    """Store episodes in a run."""

    def store(run: Run, episodes: Sequence[Episode]) -> None:
        async def add() -> None:
            for episode in episodes:
                await run.store.add_episode(episode, a_conversation(1))

        asyncio.run(add())

    return store


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return RunConfig(runs_dir=tmp_path / "runs", benchmark=PluginChoice(name="bench"), model="model")


@pytest.fixture
def evaluated(config, phase, record) -> Path:
    """An evaluation: 3 of 8 passed, 2 unscored."""
    with open_run(config, {}) as run:
        record(run, phase("evaluate", [1.0] * 3 + [0.0] * 5 + [None] * 2))
        run.close("done")
    return run.path


@pytest.fixture
def trained(config, phase, record) -> Path:
    """A training run of three steps: 2 of 20 passed before, 18 after; greedy 10 and 19."""
    config = config.model_copy(update={"trainer": PluginChoice(name="grpo")})
    with open_run(config, {}) as run:
        record(run, phase("before", [1.0] * 2 + [0.0] * 18))
        record(run, phase("before-greedy", [1.0] * 10 + [0.0] * 10))
        for step in range(3):
            record(run, phase("train", [1.0] * (step + 1) + [0.0] * (3 - step), step=step))
            run.store.add_metrics("train", step, {**STEP, "pass_rate": 0.25 * (step + 1), "reward": 0.25 * (step + 1)})
        record(run, phase("step-2", [1.0] * 12 + [0.0] * 8))
        record(run, phase("after", [1.0] * 18 + [0.0] * 1 + [None]))
        record(run, phase("after-greedy", [1.0] * 19 + [0.0] * 1))
        run.close("done")
    return run.path
