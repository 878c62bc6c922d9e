"""How per-token losses become one number, as a weight a token; every way is named by what it averages over."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from rl_harness.records.arrays import logps
from rl_harness.records.sample import Sample

Aggregate = Literal["token", "turn", "episode", "constant"]


def weighted(samples: Sequence[Sample], aggregate: Aggregate, constant: int | None = None) -> list[Sample]:
    """The samples with ``weight`` set; tokens that are masked out get 0.

    ``token``: the mean over all trained tokens, so long episodes weigh more. ``turn``: the mean over turns of
    each turn's token mean. ``episode``: the mean over episodes of each episode's token mean, whatever its number
    of turns. For these the weights add up to 1. ``constant``: every episode's sum divided by ``constant`` tokens,
    mean over episodes (Dr. GRPO, arXiv 2503.20783), so that length does not change a token's weight.
    """
    tokens = [float(sample.mask.sum()) for sample in samples]
    by_episode: defaultdict[str, float] = defaultdict(float)
    for sample, count in zip(samples, tokens, strict=True):
        by_episode[sample.episode] += count
    turns = sum(count > 0 for count in tokens)
    episodes = sum(count > 0 for count in by_episode.values())

    def share(sample: Sample, count: float) -> float:
        if count == 0:
            return 0.0
        match aggregate:
            case "token":
                return 1.0 / sum(tokens)
            case "turn":
                return 1.0 / (turns * count)
            case "episode":
                return 1.0 / (episodes * by_episode[sample.episode])
            case "constant":
                if constant is None or constant < 1:
                    raise ValueError("aggregate 'constant' needs the number of tokens to divide by")
                return 1.0 / (episodes * constant)

    return [
        msgspec.structs.replace(sample, weight=logps(sample.mask * np.float32(share(sample, count))))
        for sample, count in zip(samples, tokens, strict=True)
    ]
