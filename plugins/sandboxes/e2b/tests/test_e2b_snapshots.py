"""Snapshots and standing still at E2B: what it does differently from what the contract asks, and how that is met."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rl_harness.contracts.sandbox import EnvironmentSpec, Limits, SandboxSpec, SetupStep
from rl_harness.errors import SandboxError, Unsupported
from rl_harness.sandboxes.snapshots import Snapshots
from rl_harness_e2b import records
from rl_harness_e2b.provider import E2BProvider
from rl_harness_e2b.records import Records, new_name, own_name

SPEC = SandboxSpec(labels={"run": "snapshots"})
KEY = "0123456789abcdef" * 4


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 -- another process sets no event here
            await asyncio.sleep(0.02)


kept_by_e2b = pytest.mark.needs("userns", "e2b")


def test_a_plain_key_is_in_the_name_and_any_other_is_not(tmp_path) -> None:
    kept = Records(tmp_path)
    assert kept.read(own_name(f"team/{new_name(KEY)}:default") or "").key == KEY
    assert kept.read(new_name("Key with blanks/:")).key == ""
    assert own_name("team/base:default") is None
    name = new_name("Any key: é")
    kept.new(name, "Any key: é", {"a": "b"}, ["boot"])
    assert kept.read(name).key == "Any key: é"
    assert [kept.read(name).labels, kept.names()] == [{"a": "b"}, [name]]
    (tmp_path / f"{name}.json").write_text("{")
    assert kept.read(name).labels == {}


@kept_by_e2b
async def test_another_machine_finds_a_snapshot_by_its_key(provider: E2BProvider, stand_in, tmp_path) -> None:
    snapshot = await (await provider.create(SPEC)).snapshot(key=KEY, labels={"a": "b"})
    other = E2BProvider(E2BProvider.Options(state_dir=tmp_path / "elsewhere"))
    [found] = await other.snapshots()
    assert (found.id, found.key) == (snapshot, KEY)
    assert abs(found.created_at - time.time()) < 100
    await (await other.create(SandboxSpec(snapshot=snapshot))).close()
    await other.delete_snapshot(snapshot)
    assert await provider.snapshots() == []
    await other.close()


@kept_by_e2b
async def test_a_snapshot_in_use_is_gone_for_everybody_and_deleted_when_it_is_free(
    provider: E2BProvider, stand_in
) -> None:
    """E2B refuses to delete what running sandboxes started from."""
    parent = await provider.create(SPEC)
    snapshot = await parent.snapshot()
    name = own_name(snapshot)
    child = await provider.create(SandboxSpec(snapshot=snapshot))
    await provider.delete_snapshot(snapshot)
    assert await provider.snapshots() == []
    assert name in stand_in.ask("templates")
    with pytest.raises(SandboxError, match="was deleted"):
        await provider.create(SandboxSpec(snapshot=snapshot))
    assert (await child.exec("echo fine")).stdout == b"fine\n"
    await child.close()
    await until(lambda: Records(records.state_home()).names() == [])
    assert name not in stand_in.ask("templates")


@kept_by_e2b
async def test_where_files_only_cannot_be_had_the_memory_comes_along(provider: E2BProvider, stand_in) -> None:
    stand_in.ask("full_snapshots_only")
    parent = await provider.create(SPEC)
    await parent.exec("echo kept > file")
    child = await provider.create(SandboxSpec(snapshot=await parent.snapshot()))
    assert (await child.exec("cat file")).stdout == b"kept\n"


@kept_by_e2b
async def test_snapshots_are_listed_across_pages(provider: E2BProvider, stand_in) -> None:
    stand_in.ask("page", size=2)
    sandbox = await provider.create(SPEC)
    made = {await sandbox.snapshot(key=f"k{number}", labels={"n": str(number)}) for number in range(5)}
    assert {info.id for info in await provider.snapshots()} == made
    assert [info.key for info in await provider.snapshots({"n": "3"})] == ["k3"]


@kept_by_e2b
async def test_a_command_loses_nothing_while_its_machine_stands_still(provider: E2BProvider, stand_in) -> None:
    """A snapshot, a fork and a pause cut every stream at E2B."""
    sandbox = await provider.create(SPEC)
    script = "n=0; while [ $n -lt 4000 ]; do n=$((n+1)); echo $n; [ $((n % 100)) = 0 ] && sleep 0.05; done; exit 3"
    running = asyncio.create_task(sandbox.exec(script))
    reader = await sandbox.spawn("cat; echo end >&2")
    await reader.write(b"before\n")
    await asyncio.sleep(0.3)
    await sandbox.snapshot()
    await sandbox.fork(2)
    await sandbox.pause()
    with pytest.raises(SandboxError, match="paused"):
        await sandbox.exec("true")
    await sandbox.resume()
    await reader.write(b"after\n")
    await reader.close_stdin()
    result = await running
    assert result.exit_code == 3
    assert result.stdout == b"".join(b"%d\n" % n for n in range(1, 4001))
    output = [item async for item in reader.output()]
    assert b"".join(chunk for name, chunk in output if name == "stdout") == b"before\nafter\n"
    assert await reader.wait() == 0


@kept_by_e2b
async def test_no_process_of_the_parent_runs_in_a_fork(provider: E2BProvider, stand_in) -> None:
    sandbox = await provider.create(SPEC)
    await sandbox.exec("sleep 600 & sleep 600 &")
    (fork,) = await sandbox.fork(1)
    assert (await fork.exec("grep -lz '^sleep' /proc/[0-9]*/cmdline; true")).stdout == b""
    assert (await sandbox.exec("grep -lz '^sleep' /proc/[0-9]*/cmdline | wc -l")).stdout.strip() == b"2"


@kept_by_e2b
async def test_many_forks_are_asked_for_in_portions(provider: E2BProvider, stand_in) -> None:
    sandbox = await provider.create(SPEC)
    forks = await sandbox.fork(23)
    assert len({fork.id for fork in forks}) == 23
    assert stand_in.ask("calls")[f"POST /sandboxes/{sandbox.id}/fork"] == 2


@kept_by_e2b
async def test_a_snapshot_of_a_machine_of_another_size_is_refused(provider: E2BProvider, stand_in) -> None:
    made = await provider.create(SandboxSpec(limits=Limits(memory=512 << 20, cpus=2), labels={"run": "made"}))
    snapshot = await made.snapshot()
    for limits in (Limits(memory=256 << 20), Limits(memory=1024 << 20), Limits(cpus=1), Limits(cpus=4)):
        with pytest.raises(Unsupported, match=r"MiB of memory|cpus"):
            await provider.create(SandboxSpec(limits=limits, snapshot=snapshot))
    await provider.create(SandboxSpec(limits=Limits(memory=512 << 20), snapshot=snapshot))


@pytest.mark.needs("root", "userns", "e2b")
async def test_every_size_of_machine_is_prepared_once_and_had_by_whoever_asks_for_it(
    provider: E2BProvider, stand_in, tmp_path: Path
) -> None:
    """As in a run whose tasks share an environment and differ in their limits."""
    from e2b import AsyncSandbox

    (tmp_path / "Dockerfile").write_text("FROM python:3.12\n")
    environment = EnvironmentSpec(
        dockerfile=tmp_path / "Dockerfile", setup=(SetupStep(name="setup.sh", script="echo made > made"),)
    )
    snapshots = Snapshots(provider, identity="e2b 1", state=tmp_path / "uses")
    sizes = (1024, 512, 2048)
    for size in (*sizes, *sizes):
        spec = SandboxSpec(environment=environment, limits=Limits(memory=size << 20), labels={"run": str(size)})
        sandbox = await snapshots.create(spec)
        assert (await AsyncSandbox.get_info(sandbox.id)).memory_mb == size
        assert await sandbox.read_file("/app/made") == b"made\n"
        await sandbox.close()
    await snapshots.close()
    assert (snapshots.counts.built, snapshots.counts.started) == (len(sizes), 2 * len(sizes))
    assert stand_in.ask("calls")["POST /v3/templates"] == len(sizes)


@kept_by_e2b
async def test_a_sandbox_that_is_out_of_time_is_paused_when_asked_for(stand_in) -> None:
    provider = E2BProvider(E2BProvider.Options(on_timeout="pause"))
    sandbox = await provider.create(SandboxSpec(labels={"run": "auto"}, lifetime=1.0))
    await sandbox.write_file("/app/file", b"kept")
    assert "paused by E2B: its time was over" in await sandbox.died()
    assert not await sandbox.alive()
    other = E2BProvider(E2BProvider.Options())
    assert (await (await other.connect(sandbox.id)).exec("cat file")).stdout == b"kept"
    await other.close()
    await provider.close()
    assert stand_in.running() == []


@kept_by_e2b
async def test_a_long_life_is_asked_for_bit_by_bit(stand_in, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in.ask("plan", hours=1)
    provider = E2BProvider(E2BProvider.Options())
    sandbox = await provider.create(SandboxSpec(labels={"run": "long"}, lifetime=7_200.0))
    [seen] = stand_in.running()
    assert seen["timeout"] == 3_600
    monkeypatch.setattr(sandbox, "_longest", 1.5)
    kept = asyncio.create_task(sandbox._keep())
    await until(lambda: stand_in.running()[0]["ends_at"] != seen["ends_at"])
    kept.cancel()
    await provider.close()
