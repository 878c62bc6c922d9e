from __future__ import annotations

from pathlib import Path

import pytest
from rl_harness_cli_agents.testing import ScriptedRun


@pytest.fixture
def scripted(tmp_path: Path) -> ScriptedRun:
    return ScriptedRun(tmp_path)
