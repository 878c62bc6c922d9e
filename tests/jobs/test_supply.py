"""Prepared environments and ready sandboxes from the user's side: what a run makes, reports and leaves."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from rl_harness.contracts import EnvironmentSpec, SandboxSpec
from rl_harness.jobs.supply import in_order_of_need
from rl_harness.tasks import new_task

EXAMPLE = Path(__file__).parents[2] / "examples/copying_sandbox.py"


@pytest.fixture
def prepared(world):
    """A task with a set-up step that counts its runs outside, and the options to run it with."""
    world.environment["XDG_STATE_HOME"] = str(world.directory / "state")
    world.environment["RL_HARNESS_SNAPSHOTS__ALLOW_UNISOLATED"] = "true"
    new_task(world.directory / "task")
    script = world.directory / "task/environment/setup.sh"
    script.write_text(f"echo once >> {world.directory}/builds; echo 3 > prepared.txt\n")
    (world.directory / "task/solution/solve.sh").write_text("cp prepared.txt count.txt\n")
    world.sandboxes = world.directory / "sandboxes"
    world.options = (
        "-p",
        str(EXAMPLE),
        *("--harness", "oracle", "--sandbox", "copying", "-o", f"sandbox.state_dir={world.sandboxes}"),
    )
    return world


def builds(world) -> int:
    path = world.directory / "builds"
    return len(path.read_text().split()) if path.exists() else 0


def left(world) -> list[str]:
    return sorted(path.name.split("-")[0] for path in world.sandboxes.iterdir())


def test_a_run_prepares_once_has_sandboxes_ready_and_says_so(prepared):
    report = prepared.json("run", "task", *prepared.options, "--samples", "12", "--concurrency", "3")
    assert report["evaluations"][0]["summary"]["passed"] == 12
    assert builds(prepared) == 1
    counts = report["sandboxes"]
    assert counts["hits"] + counts["late"] + counts["misses"] == 24  # an agent's and a verifier's each
    assert counts["unplanned"] == counts["dead"] == counts["failed"] == 0
    assert counts["snapshots_built"] == 1
    assert left(prepared) == ["snapshot"]
    again = prepared.json("run", "task", *prepared.options, "--samples", "2", "--name", "later")
    assert builds(prepared) == 1
    assert again["sandboxes"]["snapshots_built"] == 0
    text = prepared.run("runs", "show", "later")
    assert "4 sandboxes started from them" in text
    assert "of 4 ready when asked for" in text


def test_pool_and_snapshots_can_be_switched_off_without_being_another_run(prepared):
    arguments = ("run", "task", *prepared.options, "--samples", "2", "-o", "snapshots.use=false", "-o", "pool.size=0")
    text = prepared.run(*arguments)
    assert builds(prepared) == 4
    assert "set-up runs anew in every sandbox: snapshots are switched off" in text
    assert "ready when asked for" not in text
    assert left(prepared) == []


def test_a_set_up_that_fails_is_unscored_with_its_output_and_not_tried_for_ever(prepared):
    script = prepared.directory / "task/environment/setup.sh"
    script.write_text(f"echo once >> {prepared.directory}/builds; echo no such package >&2; exit 5\n")
    report = prepared.json("run", "task", *prepared.options, "--samples", "8", "-o", "retries=1", expect=1)
    summary = report["evaluations"][0]["summary"]
    assert summary["unscored"] == {"sandbox_error": 8}
    assert "exit code 5" in summary["because"]["sandbox_error"]
    assert "no such package" in summary["because"]["sandbox_error"]
    assert builds(prepared) == 2
    assert left(prepared) == []


@pytest.mark.parametrize("moment", [0.0, 0.3, 1.5], ids=["at once", "while it prepares", "while episodes run"])
def test_a_run_that_is_stopped_leaves_nothing(prepared, moment):
    script = prepared.directory / "task/environment/setup.sh"
    script.write_text("sleep 0.5; echo 3 > prepared.txt\n")
    (prepared.directory / "task/solution/solve.sh").write_text("sleep 0.5; cp prepared.txt count.txt\n")
    run = prepared.start("run", "task", *prepared.options, "--samples", "50", "--concurrency", "4")
    deadline = time.monotonic() + 30
    while not prepared.sandboxes.is_dir():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(moment)
    for _ in range(2):  # once finishes what runs, twice stops now
        run.send_signal(signal.SIGINT)
        time.sleep(0.1)
    run.communicate(timeout=60)
    assert run.returncode == 130
    assert set(left(prepared)) <= {"snapshot"}


KILLS = int(os.environ.get("SANDBOX_KILLS", "2"))


@pytest.mark.parametrize("moment", range(KILLS))
@pytest.mark.parametrize("sandbox", ["copying", pytest.param("local", marks=pytest.mark.needs("userns"))])
def test_whatever_a_killed_run_leaves_the_next_one_removes(prepared, sandbox, moment):
    script = prepared.directory / "task/environment/setup.sh"
    script.write_text("sleep 0.5; echo 3 > prepared.txt\n")
    options = (*prepared.options, "--sandbox", sandbox)
    run = prepared.start("run", "task", *options, "--samples", "50", "--concurrency", "4")
    deadline = time.monotonic() + 30
    while not prepared.sandboxes.is_dir():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    # While it prepares, while it freezes, while it fills the pool, while episodes run: any moment will do.
    time.sleep(random.Random(f"{sandbox} {moment}").uniform(0, 2.5))
    run.send_signal(signal.SIGKILL)
    run.communicate()
    prepared.json("run", "task", *options, "--samples", "1", "--name", "after")
    assert set(left(prepared)) <= {"snapshot"}
    listed = prepared.json("sandbox", "list", *prepared.options[:2], "--sandbox", sandbox, *prepared.options[-2:])
    assert listed["sandboxes"] == []
    assert len(listed["snapshots"]) == 1
    prepared.run("sandbox", "prune", "--all", *prepared.options[:2], "--sandbox", sandbox, *prepared.options[-2:])
    assert left(prepared) == []
    found = subprocess.run(["pgrep", "-f", str(prepared.sandboxes)], capture_output=True, text=True, check=False)
    assert found.stdout == ""
    assert str(prepared.sandboxes) not in Path("/proc/self/mounts").read_text()


def test_sandboxes_are_expected_in_the_order_in_which_they_will_be_needed():
    episodes = [[spec(f"/agent{n}"), spec(f"/verifier{n}")] for n in range(4)]
    order = [s.environment.workdir for s in in_order_of_need(episodes, 2)]
    assert order == [
        "/agent0",
        "/agent1",
        "/verifier0",
        "/agent2",
        "/verifier1",
        "/agent3",
        "/verifier2",
        "/verifier3",
    ]
    assert [s.environment.workdir for s in in_order_of_need([[], [spec("/a")]], 9)] == ["/a"]


def spec(workdir: str) -> SandboxSpec:
    return SandboxSpec(environment=EnvironmentSpec(workdir=workdir))
