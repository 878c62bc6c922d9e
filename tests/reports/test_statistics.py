"""Estimates against their definitions, known values and exact enumeration."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rl_harness.reports.statistics import Z95, bootstrap_mean, clustered_wilson, pass_at_k, wilson

proportions = st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@pytest.mark.parametrize(
    ("passed", "total", "low", "high"),
    [
        (11, 100, 0.0625, 0.1863),
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (90, 100, 0.8256, 0.9448),
        (1, 2, 0.0945, 0.9055),
    ],
)
def test_wilson_known_values(passed, total, low, high):
    assert wilson(passed, total) == pytest.approx((low, high), abs=5e-5)


@given(proportions)
def test_wilson_bounds_are_where_the_score_test_turns(proportion):
    passed, total = proportion
    share = passed / total
    low, high = wilson(passed, total)
    assert 0.0 <= low <= share <= high <= 1.0
    for bound in (low, high):
        if 1e-9 < bound < 1 - 1e-9:
            assert abs(share - bound) == pytest.approx(Z95 * math.sqrt(bound * (1 - bound) / total), rel=1e-6)


@given(proportions)
def test_wilson_is_symmetric_and_narrows(proportion):
    passed, total = proportion
    low, high = wilson(passed, total)
    assert wilson(total - passed, total) == pytest.approx((1 - high, 1 - low))
    narrow = wilson(4 * passed, 4 * total)
    assert narrow.high - narrow.low < high - low


def test_wilson_covers_as_often_as_it_says():
    """Exact coverage, averaged over true rates."""
    total = 30
    intervals = [wilson(k, total) for k in range(total + 1)]
    rates = [i / 50 for i in range(1, 50)]
    coverage = [
        sum(
            math.comb(total, k) * rate**k * (1 - rate) ** (total - k)
            for k, (low, high) in enumerate(intervals)
            if low <= rate <= high
        )
        for rate in rates
    ]
    assert 0.94 < sum(coverage) / len(coverage) < 0.97


@pytest.mark.parametrize(("passed", "total"), [(1, 0), (-1, 5), (6, 5)])
def test_wilson_refuses_what_is_no_proportion(passed, total):
    with pytest.raises(ValueError, match="not a proportion"):
        wilson(passed, total)


@given(st.lists(st.integers(0, 1), min_size=1, max_size=50))
def test_with_one_attempt_a_task_the_clustered_interval_is_the_plain_one(passed):
    assert clustered_wilson(passed, [1] * len(passed)) == wilson(sum(passed), len(passed))


@given(st.lists(st.integers(0, 1), min_size=2, max_size=50), st.integers(2, 8))
def test_copies_of_an_attempt_are_worth_one(passed, copies):
    clustered = clustered_wilson([p * copies for p in passed], [copies] * len(passed))
    assert clustered == pytest.approx(wilson(sum(passed), len(passed)))


def test_attempts_that_do_not_depend_on_the_task_count_in_full():
    assert clustered_wilson([2] * 20, [4] * 20) == pytest.approx(wilson(40, 80))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)).filter(lambda t: sum(t)), min_size=1, max_size=20))
def test_the_clustered_interval_lies_between_all_and_nothing_shared(tasks):
    passed, total = [p for p, _ in tasks], [p + f for p, f in tasks]
    low, high = clustered_wilson(passed, total)
    share, attempts = sum(passed) / sum(total), sum(total)
    widest, narrowest = wilson(share * len(tasks), len(tasks)), wilson(sum(passed), attempts)
    assert widest.low - 1e-9 <= low <= narrowest.low + 1e-9
    assert narrowest.high - 1e-9 <= high <= widest.high + 1e-9


cases = st.integers(1, 60).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n), st.integers(1, n)))


@given(cases)
def test_pass_at_k_is_the_share_of_k_subsets_with_a_pass(case):
    passed, total, k = case
    exact = 1 - math.comb(total - passed, k) / math.comb(total, k)
    assert pass_at_k(passed, total, k) == pytest.approx(exact, abs=1e-12)
    assert pass_at_k(passed, total, 1) == pytest.approx(passed / total)


def test_pass_at_k_stays_finite_for_many_samples():
    assert pass_at_k(3, 100_000, 1000) == pytest.approx(1 - (0.99**3), rel=1e-3)


@pytest.mark.parametrize("case", [(1, 2, 3), (3, 2, 1), (0, 2, 0)])
def test_pass_at_k_refuses_what_it_cannot_estimate(case):
    with pytest.raises(ValueError, match="cannot be estimated"):
        pass_at_k(*case)


clusters = st.lists(st.tuples(st.floats(-5, 5), st.integers(1, 5)), min_size=2, max_size=30)


@given(clusters)
def test_the_bootstrap_is_reproducible_and_within_the_data(data):
    sums, counts = [mean * n for mean, n in data], [n for _, n in data]
    interval = bootstrap_mean(sums, counts, seed=1)
    assert interval == bootstrap_mean(sums, counts, seed=1)
    means = [mean for mean, _ in data]
    if interval is not None:
        assert min(means) - 1e-9 <= interval.low <= interval.high <= max(means) + 1e-9


def test_the_bootstrap_agrees_with_the_normal_interval_where_that_holds():
    values = [math.sin(i) for i in range(500)]
    mean = sum(values) / len(values)
    error = Z95 * math.sqrt(sum((v - mean) ** 2 for v in values)) / len(values)
    interval = bootstrap_mean(values, [1] * len(values))
    assert interval == pytest.approx((mean - error, mean + error), abs=0.01)


@pytest.mark.parametrize("sums", [[], [3.0], [1.0] * 16], ids=["none", "one", "equal"])
def test_what_does_not_vary_has_no_bootstrap_interval(sums):
    assert bootstrap_mean(sums, [1] * len(sums)) is None
