"""Estimates and their intervals. Pure functions of counts and numbers; random ones take a seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

#: The two-sided 95 % quantile of the standard normal distribution.
Z95 = 1.959963984540054
_RESAMPLES = 2000
_DRAWS_AT_ONCE = 500_000


class Interval(NamedTuple):
    low: float
    high: float


def wilson(passed: float, total: float, z: float = Z95) -> Interval:
    """Wilson's score interval of a proportion (Wilson 1927). ``total`` > 0; fractional effective sizes are fine."""
    if not 0 <= passed <= total or total <= 0:
        raise ValueError(f"{passed} of {total} is not a proportion")
    share = passed / total
    scale = 1 + z * z / total
    centre = (share + z * z / (2 * total)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    # At 0 and 1 the bound is exact; elsewhere rounding must not push it past the estimate.
    return Interval(max(0.0, min(centre - half, share)), min(1.0, max(centre + half, share)))


def clustered_wilson(passed: Sequence[int], total: Sequence[int]) -> Interval:
    """Wilson's interval of the pooled pass rate when several attempts share a task.

    Attempts at one task are not independent, so the number of attempts is replaced by the effective one: that
    whose binomial variance equals the cluster-robust variance over tasks (Miller 2024, arXiv 2411.00640), held
    between the number of tasks (attempts at a task are copies) and of attempts (independent). With one attempt a
    task this is the plain interval.
    """
    tasks, attempts = len(total), sum(total)
    share = sum(passed) / attempts
    effective = float(attempts)
    if attempts > tasks:
        spread = sum((p - share * n) ** 2 for p, n in zip(passed, total, strict=True))
        if tasks > 1 and spread > 0:
            variance = spread / attempts**2 * tasks / (tasks - 1)
            effective = min(max(share * (1 - share) / variance, tasks), attempts)
        elif share in (0.0, 1.0) or tasks == 1:
            effective = float(tasks)
    return wilson(share * effective, effective)


def pass_at_k(passed: int, total: int, k: int) -> float:
    """The unbiased estimate that at least one of ``k`` attempts passes, from ``passed`` of ``total`` attempts.

    1 - C(total - passed, k) / C(total, k), as a product (Chen et al. 2021, arXiv 2107.03374). ``total`` >= ``k``.
    """
    if not 0 <= passed <= total or not 1 <= k <= total:
        raise ValueError(f"pass@{k} cannot be estimated from {passed} of {total}")
    if total - passed < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / n for n in range(total - passed + 1, total + 1))


def bootstrap_mean(sums: Sequence[float], counts: Sequence[int], *, seed: int = 0) -> Interval | None:
    """95 % percentile-bootstrap interval of sum(sums)/sum(counts), resampling clusters (tasks).

    None for fewer than two clusters, and when all have the same mean: resampling what does not vary would pretend
    certainty. The same input and seed give the same interval.
    """
    totals, sizes = np.asarray(sums, np.float64), np.asarray(counts, np.float64)
    if len(totals) < 2 or np.ptp(totals / sizes) < 1e-12:
        return None
    rng = np.random.default_rng(seed)
    means = np.empty(_RESAMPLES)
    rows = max(1, _DRAWS_AT_ONCE // len(totals))
    for start in range(0, _RESAMPLES, rows):
        chosen = rng.integers(0, len(totals), (min(rows, _RESAMPLES - start), len(totals)))
        means[start : start + rows] = totals[chosen].sum(axis=1) / sizes[chosen].sum(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return Interval(float(low), float(high))
