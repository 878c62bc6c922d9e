"""REINFORCE with a running baseline (Williams 1992): every episode is compared with the exponential mean of the rewards
before it, so that a single one can be learned from, without a group of others at the same task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import Field

from rl_harness.contracts import common
from rl_harness.contracts.algorithm import Algorithm, Learned
from rl_harness.contracts.backend import LossSpec
from rl_harness.learning.advantages import EQUAL
from rl_harness.learning.aggregation import weighted
from rl_harness.learning.grpo import ClippedOptions, sample_metrics
from rl_harness.learning.samples import check_sampling, samples_of
from rl_harness.records.episode import Episode
from rl_harness.records.sample import Group, Sample
from rl_harness.records.turn import SamplingParams


class ReinforceOptions(ClippedOptions):
    decay: float = Field(
        0.9, ge=0, lt=1, description="of the baseline, the exponential mean of rewards: the weight of all earlier ones"
    )
    start: float = Field(0.0, description="what the very first reward is compared with")


@dataclass(slots=True)
class _Mean:
    """An exponential mean that is not drawn to where it started: the weights of what it has seen add up to 1."""

    decay: float
    start: float
    sum: float = 0.0
    weight: float = 0.0

    @property
    def value(self) -> float:
        return self.sum / self.weight if self.weight else self.start

    def centred(self, reward: float) -> float:
        """The reward relative to those before it, which it then joins."""
        relative = reward - self.value
        self.sum = self.decay * self.sum + (1 - self.decay) * reward
        self.weight = self.decay * self.weight + (1 - self.decay)
        return relative


class Reinforce(Algorithm):
    """An episode's reward and those of single turns have a baseline each, which a run keeps. The objective is that of
    GRPO: clipped, so that tokens sampled by an earlier version of the policy do no harm."""

    api = common.API
    Options = ReinforceOptions

    def __init__(self, options: ReinforceOptions) -> None:
        self.options = options
        self._episodes = _Mean(options.decay, options.start)
        self._turns = _Mean(options.decay, options.start)

    def check(self, *, group_size: int, sampling: SamplingParams) -> None:
        check_sampling(sampling)

    def learn(self, groups: Sequence[Group]) -> Learned:
        """Samples of every episode whose reward differs from the baseline, in the order given."""
        options = self.options
        samples: list[Sample] = []
        rewards: list[float] = []
        silent = 0
        before = self._episodes.value
        for group in groups:
            for episode, turns in zip(group.episodes, group.turns, strict=True):
                if episode.reward is None:
                    raise ValueError(f"group {group.id}: episode {episode.id} is unscored and cannot be in a group")
                rewards.append(episode.reward)
                whole = _whole(episode)
                advantage = 0.0 if whole is None else self._episodes.centred(whole)
                of_turns = {turn: self._turns.centred(reward) for turn, reward in episode.turn_rewards.items()}
                if max(map(abs, (advantage, *of_turns.values()))) <= EQUAL:
                    silent += 1
                    continue
                samples += samples_of(
                    episode,
                    turns,
                    group=group.id,
                    advantage=advantage,
                    gamma=options.gamma,
                    turn_advantages=of_turns,
                )
        samples = weighted(samples, options.aggregate, options.constant)
        metrics: dict[str, float] = {
            "groups": len(groups),
            "episodes": len(rewards),
            "episodes_no_signal": silent,
            "turns_quarantined": sum(bool(turn.quarantined) for g in groups for turns in g.turns for turn in turns),
            "baseline": before,
            **sample_metrics(samples, groups),
        }
        if rewards:
            metrics["reward"] = float(np.mean(rewards))
        return Learned(samples=tuple(samples), metrics=metrics)

    def loss(self) -> LossSpec:
        return self.options.loss()

    def state(self) -> Mapping[str, float]:
        named = {"episodes": self._episodes, "turns": self._turns}
        return {f"{name}_{part}": getattr(mean, part) for name, mean in named.items() for part in ("sum", "weight")}

    def restore(self, state: Mapping[str, float]) -> None:
        for name, mean in (("episodes", self._episodes), ("turns", self._turns)):
            mean.sum = state.get(f"{name}_sum", 0.0)
            mean.weight = state.get(f"{name}_weight", 0.0)


def _whole(episode: Episode) -> float | None:
    """What the episode as a whole was given; None if only turns of it were."""
    assert episode.reward is not None
    if episode.turn_rewards and not episode.rewards:
        return None
    return episode.reward - sum(episode.turn_rewards.values())
