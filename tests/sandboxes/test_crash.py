"""Whatever dies, whenever: no process, control group or file of a local sandbox outlives its run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rl_harness.contracts.sandbox import Limits, SandboxSpec
from rl_harness.errors import SandboxError
from rl_harness.sandboxes.local import LocalProvider, storage

pytestmark = pytest.mark.needs("userns")

OWNER = """
import asyncio, json, sys
from rl_harness.contracts.sandbox import Limits, SandboxSpec
from rl_harness.sandboxes.local import LocalProvider

async def main():
    provider = LocalProvider(LocalProvider.Options(state_dir=sys.argv[1]))
    sandbox = await provider.create(SandboxSpec(labels={"run": "r1"}, limits=Limits(memory=1 << 30)))
    await sandbox.exec("(setsid sleep 600 &)")
    helper = provider._starting.result()._process.pid
    print(json.dumps({"helper": helper}), flush=True)
    await sandbox.exec("sleep 600")

asyncio.run(main())
"""


class Owner:
    """Another process that has a sandbox open."""

    def __init__(self, state: Path) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", OWNER, str(state)], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.helper: int = json.loads(self.process.stdout.readline())["helper"]
        (self.record,) = _records(state).values()
        self.init: int = self.record["pid"]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    state = tmp_path / "state"
    owner = Owner(state)
    yield owner
    owner.kill()


def _records(state: Path) -> dict[str, dict[str, Any]]:
    descriptor = os.open(state, os.O_RDONLY)
    try:
        return storage.read_records(descriptor)
    finally:
        os.close(descriptor)


async def eventually(condition: Callable[[], bool], what: str) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"never: {what}")


def dead(pid: int) -> bool:
    return storage.process_start(pid) is None


async def test_nothing_outlives_a_killed_owner(owner: Owner, tmp_path: Path) -> None:
    owner.kill()
    await eventually(lambda: dead(owner.init), "init is dead")
    await eventually(lambda: dead(owner.helper), "the helper is gone")
    assert list((tmp_path / "state").iterdir()) == []
    assert not [path for path in owner.record["cgroups"] if Path(path).exists()]


async def test_when_the_helper_dies_too_the_reaper_finishes(owner: Owner, tmp_path: Path, local: LocalProvider) -> None:
    os.kill(owner.helper, signal.SIGKILL)
    owner.kill()
    await eventually(lambda: dead(owner.init), "init is dead")
    (info,) = await local.list({"run": "r1"})
    assert (info.owner_alive, info.provider, dict(info.labels)) == (False, "local", {"run": "r1"})
    assert await local.reap({"run": "another"}) == 0
    assert await local.reap({"run": "r1"}) == 1
    assert await local.list() == []
    assert list((tmp_path / "state").iterdir()) == []
    assert not [path for path in owner.record["cgroups"] if Path(path).exists()]


async def test_a_living_owner_is_spared_unless_forced(owner: Owner, local: LocalProvider) -> None:
    assert await local.reap() == 0
    assert not dead(owner.init)
    assert await local.reap(force=True) == 1
    assert dead(owner.init)


async def test_a_dead_sandbox_is_noticed_at_once(local: LocalProvider, tmp_path: Path) -> None:
    sandbox = await local.create(SandboxSpec(limits=Limits(memory=1 << 30)))
    running = asyncio.create_task(sandbox.exec("sleep 600"))
    await asyncio.sleep(0)
    (record,) = _records(tmp_path / "state").values()
    os.kill(record["pid"], signal.SIGKILL)
    with pytest.raises(SandboxError, match="is gone"):
        await running
    assert not await sandbox.alive()
    with pytest.raises(SandboxError):
        await sandbox.exec("true")
    await sandbox.close()
    assert list((tmp_path / "state").iterdir()) == []


async def test_a_command_killed_with_its_sandbox_has_no_result(local: LocalProvider, tmp_path: Path) -> None:
    """The kernel kills init's processes before init is seen dead, so the end of a command may be told first."""
    sandbox = await local.create(SandboxSpec())
    running = asyncio.create_task(sandbox.exec("exec sleep 611.611"))
    await eventually(lambda: bool(_named("611.611")), "the command runs")
    (command,) = _named("611.611")
    (record,) = _records(tmp_path / "state").values()
    os.kill(command, signal.SIGKILL)
    while _named("611.611"):
        pass
    time.sleep(0.05)  # noqa: ASYNC251 - the loop must not run until both the answer and the death are there to be read
    os.kill(record["pid"], signal.SIGKILL)
    with pytest.raises(SandboxError, match="is gone"):
        await running
    await sandbox.close()


def _named(argument: str) -> list[int]:
    """Host pids of processes whose last argument this is."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes().endswith(f"\0{argument}\0".encode()):
                found.append(int(path.parent.name))
    return found


async def test_a_command_that_kills_itself_has_one(local: LocalProvider) -> None:
    sandbox = await local.create(SandboxSpec())
    assert (await sandbox.exec("kill -9 $$")).signal == signal.SIGKILL


async def test_sandboxes_survive_their_helper_and_the_next_one_gets_another(local: LocalProvider) -> None:
    first = await local.create(SandboxSpec())
    assert local._starting is not None
    os.kill(local._starting.result()._process.pid, signal.SIGKILL)
    await eventually(lambda: not local._starting.result().alive, "the helper is dead")  # type: ignore[union-attr]
    second = await local.create(SandboxSpec())
    for sandbox in (first, second):
        assert (await sandbox.exec("echo fine")).stdout == b"fine\n"


async def test_a_cancelled_run_leaves_nothing(tmp_path: Path) -> None:
    def run() -> None:
        async def main() -> None:
            provider = LocalProvider(LocalProvider.Options(state_dir=tmp_path / "state"))
            sandbox = await provider.create(SandboxSpec())
            background = asyncio.create_task(sandbox.exec("sleep 600"))
            await asyncio.sleep(0)
            closing = asyncio.create_task(sandbox.close())
            await asyncio.sleep(0)
            assert background
            assert closing  # the loop ends here, and cancels both

        asyncio.run(main())

    await asyncio.to_thread(run)
    assert list((tmp_path / "state").iterdir()) == []


async def test_many_at_once(local: LocalProvider, tmp_path: Path) -> None:
    async def one(number: int) -> bytes:
        sandbox = await local.create(SandboxSpec())
        result = await sandbox.exec(f"echo {number}")
        await sandbox.close()
        return result.stdout

    assert await asyncio.gather(*(one(n) for n in range(24))) == [b"%d\n" % n for n in range(24)]
    assert list((tmp_path / "state").iterdir()) == []


def test_an_owner_that_dies_while_its_helper_starts_leaves_nothing_and_says_nothing(tmp_path: Path) -> None:
    code = """
import asyncio, os, sys
from rl_harness.contracts.sandbox import SandboxSpec
from rl_harness.sandboxes.local import LocalProvider, helper

helper.protocol.receive = lambda *_, **__: os.kill(os.getpid(), 9)  # where it would wait for the helper
asyncio.run(LocalProvider(LocalProvider.Options(state_dir=sys.argv[1])).create(SandboxSpec()))
"""
    command = [sys.executable, "-c", code, str(tmp_path / "state")]
    owner = subprocess.run(command, stderr=subprocess.PIPE, check=False)  # ends when the helper, too, has closed it
    assert (owner.returncode, owner.stderr) == (-signal.SIGKILL, b"")
    assert list((tmp_path / "state").iterdir()) == []


async def test_what_another_machine_or_container_owns_is_left_alone(local: LocalProvider, tmp_path: Path) -> None:
    """Whose state folder is shared with it, perhaps: its processes cannot be seen from here."""
    sandbox = await local.create(SandboxSpec())
    path = tmp_path / "state" / sandbox.id / storage.RECORD
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"process": "0123456789abcdef-1-0123456789abcdef"}))
    assert [info.owner_alive for info in await local.list()] == [None]
    assert await local.reap() == 0
    assert await sandbox.alive()
    assert await local.reap(force=True) == 1
