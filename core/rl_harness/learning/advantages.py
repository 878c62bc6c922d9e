"""Advantages relative to a group: how much better an episode did than the others at the same task."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

#: Rewards closer than this are equal: dividing by their spread would only amplify rounding.
EQUAL = 1e-6


def group_advantages(rewards: Sequence[float], *, normalise_std: bool) -> NDArray[np.float64] | None:
    """One advantage an episode: reward minus the group's mean, divided by its sample standard deviation if
    ``normalise_std`` (GRPO, arXiv 2402.03300) or not (Dr. GRPO, arXiv 2503.20783).

    None when there is nothing to compare: a group of one, or equal rewards.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"a reward is not finite: {list(rewards)}")
    if len(values) < 2 or np.ptp(values) <= EQUAL:
        return None
    centred: NDArray[np.float64] = values - values.mean()
    if normalise_std:
        centred /= values.std(ddof=1)
    return centred
