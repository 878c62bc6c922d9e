"""``environment/setup.sh``: read from the task's folder, run before the agent and before a separate verifier."""

from __future__ import annotations

import os

import msgspec
import pytest
from rl_harness.contracts import SandboxCapabilities, SetupStep
from rl_harness.errors import TaskError
from rl_harness.sandboxes.snapshots import Snapshots
from rl_harness.tasks import check_task, load_task, unsupported, verify

SETUP = "environment/setup.sh"


def test_it_is_read_with_the_build_timeout_and_is_part_of_the_digest(write_task):
    toml = '[rl_harness]\nverifier = "separate"\n[environment]\nbuild_timeout_sec = 7\nnetwork_mode = "no-network"\n'
    without = load_task(write_task(toml, name="without"))
    task = load_task(write_task(toml, {SETUP: "echo hello\n"}, name="with"))
    assert without.environment.setup == ()
    assert task.environment.setup == (SetupStep(name=SETUP, script="echo hello\n", timeout=7.0),)
    assert task.verifier.environment.setup == task.environment.setup
    assert task.digest != without.digest


def test_in_a_task_of_harbors_it_is_a_file_like_any_other(write_task):
    task = load_task(write_task("[verifier]\ntimeout_sec = 5\n", {SETUP: "echo hello\n"}))
    assert task.environment.setup == ()


def test_line_ends_that_bash_does_not_understand_are_refused(write_task):
    directory = write_task()
    (directory / SETUP).write_bytes(b"echo hello\r\n")
    with pytest.raises(TaskError, match=r"setup\.sh: has CRLF"):
        load_task(directory)


def test_a_harness_installs_for_the_agent_only(write_task):
    task = load_task(write_task(None, {SETUP: "true\n"}))
    step = SetupStep(name="harness", script="install")
    assert task.sandbox_spec({}, setup=(step,)).environment.setup == (*task.environment.setup, step)
    assert task.verifier_spec({}).environment.setup == task.environment.setup


def test_a_shared_verifier_needs_snapshots_to_tell_set_up_from_tampering(write_task):
    toml = '[rl_harness]\nverifier = "shared"\n[environment]\nnetwork_mode = "no-network"\n'
    task = load_task(write_task(toml, {SETUP: "true\n"}))
    capabilities = SandboxCapabilities(changes=True)
    (reason,) = unsupported(task, capabilities)
    assert "set-up steps" in reason
    assert unsupported(task, msgspec.structs.replace(capabilities, snapshot="filesystem")) == []


TASK = {
    SETUP: "wc -l < names.txt > lines; mkdir /opt/tool; echo 'cat /app/lines' > /opt/tool/count\n",
    "solution/solve.sh": "sh /opt/tool/count > count.txt\n",
    "tests/test.sh": "[ $(cat count.txt) = $(sh /opt/tool/count) ] && echo 1 > /logs/verifier/reward.txt\n",
}


@pytest.mark.asyncio(loop_scope="module")
async def test_agent_and_verifier_both_start_from_what_it_made(write_task, provider, tmp_path):
    task = load_task(write_task(None, TASK))
    source = Snapshots(provider, identity="local 1", state=tmp_path / "uses")
    sandbox = await source.create(task.sandbox_spec({"run": "r"}))
    try:
        solved = await sandbox.exec(task.solution.joinpath("solve.sh").read_text())
        assert solved.exit_code == 0, solved.stderr
        verdict = await verify(task, sandbox, source, None, {"run": "r"})
    finally:
        await sandbox.close()
    assert verdict.reward == 1.0, verdict


@pytest.mark.asyncio(loop_scope="module")
async def test_checking_a_task_names_a_set_up_that_fails(write_task, provider, tmp_path):
    directory = write_task(None, {SETUP: "echo no such package >&2; exit 3\n"})
    report = await check_task(directory, Snapshots(provider, identity="local 1", state=tmp_path / "uses"))
    (problem,) = report.problems
    assert problem.file == directory / SETUP
    assert "exit code 3" in problem.message
    assert "no such package" in problem.message


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_what_is_no_script_is_an_error_that_names_it(write_task, make):
    directory = write_task()
    (directory / "environment").mkdir(exist_ok=True)
    make(directory / SETUP)
    with pytest.raises(TaskError, match=r"environment/setup.sh: cannot be read"):
        load_task(directory)
