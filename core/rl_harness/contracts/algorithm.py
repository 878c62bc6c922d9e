"""Algorithm plugins: advantages from rewards, and the loss. Pure numpy; no torch, no I/O."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from rl_harness.contracts.backend import LossSpec
from rl_harness.contracts.common import Plugin
from rl_harness.records.arrays import LogpArray
from rl_harness.records.sample import Group, Sample, TokenBatch
from rl_harness.records.turn import SamplingParams


class LossResult(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """``value`` is this part's share of the batch loss (weights already applied: parts add up).

    ``grads[name][i]`` is d value / d outputs[name][i]. ``sums`` are metric numerators weighted by
    ``batch.weight``, so that they add up over parts and, divided by the batch's total weight, are means over
    it; of ``maxima`` the largest part's counts.
    """

    value: float
    grads: Mapping[str, LogpArray]
    sums: Mapping[str, float]
    maxima: Mapping[str, float] = {}


class Loss(abc.ABC):
    """A pure function of per-token outputs.

    ``needs`` names the outputs it differentiates or reads. ``unit`` is the smallest part of a batch it can be
    evaluated on by itself: ``token``, ``turn`` or ``episode``; a backend never splits a unit. Both may depend on
    the options the loss was made with.
    """

    needs: frozenset[str]
    unit: Literal["token", "turn", "episode"] = "token"

    @abc.abstractmethod
    def __call__(self, outputs: Mapping[str, LogpArray], batch: TokenBatch) -> LossResult: ...


class Learned(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What one batch of groups taught: samples ready for a backend, and what to report about them.

    ``metrics`` includes counts of groups without signal (all rewards equal), of partial groups, of groups of one.
    """

    samples: tuple[Sample, ...]
    metrics: Mapping[str, float]


class Algorithm(Plugin):
    """Groups of scored episodes in, samples and a loss out."""

    def check(self, *, group_size: int, sampling: SamplingParams) -> None:
        """Called before a training run starts anything. Raises ``UsageError`` when groups of this size, sampled
        like this, could teach it nothing."""

    @abc.abstractmethod
    def learn(self, groups: Sequence[Group]) -> Learned:
        """``groups`` are in the order in which they became complete."""

    def state(self) -> Mapping[str, float]:
        """What it carries from one :meth:`learn` to the next, such as a running baseline; nothing unless overridden.
        It is stored with each step."""
        return {}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from what :meth:`state` gave, perhaps in another process."""

    @abc.abstractmethod
    def loss(self) -> LossSpec: ...
