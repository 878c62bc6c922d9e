"""Turns into samples, id by id: each turn is one, its prompt context and its completion trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rl_harness.errors import Unsupported, UsageError
from rl_harness.learning.credit import returns
from rl_harness.records.arrays import logps
from rl_harness.records.episode import Episode
from rl_harness.records.sample import Sample
from rl_harness.records.turn import SamplingParams, Turn, prompt_of


def check_sampling(sampling: SamplingParams) -> None:
    """Raise ``UsageError`` if completions sampled this way cannot be trained on.

    A backend computes log-probs of the full softmax. Greedy decoding has no distribution, and truncation makes
    the recorded log-probs those of another one, so that every importance ratio would be off.
    """
    if sampling.temperature <= 0:
        raise UsageError(
            "training needs sampled completions, and temperature 0 is greedy",
            remedy="set sampling.temperature above 0 (1.0 is the default)",
        )
    for name, value, off in (
        ("top_p", sampling.top_p, 1.0),
        ("top_k", sampling.top_k, 0),
        ("min_p", sampling.min_p, 0),
    ):
        if value != off:
            raise UsageError(
                f"training needs log-probs of the full distribution, and {name}={value} truncates it",
                remedy=f"train with sampling.{name}={off}; evaluation may truncate",
            )


def samples_of(
    episode: Episode,
    turns: Sequence[Turn],
    *,
    group: str,
    advantage: float,
    gamma: float,
    turn_advantages: Mapping[str, float] | None = None,
) -> list[Sample]:
    """One sample a turn of an episode, in order; turns without completion tokens, and those that held a
    secret, give none.

    Every completion token is trained with ``advantage`` discounted along the turn's path, plus those of single turns
    (``turn_advantages``, by turn id), which also count, discounted, for the turns before them. ``weight`` is 0 until
    the batch is known (:func:`rl_harness.learning.aggregation.weighted`). Raises ``Unsupported`` for turns that
    were not recorded token by token, ``UsageError`` for ones sampled from a truncated distribution.
    """
    known = {turn.id: turn for turn in turns}
    samples = []
    for turn, value in zip(turns, returns(turns, gamma, final=advantage, rewards=turn_advantages), strict=True):
        if turn.quarantined:
            continue
        if not turn.exact:
            raise Unsupported(
                f"episode {episode.id}: turn {turn.id} was not recorded token by token, so it cannot be trained on",
                remedy="train behind an engine that gives ids and log-probs (engine.name=torch)",
            )
        n = len(turn.completion)
        if n == 0:
            continue
        check_sampling(turn.sampling)
        samples.append(
            Sample(
                turn=turn.id,
                episode=episode.id,
                group=group,
                policy=turn.policy,
                temperature=turn.sampling.temperature,
                prompt=prompt_of(turn, known.__getitem__),
                completion=turn.completion,
                mask=logps(np.ones(n)),
                behaviour_logps=turn.logps,
                versions=turn.versions,
                advantage=logps(np.full(n, value)),
                weight=logps(np.zeros(n)),
            )
        )
    return samples


def check_samples(samples: Sequence[Sample], vocab_size: int) -> None:
    """What every backend asks of samples before it computes: ids in the vocabulary, finite numbers.

    Raises ``ValueError`` naming the turn, so that a bad id or log-prob is found before the backward pass and not
    as an index error inside it.
    """
    for sample in samples:
        for name, ids in (("prompt", sample.prompt), ("completion", sample.completion)):
            if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
                bad = int(ids[(ids < 0) | (ids >= vocab_size)][0])
                raise ValueError(f"turn {sample.turn}: {name} has id {bad}, outside the vocabulary of {vocab_size}")
        for name in ("behaviour_logps", "advantage", "weight", "mask"):
            if not bool(np.isfinite(getattr(sample, name)).all()):
                raise ValueError(f"turn {sample.turn}: {name} has a value that is not finite")
        if not sample.temperature > 0:
            raise ValueError(f"turn {sample.turn}: temperature {sample.temperature} has no distribution to train")
