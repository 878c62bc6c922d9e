"""Tokens come from exactly the distribution whose log-probability is reported, and a seed always draws the same."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from rl_harness.records import SamplingParams
from rl_harness_torch.sampler import Uniforms, sample


def reference(logits: torch.Tensor, p: SamplingParams) -> torch.Tensor:
    """The distribution, written down the slow way."""
    probabilities = torch.softmax(logits.double() / p.temperature, -1)

    def keep(mask: torch.Tensor) -> torch.Tensor:
        kept = torch.where(mask, probabilities, 0.0)
        return kept / kept.sum()

    if 0 < p.top_k < len(logits):
        probabilities = keep(probabilities >= probabilities.sort(descending=True).values[p.top_k - 1])
    if p.top_p < 1:
        order = probabilities.argsort(descending=True)
        before = probabilities[order].cumsum(-1) - probabilities[order]
        mask = torch.zeros_like(probabilities, dtype=torch.bool)
        mask[order[before < p.top_p]] = True
        probabilities = keep(mask)
    if p.min_p:
        probabilities = keep(probabilities >= probabilities.max() * p.min_p)
    return probabilities


SHAPES = [
    SamplingParams(),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.3, top_k=5),
    SamplingParams(temperature=0.7, top_p=0.95),
    SamplingParams(top_p=0.1),
    SamplingParams(min_p=0.2),
    SamplingParams(temperature=2.0, top_k=50, top_p=0.8, min_p=0.01),
    SamplingParams(top_k=10_000),
]


@pytest.mark.parametrize("params", SHAPES)
def test_log_probs_and_frequencies_are_those_of_the_shaped_distribution(params: SamplingParams) -> None:
    logits = torch.randn(700, generator=torch.Generator().manual_seed(1)) * 3
    expected = reference(logits, params)
    n = 4000
    draws = sample(logits.repeat(n, 1), [params] * n, [(i + 0.5) / n for i in range(n)])
    counts = np.bincount([d.id for d in draws], minlength=700) / n
    # Evenly spaced numbers visit every token as often as its probability says, give or take one.
    assert np.abs(counts - expected.numpy()).max() <= 1.5 / n
    for draw in draws[::97]:
        assert draw.logp is not None
        assert draw.logp == pytest.approx(math.log(expected[draw.id]), abs=1e-4)


def test_rows_with_different_parameters_do_not_disturb_each_other() -> None:
    logits = torch.randn(len(SHAPES), 700, generator=torch.Generator().manual_seed(2)) * 3
    together = sample(logits, SHAPES, [0.4] * len(SHAPES))
    alone = [sample(logits[i : i + 1], [p], [0.4])[0] for i, p in enumerate(SHAPES)]
    assert [d.id for d in together] == [d.id for d in alone]
    assert [d.logp for d in together] == pytest.approx([d.logp for d in alone], abs=1e-6)


def test_greedy_takes_the_most_likely_and_reports_the_models_own_log_prob() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0]])
    greedy, sampled = SamplingParams(temperature=0, top_k=1), SamplingParams()
    draws = sample(logits, [greedy, sampled], [0.0, 0.0])
    assert draws[0].id == 1
    assert draws[0].logp == pytest.approx(torch.log_softmax(logits[0], -1)[1].item())
    assert sample(logits[:1], [greedy], [0.99])[0] == draws[0]


def test_a_number_at_either_end_never_draws_what_was_cut_off() -> None:
    logits = torch.tensor([[-math.inf, 1.0, 1.0, -math.inf]])
    for uniform, expected in ((0.0, 1), (math.nextafter(1, 0), 2)):
        assert sample(logits, [SamplingParams()], [uniform])[0].id == expected


def test_log_probs_that_are_not_finite_are_reported_as_none() -> None:
    logits = torch.tensor([[math.nan, 0.0], [math.inf, 0.0], [0.0, 0.0]])
    for params in (SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_p=0.5, top_k=1)):
        draws = sample(logits, [params] * 3, [0.5] * 3)
        assert [d.logp is None for d in draws] == [True, True, False]


def test_top_logprobs_are_of_the_same_distribution() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]] * 2)
    draws = sample(logits, [SamplingParams(top_k=2, top_logprobs=3), SamplingParams()], [0.0, 0.0])
    expected = torch.log_softmax(torch.tensor([3.0, 2.0]), -1).tolist()
    assert draws[0].top == pytest.approx({1: expected[0], 2: expected[1]})
    assert draws[1].top == {}


def test_a_seed_draws_the_same_numbers_and_another_one_others() -> None:
    def numbers(seed: int | None) -> list[float]:
        uniforms = Uniforms(seed)
        return [uniforms.next() for _ in range(4)]

    assert numbers(7) == numbers(7)
    assert numbers(7) != numbers(8)
    assert numbers(-1) == numbers(-1)
    assert numbers(None) != numbers(None)
