"""The same checks as an ordinary user: as root, in a child that becomes uid 65534."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from rl_harness.testing.sandbox import CHECKS

pytestmark = [pytest.mark.needs("root"), pytest.mark.needs("userns"), pytest.mark.long]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, Any]]:
    script = Path(__file__).with_name("unprivileged.py")
    # Not below pytest's own folder, which other users may not enter.
    with tempfile.TemporaryDirectory(prefix="rl-harness-nobody-") as folder:
        child = subprocess.run([sys.executable, str(script), folder], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    return {outcome["check"]: outcome for outcome in map(json.loads, child.stdout.splitlines())}


@pytest.mark.parametrize("name", [*map(str, CHECKS), "nothing_is_left"])
def test_local(name: str, outcomes: dict[str, dict[str, Any]]) -> None:
    outcome = outcomes[name]
    if "skipped" in outcome:
        pytest.skip(outcome["skipped"])
    assert "failed" not in outcome, outcome["failed"]
