"""Helper and relay for an ordinary user: as root, in a child that becomes uid 65534."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest


@pytest.mark.needs("root", "userns")
def test_an_ordinary_users_sandboxes_have_helpers_too() -> None:
    script = Path(__file__).with_name("unprivileged.py")
    with tempfile.TemporaryDirectory(prefix="rl-harness-nobody-") as folder:
        child = subprocess.run([sys.executable, str(script), folder], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    outcomes = [json.loads(line) for line in child.stdout.splitlines()]
    assert len(outcomes) == 7
    failed = [outcome["failed"] for outcome in outcomes if "failed" in outcome]
    assert not failed, "\n".join(failed)
