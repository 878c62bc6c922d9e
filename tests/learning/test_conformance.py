"""Our algorithm passes the checks that anyone's must."""

from __future__ import annotations

import pytest
from rl_harness.learning.grpo import GRPO, GRPOOptions
from rl_harness.testing import algorithm_checks


@pytest.mark.parametrize("options", [{}, {"kl": 0.1, "ratio": "turn"}, {"ratio": "episode", "aggregate": "token"}])
@pytest.mark.parametrize("check", algorithm_checks(), ids=lambda check: check.__name__)
def test_grpo_conforms(check, options):
    check(GRPO(GRPOOptions(**options)))
