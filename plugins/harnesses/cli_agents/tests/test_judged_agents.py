"""Whatever becomes of a real agent, the verifier alone judges it, and it sees nothing of that."""

from __future__ import annotations

from pathlib import Path

import pytest
from rl_harness_cli_agents.testing_judged import check_judged_by_the_verifier

pytestmark = [pytest.mark.needs("userns"), pytest.mark.long, pytest.mark.timeout(300)]
AGENTS = ("claude-code", "codex", "opencode", "qwen-code", "pi", "mini-swe-agent")


@pytest.mark.parametrize("agent", [pytest.param(name, marks=pytest.mark.needs(name)) for name in AGENTS])
def test_it_is_judged_by_the_verifier_alone_and_sees_nothing_of_it(agent: str, tmp_path: Path) -> None:
    check_judged_by_the_verifier(tmp_path, agent)
