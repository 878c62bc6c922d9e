"""A command-line agent that is installed on its machine by a set-up step."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("rl_harness_cli_agents", reason="needs rl-harness-cli-agents")

from rl_harness_cli_agents.testing_install import check_install_in_sandbox

pytestmark = [pytest.mark.needs("root", "userns", "modal"), pytest.mark.timeout(300)]


def test_an_agent_installs_itself_for_its_own_sandbox_alone(stand_in, tmp_path: Path) -> None:
    check_install_in_sandbox(tmp_path, "modal")
