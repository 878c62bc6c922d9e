"""The GRPO loss: gradients against finite differences, parts that add up, clipping that is really honoured."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from rl_harness.learning.grpo import GRPOLoss
from rl_harness.records import TokenBatch


def batch_of(rng: np.random.Generator, lengths: list[int], per_episode: int) -> TokenBatch:
    n = sum(lengths)
    sample = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    mask = (rng.random(n) < 0.8).astype(np.float64)
    return TokenBatch(
        behaviour_logps=rng.normal(-1.5, 0.5, n),
        advantage=rng.normal(0, 1, len(lengths))[sample],
        mask=mask,
        weight=rng.random(n) * mask / n,
        sample=sample,
        episode=sample // per_episode,
    )


def outputs_of(rng: np.random.Generator, batch: TokenBatch) -> dict[str, np.ndarray]:
    n = len(batch.mask)
    logp = batch.behaviour_logps + rng.normal(0, 0.3, n)
    return {"logp": logp, "ref_logp": logp + rng.normal(0, 0.3, n)}


@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    unit=st.sampled_from(["token", "turn", "episode"]),
    kl=st.sampled_from([0.0, 0.1]),
)
def test_gradients_are_those_of_the_value(seed, lengths, unit, kl):
    rng = np.random.default_rng(seed)
    batch = batch_of(rng, lengths, per_episode=2)
    outputs = outputs_of(rng, batch)
    loss = GRPOLoss(clip_low=0.2, clip_high=0.3, kl=kl, ratio=unit)
    spread = np.exp(loss._spread((outputs["logp"] - batch.behaviour_logps) * batch.mask, batch))
    assume(min(np.abs(spread - 0.8).min(), np.abs(spread - 1.3).min()) > 1e-4)  # differentiable there
    grads = loss(outputs, batch).grads["logp"]
    step = 1e-6
    for i in range(len(batch.mask)):
        above, below = (dict(outputs, logp=outputs["logp"].copy()) for _ in range(2))
        above["logp"][i] += step
        below["logp"][i] -= step
        slope = (loss(above, batch).value - loss(below, batch).value) / (2 * step)
        assert grads[i] == pytest.approx(slope, abs=1e-7)


@given(seed=st.integers(0, 2**32 - 1), unit=st.sampled_from(["token", "turn", "episode"]))
def test_parts_add_up_to_the_whole(seed, unit):
    rng = np.random.default_rng(seed)
    batch = batch_of(rng, [3, 4, 2, 5], per_episode=2)
    outputs = outputs_of(rng, batch)
    loss = GRPOLoss(clip_low=0.2, clip_high=0.2, kl=0.1, ratio=unit)
    whole = loss(outputs, batch)
    parts = []
    for episode in (0, 1):
        here = batch.episode == episode
        part = TokenBatch(
            behaviour_logps=batch.behaviour_logps[here],
            advantage=batch.advantage[here],
            mask=batch.mask[here],
            weight=batch.weight[here],
            sample=batch.sample[here] - batch.sample[here].min(),
            episode=np.zeros(here.sum(), dtype=np.int32),
        )
        parts.append(loss({name: values[here] for name, values in outputs.items()}, part))
    assert whole.value == pytest.approx(sum(part.value for part in parts))
    np.testing.assert_allclose(whole.grads["logp"], np.concatenate([part.grads["logp"] for part in parts]))
    for name, value in whole.sums.items():
        assert value == pytest.approx(sum(part.sums[name] for part in parts)), name
    assert whole.maxima["logp_gap_max"] == max(part.maxima["logp_gap_max"] for part in parts)


def one_token(gap: float, advantage: float, **options: float):
    batch = TokenBatch(
        behaviour_logps=np.array([-1.0]),
        advantage=np.array([advantage]),
        mask=np.ones(1),
        weight=np.ones(1),
        sample=np.zeros(1, dtype=np.int32),
        episode=np.zeros(1, dtype=np.int32),
    )
    return GRPOLoss(**({"clip_low": 0.2, "clip_high": 0.2} | options))({"logp": np.array([-1.0 + gap])}, batch)


def test_on_policy_the_gradient_is_the_advantage():
    result = one_token(0.0, 2.0)
    assert result.value == -2.0
    assert result.grads["logp"].tolist() == [-2.0]
    assert result.sums["clip_fraction"] == 0
    assert result.sums["logp_gap"] == 0


def test_the_clip_stops_the_gradient_only_where_it_would_go_further():
    assert one_token(0.5, 1.0).grads["logp"][0] == 0
    assert one_token(0.5, 1.0).value == pytest.approx(-1.2)
    assert one_token(0.5, -1.0).grads["logp"][0] > 0
    assert one_token(-0.5, -1.0).grads["logp"][0] == 0
    assert one_token(-0.5, 1.0).grads["logp"][0] < 0


def test_clip_high_is_its_own_range():
    assert one_token(np.log(1.25), 1.0, clip_high=0.28).grads["logp"][0] == pytest.approx(-1.25)
    assert one_token(np.log(1.25), 1.0).sums["clip_fraction_high"] == 1


def test_a_reference_is_needed_only_with_a_coefficient():
    assert GRPOLoss(clip_low=0.2, clip_high=0.2).needs == {"logp"}
    assert GRPOLoss(clip_low=0.2, clip_high=0.2, kl=0.1).needs == {"logp", "ref_logp"}


def test_masked_tokens_neither_count_nor_learn():
    batch = batch_of(np.random.default_rng(0), [6], per_episode=1)
    outputs = {"logp": np.where(batch.mask > 0, batch.behaviour_logps, 1e3)}
    result = GRPOLoss(clip_low=0.2, clip_high=0.2, ratio="turn")(outputs, batch)
    assert np.isfinite(result.value)
    assert (result.grads["logp"][batch.mask == 0] == 0).all()
    assert result.maxima["logp_gap_max"] == 0
