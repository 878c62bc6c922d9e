"""What learning works on: samples (one per turn), groups of episodes, and the flat view a loss sees."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from rl_harness.records.arrays import IdArray, LogpArray
from rl_harness.records.episode import Episode
from rl_harness.records.turn import Turn


class Group(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The scored episodes of one task sampled for one update, with their turns in order.

    ``expected`` is how many were asked for; fewer present means the group is declared partial.
    """

    id: str
    expected: int
    episodes: tuple[Episode, ...]
    turns: tuple[tuple[Turn, ...], ...]

    @property
    def partial(self) -> bool:
        return len(self.episodes) < self.expected


class Sample(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One turn as training data: its prompt is context, its completion (n tokens) may be trained.

    ``mask[i]`` is 1 where token i is trained, ``behaviour_logps[i]`` the log-prob it was sampled with,
    ``versions[i]`` the version that sampled it, ``advantage[i]`` its advantage, and ``weight[i]`` its share of
    the loss after aggregation (the weights of a batch's trained tokens sum to 1 for mean aggregations).
    ``temperature`` is what the policy's logits are divided by before the softmax.
    """

    turn: str
    episode: str
    group: str
    policy: str
    temperature: float
    prompt: IdArray
    completion: IdArray
    mask: LogpArray
    behaviour_logps: LogpArray
    versions: IdArray
    advantage: LogpArray
    weight: LogpArray

    def __post_init__(self) -> None:
        n = len(self.completion)
        for name in ("mask", "behaviour_logps", "versions", "advantage", "weight"):
            if len(getattr(self, name)) != n:
                raise ValueError(f"sample {self.turn}: {name} has {len(getattr(self, name))} entries, not {n}")
        if len(self.prompt) == 0:
            raise ValueError(f"sample {self.turn}: an empty prompt gives the first token no context")


class TokenBatch(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The trained side of a list of samples, concatenated: every array has one entry per completion token.

    ``sample`` and ``episode`` index the unit each token belongs to (0-based, contiguous).
    """

    behaviour_logps: LogpArray
    advantage: LogpArray
    mask: LogpArray
    weight: LogpArray
    sample: IdArray
    episode: IdArray

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> TokenBatch:
        episodes = {name: i for i, name in enumerate(dict.fromkeys(s.episode for s in samples))}
        lengths = [len(s.completion) for s in samples]
        return cls(
            behaviour_logps=_cat([s.behaviour_logps for s in samples], np.float32),
            advantage=_cat([s.advantage for s in samples], np.float32),
            mask=_cat([s.mask for s in samples], np.float32),
            weight=_cat([s.weight for s in samples], np.float32),
            sample=np.repeat(np.arange(len(samples), dtype=np.int32), lengths),
            episode=np.repeat(np.array([episodes[s.episode] for s in samples], dtype=np.int32), lengths),
        )


def _cat(arrays: list[LogpArray], dtype: type[np.float32]) -> LogpArray:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=dtype)
