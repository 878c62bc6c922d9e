"""Environments are prepared once, by one process, for everybody; and what cannot be prepared says why."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from rl_harness.contracts import EnvironmentSpec, NetworkPolicy, SandboxSpec, SetupStep
from rl_harness.errors import SandboxError, SetupFailed, TaskError, Unsupported
from rl_harness.sandboxes.process import ProcessProvider
from rl_harness.sandboxes.snapshots import Snapshots


def spec(script: str, **environment) -> SandboxSpec:
    return SandboxSpec(
        environment=EnvironmentSpec(setup=(SetupStep(name="environment/setup.sh", script=script),), **environment),
        network=NetworkPolicy.FULL,
        labels={"run": "r1", "episode": "e1"},
    )


@pytest.fixture
def snapshots(copying, tmp_path):
    return make(copying, tmp_path)


def make(provider, tmp_path, **options) -> Snapshots:
    return Snapshots(provider, identity="copying 1", state=tmp_path / "uses", labels={"run": "r1"}, **options)


def counted(tmp_path: Path, more: str = "") -> str:
    """A script that leaves a line outside every time it runs."""
    return f"echo once >> {tmp_path}/builds; {more}\necho made > made; chmod 600 made"


def builds(tmp_path: Path) -> int:
    path = tmp_path / "builds"
    return path.read_text().count("once") if path.exists() else 0


async def contents(sandbox) -> tuple[bytes, bytes]:
    mode = await sandbox.exec("stat -c %a made")
    return await sandbox.read_file("/app/made"), mode.stdout.strip()


async def test_set_up_runs_once_for_sixteen_sandboxes_which_do_not_see_each_other(snapshots, copying, tmp_path):
    wanted = spec(counted(tmp_path, "sleep 0.2"))
    sandboxes = await asyncio.gather(*(snapshots.create(wanted) for _ in range(16)))
    assert builds(tmp_path) == 1
    assert {await contents(sandbox) for sandbox in sandboxes} == {(b"made\n", b"600")}
    await sandboxes[0].write_file("/app/made", b"mine")
    assert await sandboxes[1].read_file("/app/made") == b"made\n"
    assert snapshots.counts.built == 1
    assert snapshots.counts.started == 16
    (info,) = await copying.snapshots()
    assert {sandbox.snapshot for sandbox in await copying.list()} == {info.id}
    assert all(sandbox.labels["role"] != "setup" for sandbox in await copying.list() if "role" in sandbox.labels)


async def test_another_run_finds_the_snapshot(snapshots, copying, tmp_path):
    wanted = spec(counted(tmp_path))
    await snapshots.prepared(wanted)
    later = make(copying, tmp_path)
    assert await contents(await later.create(wanted)) == (b"made\n", b"600")
    assert builds(tmp_path) == 1
    assert later.counts.found == 1


async def test_another_step_is_another_environment(snapshots, tmp_path):
    await snapshots.prepared(spec(counted(tmp_path)))
    await snapshots.prepared(spec(counted(tmp_path, "true")))
    assert builds(tmp_path) == 2


async def test_steps_run_in_order_in_the_working_directory_with_their_variables(copying, tmp_path):
    workspace = tmp_path / "task/environment/workspace"
    workspace.mkdir(parents=True)
    (workspace / "given").write_text("given ")
    steps = (
        SetupStep(name="one", script='cat given > all; printf %s "$WORD" >> all', env={"WORD": "one "}),
        SetupStep(name="two", script='printf "two $WORD" >> all; sleep 60 & exit 0'),
    )
    wanted = SandboxSpec(
        environment=EnvironmentSpec(directory=workspace.parent, setup=steps), network=NetworkPolicy.FULL
    )
    sandbox = await make(copying, tmp_path).create(wanted)
    assert await sandbox.read_file("/app/all") == b"given one two "


async def test_a_failing_step_fails_every_waiter_with_its_name_code_and_output(snapshots, copying, tmp_path):
    wanted = spec(counted(tmp_path, "sleep 0.1; echo no such package >&2; exit 3"))
    results = await asyncio.gather(*(snapshots.create(wanted) for _ in range(8)), return_exceptions=True)
    assert {str(result) for result in results} == {
        "set-up step 'environment/setup.sh' failed with exit code 3:\nno such package"
    }
    assert all(isinstance(result, SandboxError) for result in results)
    assert builds(tmp_path) == 1
    assert await copying.list() == []
    assert await copying.snapshots() == []


@pytest.mark.needs("userns")
async def test_a_step_that_takes_the_shell_away_fails_by_its_name(local, tmp_path):
    snapshots = Snapshots(local, identity="local 1", state=tmp_path / "uses")
    wanted = spec("rm -f /bin/sh /usr/bin/sh /bin/bash /usr/bin/bash")
    wanted = msgspec.structs.replace(wanted, network=NetworkPolicy.NONE)
    with pytest.raises(SetupFailed, match=r"after set-up step 'environment/setup.sh' no command runs any more"):
        await snapshots.create(wanted)
    assert await local.snapshots() == []
    assert await local.list() == []


async def test_what_cannot_be_a_snapshot_names_the_file_and_is_not_tried_for_ever(copying, tmp_path, monkeypatch):
    async def refuse(self, *, key="", labels=None):
        raise Unsupported("the image keeps /data on volumes", remedy="remove VOLUME")

    monkeypatch.setattr(copying.sandbox_class, "snapshot", refuse)
    wanted = spec(counted(tmp_path), directory=tmp_path / "job/environment")
    (tmp_path / "job/environment").mkdir(parents=True)
    snapshots = make(copying, tmp_path, retries=1)
    for _ in range(4):
        with pytest.raises(
            Unsupported, match=r"job/environment: .* after environment/setup.sh: .*keeps /data"
        ) as refusal:
            await snapshots.create(wanted)
        assert refusal.value.remedy == "remove VOLUME"
    assert builds(tmp_path) == 2


async def test_a_failing_build_is_tried_again_within_the_budget_only(copying, tmp_path):
    snapshots = make(copying, tmp_path, retries=2)
    for _ in range(6):
        with pytest.raises(SandboxError, match="exit code 3"):
            await snapshots.create(spec(counted(tmp_path, "exit 3")))
    assert builds(tmp_path) == 3


async def test_a_step_that_hangs_says_so(snapshots):
    wanted = spec("echo before; sleep 60")
    step = msgspec.structs.replace(wanted.environment.setup[0], timeout=0.3)
    wanted = msgspec.structs.replace(wanted, environment=msgspec.structs.replace(wanted.environment, setup=(step,)))
    with pytest.raises(SandboxError, match=r"did not end within 0.3 s:\nbefore"):
        await snapshots.create(wanted)


async def test_a_cancelled_waiter_does_not_cancel_the_build_of_the_others(snapshots, tmp_path):
    wanted = spec(counted(tmp_path, "sleep 0.3"))
    waiters = [asyncio.create_task(snapshots.create(wanted)) for _ in range(3)]
    await until(lambda: builds(tmp_path))
    waiters[0].cancel()  # the one that started it
    done = await asyncio.gather(*waiters, return_exceptions=True)
    assert isinstance(done[0], asyncio.CancelledError)
    assert [await contents(sandbox) for sandbox in done[1:]] == [(b"made\n", b"600")] * 2
    assert builds(tmp_path) == 1


async def test_the_last_waiter_takes_the_build_with_it_and_nothing_is_left(snapshots, copying, tmp_path):
    wanted = spec(counted(tmp_path, "sleep 60"))
    waiters = [asyncio.create_task(snapshots.create(wanted)) for _ in range(2)]
    await until(lambda: builds(tmp_path))
    for waiter in waiters:
        waiter.cancel()
    await asyncio.gather(*waiters, return_exceptions=True)
    assert await copying.list() == []
    assert [path.name for path in (tmp_path / "state").iterdir()] == []


async def test_whoever_comes_after_a_cancelled_build_starts_anew(snapshots, tmp_path):
    wanted = spec(f"[ -e {tmp_path}/builds ] && fast=1; {counted(tmp_path, '[ $fast ] || sleep 60')}")
    first = asyncio.create_task(snapshots.create(wanted))
    await until(lambda: builds(tmp_path))
    first.cancel()
    await asyncio.sleep(0)  # it leaves, and its build is being cancelled
    assert await contents(await snapshots.create(wanted)) == (b"made\n", b"600")
    assert builds(tmp_path) == 2


async def test_without_snapshots_set_up_runs_in_every_sandbox_and_that_is_said_once(process, tmp_path):
    said: list[str] = []
    snapshots = make(process, tmp_path, note=said.append)
    for _ in range(2):
        assert await contents(await snapshots.create(spec(counted(tmp_path)))) == (b"made\n", b"600")
    assert builds(tmp_path) == 2
    assert said == ["set-up runs anew in every sandbox: this sandbox has no snapshots"]
    with pytest.raises(SandboxError, match="exit code 1"):
        await snapshots.create(spec("exit 1"))
    assert len(await process.list()) == 2


async def test_an_environment_with_nothing_to_prepare_starts_plainly(snapshots, copying, tmp_path):
    (tmp_path / "environment/workspace").mkdir(parents=True)
    (tmp_path / "environment/workspace/small").write_text("x")
    for environment in (EnvironmentSpec(), EnvironmentSpec(directory=tmp_path / "environment")):
        await snapshots.create(SandboxSpec(environment=environment, network=NetworkPolicy.FULL))
    assert await copying.snapshots() == []
    (tmp_path / "environment/workspace/large").write_bytes(bytes(2 << 20))
    large = EnvironmentSpec(directory=tmp_path / "environment", env={"LARGE": "1"})
    sandbox = await snapshots.create(SandboxSpec(environment=large, network=NetworkPolicy.FULL))
    assert len(await copying.snapshots()) == 1
    assert await sandbox.read_file("/app/small") == b"x"


async def test_a_snapshot_that_was_removed_meanwhile_is_made_again(snapshots, copying, tmp_path):
    wanted = spec(counted(tmp_path))
    await snapshots.create(wanted)
    (info,) = await copying.snapshots()
    await copying.delete_snapshot(info.id)
    assert await contents(await snapshots.create(wanted)) == (b"made\n", b"600")
    assert builds(tmp_path) == 2


BUILDER = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {here!r})
from rl_harness.plugins import load_registry
from rl_harness.contracts import *
from rl_harness.sandboxes.snapshots import Snapshots

async def main():
    provider = load_registry([Path({example!r})]).create("sandboxes", "copying", {{"state_dir": {state!r}}})
    step = SetupStep(name="s", script={script!r})
    spec = SandboxSpec(environment=EnvironmentSpec(setup=(step,)), network=NetworkPolicy.FULL, labels={{"run": "r"}})
    snapshots = Snapshots(provider, identity="copying 1", state=Path({uses!r}))
    sandbox = await snapshots.create(spec)
    print((await sandbox.read_file("/app/made")).decode(), flush=True)
    await sandbox.close()
    await snapshots.close()

asyncio.run(main())
"""


def builder(tmp_path: Path, script: str) -> subprocess.Popen[bytes]:
    here = Path(__file__)
    code = BUILDER.format(
        here=str(here.parent),
        example=str(here.parents[2] / "examples/copying_sandbox.py"),
        state=str(tmp_path / "state"),
        script=script,
        uses=str(tmp_path / "uses"),
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)


async def test_processes_build_it_once_between_them(copying, tmp_path):
    script = counted(tmp_path, "sleep 1")
    running = [builder(tmp_path, script) for _ in range(3)]
    outputs = [await asyncio.to_thread(process.communicate) for process in running]
    assert [out.strip() for out, _ in outputs] == [b"made"] * 3
    assert builds(tmp_path) == 1
    assert len(await copying.snapshots()) == 1


async def test_a_process_killed_while_it_builds_does_not_stop_another(copying, tmp_path):
    script = f"[ -e {tmp_path}/builds ] && fast=1; {counted(tmp_path, '[ $fast ] || sleep 60')}"
    first = builder(tmp_path, script)
    await until(lambda: builds(tmp_path))
    second = builder(tmp_path, script)
    await asyncio.sleep(0.3)
    first.kill()
    first.wait()
    out, _ = await asyncio.to_thread(second.communicate)
    assert out.strip() == b"made"
    assert builds(tmp_path) == 2
    await copying.reap()
    assert await copying.list() == []
    assert len(await copying.snapshots()) == 1
    assert sorted(path.name.split("-")[0] for path in (tmp_path / "state").iterdir()) == ["snapshot"]


async def until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


class Fetching:
    """Stands before a provider that has no images, and takes its time over the first sandbox of one."""

    def __init__(self, provider) -> None:
        self.provider = provider
        self.capabilities = provider.capabilities
        self.specs: list[SandboxSpec] = []
        self.fetched = False
        self.error: SandboxError | None = None

    async def fingerprint(self, spec):
        return {}

    async def create(self, wanted):
        self.specs.append(wanted)
        if not self.fetched:
            await asyncio.sleep(0.2)
            assert len(self.specs) == 1, "another one was created while the image was being fetched"
            if self.error is not None:
                self.specs.clear()
                raise self.error
            self.fetched = True
        bare = msgspec.structs.replace(wanted.environment, image=None, setup=())
        return await self.provider.create(msgspec.structs.replace(wanted, environment=bare))


async def test_an_image_is_fetched_by_one_sandbox_before_the_others_start(process, tmp_path):
    provider = Fetching(process)
    snapshots = make(provider, tmp_path)
    wanted = SandboxSpec(environment=EnvironmentSpec(image="x"), network=NetworkPolicy.FULL, labels={"run": "r1"})
    sandboxes = await asyncio.gather(*(snapshots.create(wanted) for _ in range(6)))
    assert len({sandbox.id for sandbox in sandboxes}) == 6
    assert len(provider.specs) == 6
    assert len(await process.list()) == 6


async def test_an_image_that_cannot_be_fetched_fails_everybody_within_the_budget(process, tmp_path):
    provider = Fetching(process)
    provider.error = SandboxError("no such image: x")
    snapshots = make(provider, tmp_path, retries=0)
    wanted = SandboxSpec(environment=EnvironmentSpec(image="x"), network=NetworkPolicy.FULL)
    for _ in range(2):
        results = await asyncio.gather(*(snapshots.create(wanted) for _ in range(4)), return_exceptions=True)
        assert {str(result) for result in results} == {"no such image: x"}


async def test_set_up_in_every_sandbox_is_not_taken_from_its_lifetime(process, tmp_path):
    provider = Fetching(process)
    wanted = msgspec.structs.replace(spec("true"), lifetime=100.0)
    provider.fetched = True
    await make(provider, tmp_path).create(wanted)
    assert provider.specs[0].lifetime == 100.0 + wanted.environment.setup[0].timeout


async def test_an_image_is_ready_and_not_said_to_be_built(copying, tmp_path):
    """It was said to be built each time, also when it was there."""
    source = make(WithImages(ProcessProvider.Options(state_dir=tmp_path / "images")), tmp_path, enabled=False)
    spec = SandboxSpec(environment=EnvironmentSpec(image="debian"), network=NetworkPolicy.FULL)
    assert [await source.build(spec), await source.build(spec)] == ["ready", "ready"]


class WithImages(ProcessProvider):
    async def create(self, spec):
        bare = msgspec.structs.replace(spec.environment, image=None)
        return await super().create(msgspec.structs.replace(spec, environment=bare))


async def test_files_that_change_between_attempts_are_not_kept_under_the_old_key(snapshots, copying, tmp_path):
    workspace = tmp_path / "task/environment/workspace"
    workspace.mkdir(parents=True)
    (workspace / "f").write_text("1")
    (workspace / "fail").write_text("")
    wanted = spec("test ! -e fail", directory=workspace.parent)
    with pytest.raises(SetupFailed):
        await snapshots.create(wanted)
    (workspace / "f").write_text("2")
    (workspace / "fail").unlink()
    with pytest.raises(TaskError, match="changed while"):
        await snapshots.create(wanted)
    assert await copying.snapshots() == []
    sandbox = await snapshots.create(wanted)  # the key is taken anew
    assert await sandbox.read_file("/app/f") == b"2"
    (workspace / "f").write_text("1")
    again = make(copying, tmp_path)
    assert await (await again.create(wanted)).read_file("/app/f") == b"1"


async def test_files_that_change_during_set_up_are_not_kept(snapshots, copying, tmp_path):
    workspace = tmp_path / "task/environment/workspace"
    workspace.mkdir(parents=True)
    (workspace / "f").write_text("1")
    wanted = spec(f"echo 2 > {workspace}/f", directory=workspace.parent)
    with pytest.raises(TaskError, match="changed while"):
        await snapshots.create(wanted)
    assert await copying.snapshots() == []
    assert await copying.list() == []
