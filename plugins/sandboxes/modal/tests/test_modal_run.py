"""Whole runs on Modal through the command line: image, set-up, snapshot, ready sandboxes, agent, verifier."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.needs("root", "userns", "modal")

TASK = Path(__file__).parents[4] / "task_registry" / "shell-basics" / "tasks" / "filter-csv"


ALLOWED = 'network_mode = "allowlist"\nallowed_hosts = ["example.com:443"]'


def run(task: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rl_harness", "run", str(task), "--harness", "oracle", "--sandbox", "modal"]
    command += ["--samples", "2", "--concurrency", "2", "--runs-dir", str(folder / "runs"), "--json"]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)


@pytest.fixture
def task(tmp_path: Path) -> Path:
    shutil.copytree(TASK, tmp_path / "task")
    (tmp_path / "task/environment/Dockerfile").write_text("FROM debian:12\nRUN echo image > /opt/image\n")
    (tmp_path / "task/environment/setup.sh").write_text("cat /opt/image >> /opt/prepared\n")
    return tmp_path / "task"


def test_a_run_prepares_its_environment_once_and_leaves_no_sandbox(stand_in, task: Path, tmp_path: Path) -> None:
    done = run(task, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["evaluations"][0]["summary"]["passed"] == 2
    assert (report["sandboxes"]["snapshots_built"], report["sandboxes"]["snapshots_started"]) == (1, 4)
    assert stand_in.running() == []


def test_a_dockerfile_that_does_not_build_is_no_score_and_its_output_is_shown(
    stand_in, task: Path, tmp_path: Path
) -> None:
    (task / "environment/Dockerfile").write_text("FROM debian:12\nRUN echo the reason; exit 3\n")
    done = run(task, tmp_path)
    assert done.returncode == 1
    summary = json.loads(done.stdout)["evaluations"][0]["summary"]
    assert (summary["scored"], summary["unscored"]) == (0, {"sandbox_error": 2})
    assert summary["because"]["sandbox_error"].endswith("exit 3\nthe reason")
    assert stand_in.ask("sandboxes") == []


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [("timeout_sec = 300", "timeout_sec = 90000", "24 hours"), ('network_mode = "no-network"', ALLOWED, ":443")],
    ids=["lifetime", "allow-list"],
)
def test_what_modal_cannot_do_is_told_before_the_run(
    stand_in, task: Path, tmp_path: Path, old: str, new: str, reason: str
) -> None:
    file = task / "task.toml"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    done = run(task, tmp_path)
    assert (done.returncode, reason in done.stderr) == (2, True), done.stdout + done.stderr
    assert not (tmp_path / "runs").exists()
    assert stand_in.ask("sandboxes") == []
