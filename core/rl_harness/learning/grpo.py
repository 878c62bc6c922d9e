"""GRPO and its family: group-relative advantages and a clipped importance-weighted objective.

Options cover GRPO (DeepSeekMath, arXiv 2402.03300), the asymmetric clip of DAPO (arXiv 2503.14476), the
unnormalised variant Dr. GRPO (arXiv 2503.20783) and the sequence-level ratio of GSPO (arXiv 2507.18071).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from rl_harness.contracts import common
from rl_harness.contracts.algorithm import Algorithm, Learned, Loss, LossResult
from rl_harness.contracts.backend import LossSpec
from rl_harness.errors import UsageError
from rl_harness.learning.advantages import group_advantages
from rl_harness.learning.aggregation import Aggregate, weighted
from rl_harness.learning.samples import check_sampling, samples_of
from rl_harness.records.arrays import LogpArray
from rl_harness.records.sample import Group, Sample, TokenBatch
from rl_harness.records.turn import SamplingParams

Unit = Literal["token", "turn", "episode"]


class ClippedOptions(common.Options):
    """Options of the clipped objective, whatever its advantages are relative to."""

    clip: float = Field(0.2, gt=0, lt=1, description="the ratio is clipped below 1-clip (and above 1+clip)")
    clip_high: float | None = Field(None, gt=0, description="clip above 1+clip_high instead (DAPO); unset is clip")
    kl: float = Field(0.0, ge=0, description="coefficient of the KL penalty to the model as loaded")
    gamma: float = Field(1.0, gt=0, le=1, description="discount a turn, along each turn's own path")
    aggregate: Aggregate = Field("episode", description="the unit the loss is a mean over; constant is Dr. GRPO's")
    constant: int | None = Field(None, ge=1, description="tokens an episode is divided by with aggregate=constant")
    ratio: Unit = Field(
        "token", description="unit of the importance ratio: turn and episode are GSPO's, which wants a clip near 0.0004"
    )

    @model_validator(mode="after")
    def _constant_goes_with_aggregate(self) -> ClippedOptions:
        if (self.aggregate == "constant") != (self.constant is not None):
            raise ValueError("aggregate='constant' and constant=TOKENS go together")
        return self

    def loss(self) -> LossSpec:
        """The objective with these options."""
        high = self.clip if self.clip_high is None else self.clip_high
        return LossSpec(
            target="rl_harness.learning.grpo:GRPOLoss",
            options={"clip_low": self.clip, "clip_high": high, "kl": self.kl, "ratio": self.ratio},
        )


class GRPOOptions(ClippedOptions):
    normalise_std: bool = Field(True, description="divide advantages by the group's standard deviation")


class GRPO(Algorithm):
    api = common.API
    Options = GRPOOptions

    def __init__(self, options: GRPOOptions) -> None:
        self.options = options

    def check(self, *, group_size: int, sampling: SamplingParams) -> None:
        check_sampling(sampling)
        if group_size < 2:
            raise UsageError(
                f"GRPO compares the episodes of a group, and a group of {group_size} has nothing to compare",
                remedy="set training.group_size to at least 2",
            )

    def learn(self, groups: Sequence[Group]) -> Learned:
        """Samples of the groups whose rewards differ; the others give no signal, are left out and counted.

        Statistics of a partial group are those of the episodes it has. Raises ``UsageError`` for groups that
        were planned with one episode: they never have an advantage.
        """
        options = self.options
        samples: list[Sample] = []
        trained = single = silent = 0
        for group in groups:
            _check_group(group)
            if len(group.episodes) < 2:
                single += 1
                continue
            rewards = [_reward_of(group, i) for i in range(len(group.episodes))]
            advantages = group_advantages(rewards, normalise_std=options.normalise_std)
            if advantages is None:
                silent += 1
                continue
            trained += 1
            for episode, turns, advantage in zip(group.episodes, group.turns, advantages, strict=True):
                samples += samples_of(episode, turns, group=group.id, advantage=float(advantage), gamma=options.gamma)
        samples = weighted(samples, options.aggregate, options.constant)
        every_reward = [episode.reward for group in groups for episode in group.episodes if episode.reward is not None]
        metrics: dict[str, float] = {
            "groups": len(groups),
            "groups_trained": trained,
            "groups_no_signal": silent,
            "groups_single": single,
            "groups_partial": sum(group.partial for group in groups),
            "episodes": len(every_reward),
            "episodes_missing": sum(group.expected - len(group.episodes) for group in groups if group.partial),
            **sample_metrics(samples, groups),
        }
        if every_reward:
            metrics["reward"] = float(np.mean(every_reward))
        return Learned(samples=tuple(samples), metrics=metrics)

    def loss(self) -> LossSpec:
        return self.options.loss()


class GRPOLoss(Loss):
    """-Σ w min(r A, clip(r, 1-clip_low, 1+clip_high) A) + kl Σ w k3, over trained tokens.

    r is the importance ratio of the current policy to the one that sampled, whose log-probs were recorded by the
    engine: a token's, or the geometric mean over the tokens of its turn or episode (GSPO). k3 is Schulman's
    estimator of the KL divergence to the reference, exp(ref - logp) - (ref - logp) - 1 (Schulman 2020,
    "Approximating KL divergence"), which is unbiased and never negative.
    """

    def __init__(self, *, clip_low: float, clip_high: float, kl: float = 0.0, ratio: Unit = "token") -> None:
        self.clip_low = clip_low
        self.clip_high = clip_high
        self.kl = kl
        self.unit = ratio
        self.needs = frozenset({"logp", "ref_logp"} if kl > 0 else {"logp"})

    def __call__(self, outputs: Mapping[str, LogpArray], batch: TokenBatch) -> LossResult:
        logp = outputs["logp"].astype(np.float64)
        weight = (batch.weight * batch.mask).astype(np.float64)
        advantage = batch.advantage.astype(np.float64)
        gap = np.where(batch.mask > 0, logp - batch.behaviour_logps, 0.0)

        log_ratio = self._spread(gap, batch)
        ratio = np.exp(log_ratio)
        low, high = 1.0 - self.clip_low, 1.0 + self.clip_high
        clipped_low = (ratio < low) & (advantage < 0)
        clipped_high = (ratio > high) & (advantage > 0)
        active = ~(clipped_low | clipped_high)
        surrogate = np.where(active, ratio, np.where(clipped_low, low, high)) * advantage
        value = -float(weight @ surrogate)
        grad = self._gather(-weight * np.where(active, ratio, 0.0) * advantage, batch)

        behaviour_kl = np.expm1(gap) - gap  # k3 of KL(sampler || trainer), on the sampler's own samples
        sums = {
            "ratio": float(weight @ ratio),
            "clip_fraction": float(weight @ ~active),
            "clip_fraction_low": float(weight @ clipped_low),
            "clip_fraction_high": float(weight @ clipped_high),
            "logp_gap": float(weight @ np.abs(gap)),
            "kl_sampler": float(weight @ behaviour_kl),
            "advantage": float(weight @ advantage),
        }
        if self.kl > 0:
            away = np.where(batch.mask > 0, outputs["ref_logp"].astype(np.float64) - logp, 0.0)
            reference_kl = np.expm1(away) - away
            value += self.kl * float(weight @ reference_kl)
            grad += self.kl * weight * -np.expm1(away)
            sums["kl"] = float(weight @ reference_kl)
        return LossResult(
            value=value,
            grads={"logp": grad.astype(outputs["logp"].dtype)},
            sums=sums,
            maxima={"logp_gap_max": float(np.abs(gap).max(initial=0.0))},
        )

    def _spread(self, gap: NDArray[np.float64], batch: TokenBatch) -> NDArray[np.float64]:
        """Each token's log ratio: its own, or the mean over the trained tokens of its unit."""
        if self.unit == "token":
            return gap
        unit, trained = self._units(batch)
        return (np.bincount(unit, weights=gap) / trained)[unit]

    def _gather(self, grad: NDArray[np.float64], batch: TokenBatch) -> NDArray[np.float64]:
        """Transpose of :meth:`_spread`: d loss/d log ratio to d loss/d logp."""
        if self.unit == "token":
            return grad
        unit, trained = self._units(batch)
        return (np.bincount(unit, weights=grad) / trained)[unit] * (batch.mask > 0)

    def _units(self, batch: TokenBatch) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        unit = batch.sample if self.unit == "turn" else batch.episode
        return unit, np.maximum(np.bincount(unit, weights=(batch.mask > 0).astype(np.float64)), 1.0)


def sample_metrics(samples: Sequence[Sample], groups: Sequence[Group]) -> dict[str, float]:
    """How much is trained of what there is, and how strongly."""
    tokens = sum(int(sample.mask.sum()) for sample in samples)
    metrics: dict[str, float] = {
        "episodes_trained": len({sample.episode for sample in samples}),
        "turns_trained": len(samples),
        "turns_quarantined": sum(bool(turn.quarantined) for group in groups for turns in group.turns for turn in turns),
        "tokens_trained": tokens,
    }
    if tokens:
        absolute = sum(float((np.abs(sample.advantage) * sample.mask).sum()) for sample in samples)
        metrics["advantage_abs"] = absolute / tokens
        metrics["advantage_max"] = max(float(np.abs(sample.advantage).max()) for sample in samples)
    return metrics


def _check_group(group: Group) -> None:
    if group.expected < 2:
        raise UsageError(
            f"group {group.id} was planned with {group.expected} episode: GRPO compares the episodes of a group",
            remedy="set training.group_size to at least 2",
        )
    tasks = {(episode.task.benchmark, episode.task.name) for episode in group.episodes}
    if len(tasks) > 1:
        raise ValueError(f"group {group.id} mixes the tasks {sorted(name for _, name in tasks)}")
    if len({episode.id for episode in group.episodes}) < len(group.episodes):
        raise ValueError(f"group {group.id} has an episode twice")


def _reward_of(group: Group, index: int) -> float:
    episode = group.episodes[index]
    if episode.reward is None:
        raise ValueError(f"group {group.id}: episode {episode.id} is unscored and cannot be in a group")
    return episode.reward
