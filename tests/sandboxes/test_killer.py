"""The program that kills processes where no other program can be believed."""

from __future__ import annotations

import hashlib
import os
import platform
import runpy
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from rl_harness.contracts.sandbox import SandboxSpec
from rl_harness.sandboxes.local import LocalProvider
from rl_harness.sandboxes.remote import killer, list_processes

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or not Path("/proc/self/stat").exists(), reason="a program for Linux on x86_64"
)

KERNEL_THREAD = 0x200000


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "killer"
    path.write_bytes(killer.program())
    path.chmod(0o755)
    return str(path)


def run(*argv: str) -> bytes:
    return subprocess.run(argv, check=True, capture_output=True, timeout=60).stdout


def test_the_program_is_made_of_the_source_beside_it() -> None:
    source = Path(killer.__file__).with_name("killer.c").read_bytes()
    assert b"source:" + hashlib.sha256(source).hexdigest().encode() in killer.program(), "run tools/killer.py"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_the_source_makes_a_program_that_lists(tmp_path: Path) -> None:
    tool = Path(__file__).parents[2] / "tools/killer.py"
    runpy.run_path(str(tool))["make"](tmp_path / "k")
    assert f"{os.getpid()}:".encode() in run(f"{tmp_path}/k", "list")


@pytest.mark.parametrize("way", ["program", "shell"])
def test_kernel_threads_are_no_processes(way: str, program: str) -> None:
    listed = run(program, "list") if way == "program" else run(*list_processes())
    pids = {int(word.partition(b":")[0]) for word in listed.split()}
    assert os.getpid() in pids
    for pid in pids - {os.getpid()}:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        assert not int(fields[6]) & KERNEL_THREAD, f"{pid} is a kernel thread"


def test_only_the_exact_variable_marks_a_process(program: str) -> None:
    started = [
        subprocess.Popen(["sleep", "600"], env={"FILL": "x" * 100_000, name: value})
        for name, value in (("TEST_MARK", "ab"), ("TEST_MARK", "abc"), ("TEST_MARK", "a"), ("A_TEST_MARK", "ab"))
    ]
    try:
        assert killer.killed(run(program, "marked", "TEST_MARK=ab"))
        assert started[0].wait(60) == -signal.SIGKILL
        assert [process.poll() for process in started[1:]] == [None] * 3
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.needs("userns")
async def test_everything_is_killed_but_what_is_spared_also_while_more_keeps_appearing(tmp_path: Path) -> None:
    provider = LocalProvider(LocalProvider.Options(state_dir=tmp_path))
    sandbox = await provider.create(SandboxSpec())
    await sandbox.write_file("/opt/killer", killer.program(), mode=0o755)
    await sandbox.exec("sleep 600 & echo $! > service")
    spare = (await sandbox.exec(["/opt/killer", "list"])).stdout.decode().split()
    storm = "setsid bash -c 'while :; do (while :; do sleep 0.01 & done) & sleep 0.2; done' >/dev/null 2>&1 &"
    await sandbox.exec(["bash", "-c", f"ulimit -u 300; {storm}"])
    result = await sandbox.exec(["/opt/killer", "all", *spare], timeout=60)
    assert killer.killed(result.stdout), result
    assert (await sandbox.exec('kill -0 "$(cat service)"')).ok
    now = (await sandbox.exec(["/opt/killer", "list"])).stdout.decode().split()
    names = await sandbox.exec(["sh", "-c", "cat /proc/[0-9]*/comm | sort | uniq -c"])
    assert names.stdout.count(b"sleep") == 1, (now, names)
    await provider.close()
