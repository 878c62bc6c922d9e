"""Whole runs on E2B through the command line: what is known before one starts is told before it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.needs("userns", "e2b")

TASK = Path(__file__).parents[4] / "task_registry" / "shell-basics" / "tasks" / "filter-csv"
NETWORK = 'network_mode = "no-network"'
ALLOWED = 'network_mode = "allowlist"\nallowed_hosts = ["example.com:443"]'
STAGES = "FROM debian:12 AS a\nRUN true\nFROM debian:12\nCOPY --from=a /etc/hostname /x\n"


@pytest.mark.parametrize(
    ("network", "dockerfile", "reason"),
    [
        (f"cpus = 0.5\n{NETWORK}", None, "whole processors"),
        (ALLOWED, None, "example.com:443"),
        (NETWORK, STAGES, "Multi-stage"),
    ],
    ids=["cpus", "allow-list", "stages"],
)
def test_what_e2b_cannot_do_is_told_before_the_run(
    stand_in, tmp_path: Path, network: str, dockerfile: str | None, reason: str
) -> None:
    task = tmp_path / "task"
    shutil.copytree(TASK, task)
    text = (task / "task.toml").read_text()
    assert NETWORK in text
    (task / "task.toml").write_text(text.replace(NETWORK, network))
    if dockerfile is not None:
        (task / "environment/Dockerfile").write_text(dockerfile)
    command = [sys.executable, "-m", "rl_harness", "run", str(task), "--harness", "oracle", "--sandbox", "e2b"]
    command += ["--runs-dir", str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, reason in done.stderr) == (2, True), done.stdout + done.stderr
    assert not (tmp_path / "runs").exists()
    assert stand_in.ask("sandboxes") == []
