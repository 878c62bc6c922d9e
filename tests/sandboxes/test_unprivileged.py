"""The same checks as an ordinary user: as root, in a child that becomes uid 65534."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rl_harness.testing.sandbox import CHECKS

pytestmark = [pytest.mark.needs("root"), pytest.mark.needs("userns")]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("nobody")
    for parent in (folder, *folder.parents):
        if parent.stat().st_uid == os.geteuid() and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)
    script = Path(__file__).with_name("unprivileged.py")
    child = subprocess.run([sys.executable, str(script), str(folder)], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    return {outcome["check"]: outcome for outcome in map(json.loads, child.stdout.splitlines())}


@pytest.mark.parametrize("name", [*map(str, CHECKS), "nothing_is_left"])
def test_local(name: str, outcomes: dict[str, dict[str, Any]]) -> None:
    outcome = outcomes[name]
    if "skipped" in outcome:
        pytest.skip(outcome["skipped"])
    assert "failed" not in outcome, outcome["failed"]
