"""Snapshots and forks of the local sandbox: what the kit does not ask, and what lies on the disk meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rl_harness.contracts.sandbox import Limits, Sandbox, SandboxSpec
from rl_harness.errors import SandboxError, Unsupported
from rl_harness.sandboxes.local import LocalProvider, provider, snapshots, storage

pytestmark = pytest.mark.needs("userns")

GENERATIONS = 18


def records(state: Path) -> dict[str, dict[str, object]]:
    found = state.glob("snapshot-*/snapshot.json")
    return {path.parent.name: json.loads(path.read_text()) for path in found}


def folders(state: Path) -> set[str]:
    return {path.name for path in state.glob("snapshot-*")}


async def output(sandbox: Sandbox, command: str) -> str:
    result = await sandbox.exec(command, timeout=60)
    assert result.ok, result
    return result.stdout.decode()


async def next_generation(local: LocalProvider, sandbox: Sandbox) -> Sandbox:
    snapshot = await sandbox.snapshot()
    await sandbox.close()
    child = await local.create(SandboxSpec(snapshot=snapshot))
    await local.delete_snapshot(snapshot)
    return child


LISTING = r"""
for top in /app /usr/share/perl5 /opt; do
  find $top -printf '%p %y %m %U:%G %l\n' 2>/dev/null | sort
  find $top -type f 2>/dev/null | sort | while read -r name; do cksum "$name"; done
done
"""


def random_script(chance: random.Random) -> str:
    """Makes, removes, moves and replaces within a few names, in the sandbox's own and in the system's directories."""
    names = [
        f"{top}/{name}" for top in ("/app", "/opt", "/usr/share/perl5") for name in ("a", "b", "a/x", "b/y", "a/x/z")
    ]
    lines = []
    for _ in range(12):
        one, other = chance.choice(names), chance.choice(names)
        lines.append(
            chance.choice(
                (
                    f"mkdir -p {one}",
                    f"rm -rf {one}; mkdir -p {one}; echo {chance.random()} > {one}/new",
                    f"rm -rf {one}",
                    f"[ -d {one} ] || echo {chance.random()} > {one}",
                    f"echo {chance.random()} >> {one}",
                    f"rm -rf {other}; mv {one} {other}",
                    f"rm -rf {other}; ln {one} {other}",
                    f"rm -rf {other}; ln -s {one} {other}",
                    f"chmod {chance.choice(('700', '755', '1777', '640'))} {one}",
                    f"mkdir -p {one} && touch {one}/f && chmod 2755 {one}",
                    "rm -rf /usr/share/perl5; mkdir /usr/share/perl5",
                    "rm -rf /usr/share/perl5/*",
                )
            )
        )
    return "cd /\n" + "\n".join(f"({line}) 2>/dev/null" for line in lines) + "\ntrue"


async def test_whatever_is_done_survives_any_number_of_snapshots(local: LocalProvider, tmp_path: Path) -> None:
    chance = random.Random(20260731)
    sandbox = await local.create(SandboxSpec())
    for generation in range(GENERATIONS):
        script = random_script(chance)
        await output(sandbox, script)
        before = await output(sandbox, LISTING)
        sandbox = await next_generation(local, sandbox)
        assert await output(sandbox, LISTING) == before, f"generation {generation}, after\n{script}"
        for record in records(tmp_path / "state").values():
            assert len(record["layers"]) <= snapshots.MAX_LAYERS  # type: ignore[arg-type]
    await sandbox.close()
    assert list((tmp_path / "state").iterdir()) == []


async def test_a_snapshot_is_as_small_and_as_harmless_as_can_be(local: LocalProvider, tmp_path: Path) -> None:
    parent = await local.create(SandboxSpec())
    await output(
        parent,
        "truncate -s 1T sparse; printf end | dd of=sparse bs=1 seek=1000000 conv=notrunc 2>/dev/null;"
        "cp /bin/true suid; chmod 6755 suid; touch -d 2001-02-03 old; mkdir d; touch -d 2001-02-04 d",
    )
    snapshot = await parent.snapshot()
    (info,) = await local.snapshots()
    assert info.size is not None
    assert info.size < 10_000_000
    modes = [path.stat().st_mode for path in (tmp_path / "state" / snapshot).rglob("*") if path.is_file()]
    assert modes
    assert not [mode for mode in modes if mode & 0o6000]
    child = await local.create(SandboxSpec(snapshot=snapshot))
    shown = await output(
        child, "stat -c %s sparse; tail -c +1000001 sparse | head -c 3; echo; stat -c %a suid; date -r old +%F"
    )
    assert shown == f"{1 << 40}\nend\n755\n2001-02-03\n"
    assert await output(child, "date -r d +%F") == "2001-02-04\n"
    assert (tmp_path / "state" / snapshot / "fs").stat().st_mode & 0o077 == 0


async def test_attributes_and_access_lists_are_kept(local: LocalProvider) -> None:
    if not Path("/usr/bin/python3").exists():
        pytest.skip("no /usr/bin/python3 to run inside")
    parent = await local.create(SandboxSpec())
    attributes = "import os; os.setxattr('/app/f', 'user.note', b'kept'); os.setxattr('/app', 'user.note', b'top')"
    await output(parent, f'touch f; /usr/bin/python3 -c "{attributes}"')
    child = await local.create(SandboxSpec(snapshot=await parent.snapshot()))
    show = "import os; print(os.getxattr('/app/f', 'user.note'), os.getxattr('/app', 'user.note'))"
    assert await output(child, f'/usr/bin/python3 -c "{show}"') == "b'kept' b'top'\n"


async def test_sandboxes_in_memory_are_frozen_too(tmp_path: Path) -> None:
    provider = LocalProvider(LocalProvider.Options(storage="memory", state_dir=tmp_path / "state"))
    parent = await provider.create(SandboxSpec())
    await output(
        parent, "head -c 3M /dev/zero > file; rm /usr/bin/env; rm -rf /etc/alternatives; mkdir /etc/alternatives"
    )
    (fork,) = await parent.fork(1)
    shown = "wc -c < file; ls /usr/bin/env 2>/dev/null; ls /etc/alternatives; true"
    assert await output(fork, shown) == "3145728\n"
    again = await provider.create(SandboxSpec(snapshot=await fork.snapshot()))
    assert await output(again, shown) == "3145728\n"
    await provider.close()


async def test_a_limit_on_disk_counts_what_is_written_since(local: LocalProvider) -> None:
    parent = await local.create(SandboxSpec(limits=Limits(disk=20 << 20)))
    await output(parent, "head -c 15M /dev/zero > file")
    (fork,) = await parent.fork(1)
    await output(fork, "head -c 15M /dev/zero > other")
    assert (await fork.exec("head -c 15M /dev/zero > third")).exit_code != 0


async def test_deleting_waits_for_the_last_one_that_stands_on_it(local: LocalProvider, tmp_path: Path) -> None:
    state = tmp_path / "state"
    parent = await local.create(SandboxSpec())
    await output(parent, "echo first > file")
    first = await parent.snapshot()
    await parent.close()
    child = await local.create(SandboxSpec(snapshot=first))
    await output(child, "echo second > other")
    second = await child.snapshot()
    await local.delete_snapshot(first)
    assert [info.id for info in await local.snapshots()] == [second]
    assert folders(state) == {first, second}
    await child.close()
    assert folders(state) == {first, second}, "the second still stands on the first"
    grandchild = await local.create(SandboxSpec(snapshot=second))
    await local.delete_snapshot(second)
    assert await output(grandchild, "cat file other") == "first\nsecond\n"
    await grandchild.close()
    assert list(state.iterdir()) == []


async def test_starting_and_deleting_at_once_is_either_whole_or_refused(local: LocalProvider, tmp_path: Path) -> None:
    other = LocalProvider(LocalProvider.Options(state_dir=tmp_path / "state"))
    parent = await local.create(SandboxSpec())
    await output(parent, "echo whole > file")
    started = 0
    for delay in (0.0, 0.0005, 0.001, 0.002, 0.004, 0.008):
        snapshot = await parent.snapshot()

        async def start(snapshot: str = snapshot) -> bool:
            try:
                sandbox = await other.create(SandboxSpec(snapshot=snapshot))
            except SandboxError as error:
                if "no snapshot" not in str(error):
                    raise
                return False
            assert await output(sandbox, "cat file") == "whole\n"
            await sandbox.close()
            return True

        starting = [asyncio.create_task(start()) for _ in range(3)]
        await asyncio.sleep(delay)
        await local.delete_snapshot(snapshot)
        started += sum(await asyncio.gather(*starting))
    await parent.close()
    await other.close()
    assert started > 0
    assert list((tmp_path / "state").iterdir()) == []


def test_threads_that_list_one_folder_at_once_all_see_all_of_it(tmp_path: Path) -> None:
    """Those who look for what stands on a snapshot, each while others do: one that was not seen lost its layers."""
    expected = sorted(f"{storage.SANDBOX}{number}" for number in range(2000))
    for name in expected:
        (tmp_path / name).touch()
    state = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with ThreadPoolExecutor(8) as pool:
            for found in pool.map(lambda _: sorted(storage.names(state)), range(64)):
                assert found == expected
    finally:
        os.close(state)


async def test_a_snapshot_belongs_to_its_root(local: LocalProvider, tmp_path: Path) -> None:
    parent = await local.create(SandboxSpec())
    snapshot = await parent.snapshot()
    root = tmp_path / "root"
    (root / "bin").mkdir(parents=True)
    other = LocalProvider(LocalProvider.Options(root=root, state_dir=tmp_path / "state"))
    with pytest.raises(Unsupported, match="made on another root"):
        await other.create(SandboxSpec(snapshot=snapshot))
    await other.close()


async def test_fingerprints_tell_roots_and_their_states_apart(tmp_path: Path) -> None:
    async def fingerprint(root: Path | None) -> dict[str, str]:
        provider = LocalProvider(LocalProvider.Options(root=root, state_dir=tmp_path / "state"))
        found = await provider.fingerprint(SandboxSpec())
        await provider.close()
        return dict(found)

    root = tmp_path / "root"
    (root / "usr/bin").mkdir(parents=True)
    tool = root / "usr/bin/tool"
    tool.write_text("one")
    os.utime(tool, ns=(1, 1))
    first = await fingerprint(root)
    assert await fingerprint(root) == first
    tool.write_text("two")
    os.utime(tool, ns=(2, 2))
    assert await fingerprint(root) != first
    assert await fingerprint(None) == await fingerprint(None)
    assert await fingerprint(None) != first


async def test_what_a_crash_of_the_machine_may_have_torn_is_not_used(
    local: LocalProvider, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    parent = await local.create(SandboxSpec())
    torn = await parent.snapshot()
    safe = await parent.snapshot()
    snapshots.sync(local._state_fd, [safe])
    await parent.close()
    monkeypatch.setattr(storage, "boot_id", lambda: "the next boot")
    monkeypatch.setattr(provider, "owner_alive", lambda _: False)
    assert [info.id for info in await local.snapshots()] == [safe]
    with pytest.raises(SandboxError, match="no snapshot"):
        await local.create(SandboxSpec(snapshot=torn))
    assert await local.reap() == 1
    assert folders(tmp_path / "state") == {safe}


async def test_snapshots_are_on_the_disk_when_the_provider_is_closed(tmp_path: Path) -> None:
    provider = LocalProvider(LocalProvider.Options(state_dir=tmp_path / "state"))
    snapshot = await (await provider.create(SandboxSpec())).snapshot()
    await provider.close()
    assert (tmp_path / "state" / snapshot / "synced").exists()


async def test_a_closed_provider_says_so(tmp_path: Path) -> None:
    provider = LocalProvider(LocalProvider.Options(state_dir=tmp_path / "state"))
    sandbox = await provider.create(SandboxSpec())
    await provider.close()
    for refused in (sandbox.snapshot(), sandbox.fork(1), provider.snapshots(), provider.delete_snapshot("x")):
        with pytest.raises(SandboxError, match="is closed"):
            await refused


async def test_a_fork_cancelled_when_all_are_made_leaves_none(
    local: LocalProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = await local.create(SandboxSpec())
    made = asyncio.Event()
    delete = local.delete_snapshot

    async def noticed(snapshot: str) -> None:
        made.set()
        await delete(snapshot)

    monkeypatch.setattr(local, "delete_snapshot", noticed)
    forking = asyncio.create_task(parent.fork(3))
    await made.wait()
    forking.cancel()
    await asyncio.wait([forking])
    assert forking.cancelled()
    assert [info.id for info in await local.list()] == [parent.id]


async def test_closing_a_provider_while_it_forks_leaves_nothing(tmp_path: Path) -> None:
    for delay in (0.0, 0.005, 0.02, 0.05):
        provider = LocalProvider(LocalProvider.Options(state_dir=tmp_path / "state"))
        sandbox = await provider.create(SandboxSpec())
        forking = asyncio.create_task(sandbox.fork(4))
        await asyncio.sleep(delay)
        await provider.close()
        await asyncio.wait([forking])
        error = forking.exception()
        assert error is None or isinstance(error, SandboxError), error
        assert list((tmp_path / "state").iterdir()) == []


async def test_trees_that_are_too_deep_are_refused_and_nothing_is_left(local: LocalProvider, tmp_path: Path) -> None:
    sandbox = await local.create(SandboxSpec())
    await output(sandbox, "for n in $(seq 210); do mkdir d; cd d; done")
    with pytest.raises(SandboxError, match="too many directories"):
        await sandbox.snapshot()
    with pytest.raises(SandboxError, match="too many directories"):
        await sandbox.fork(2)
    assert folders(tmp_path / "state") == set()
    assert await output(sandbox, "echo fine") == "fine\n"


@pytest.mark.needs("root")
async def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    """The state folder on a tmpfs of 24 MB, in a process that may mount it."""
    code = f"""
import asyncio, os
from rl_harness.contracts.sandbox import SandboxSpec
from rl_harness.errors import SandboxError
from rl_harness.sandboxes.local import LocalProvider, syscalls as sc
sc.unshare(sc.CLONE_NEWNS)
sc.mount(None, "/", None, sc.MS_REC | sc.MS_PRIVATE)
sc.mount("small", {str(tmp_path)!r}, "tmpfs", 0, "size=24m")

async def main():
    provider = LocalProvider(LocalProvider.Options(state_dir={str(tmp_path)!r}))
    sandbox = await provider.create(SandboxSpec())
    await sandbox.exec("head -c 15M /dev/zero > file")
    try:
        await sandbox.snapshot()
    except SandboxError as error:
        print(error)
    print((await sandbox.exec("rm file; echo fine")).stdout.decode(), end="")
    await provider.close()
    print(os.listdir({str(tmp_path)!r}))

asyncio.run(main())
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "could not be frozen: freeze: No space left on device" in child.stdout, child
    assert child.stdout.splitlines()[-2:] == ["fine", "[]"], child


async def test_an_agent_that_kills_everything_cannot_have_half_a_snapshot_taken(
    local: LocalProvider, tmp_path: Path
) -> None:
    sandbox = await local.create(SandboxSpec())
    await output(sandbox, "for n in $(seq 800); do echo $n > $n; done")
    killing = asyncio.create_task(sandbox.exec("while :; do sleep 0.02; kill -9 -1; done", timeout=600))
    whole = 0
    for _ in range(3):
        if killing.done():
            killing = asyncio.create_task(sandbox.exec("while :; do sleep 0.02; kill -9 -1; done", timeout=600))
        try:
            snapshot = await sandbox.snapshot()
        except SandboxError as error:
            if "could not be frozen" not in str(error):
                raise
            continue
        child = await local.create(SandboxSpec(snapshot=snapshot))
        assert await output(child, "ls | wc -l") == "800\n"
        await child.close()
        await local.delete_snapshot(snapshot)
        whole += 1
    await sandbox.close()
    await asyncio.wait([killing])
    assert list((tmp_path / "state").iterdir()) == []


async def test_why_a_sandbox_died_is_told(local: LocalProvider, tmp_path: Path) -> None:
    old = await local.create(SandboxSpec(lifetime=0.2))
    assert "its lifetime has passed" in await old.died()
    killed = await local.create(SandboxSpec())
    dying = asyncio.create_task(killed.died())
    await asyncio.sleep(0)
    os.kill(json.loads((tmp_path / "state" / killed.id / "init.json").read_text())["pid"], signal.SIGKILL)
    assert "its first process was killed" in await dying


async def test_one_that_is_closed_has_not_died(local: LocalProvider) -> None:
    sandbox = await local.create(SandboxSpec())
    dying = asyncio.create_task(sandbox.died())
    await asyncio.sleep(0)
    await sandbox.close()
    await asyncio.sleep(0.05)
    assert not dying.done()
    dying.cancel()
    await asyncio.wait([dying])


# ------------------------------------------------------------------------------------- killed at any moment


CLIENT = """
import asyncio, os, sys
from rl_harness.contracts.sandbox import SandboxSpec
from rl_harness.sandboxes.local import LocalProvider

async def main():
    provider = LocalProvider(LocalProvider.Options(state_dir=sys.argv[1]))
    await (await provider.create(SandboxSpec())).close()
    print(provider._starting.result()._process.pid, flush=True)
    while True:
        sandbox = await provider.create(SandboxSpec())
        await sandbox.exec("for n in 1 2 3 4 5 6 7 8 9; do echo $n > $n; done; (sleep 600 &)")
        snapshot = await sandbox.snapshot(key="k")
        child = await provider.create(SandboxSpec(snapshot=snapshot))
        forks = await child.fork(3)
        await provider.delete_snapshot(snapshot)
        await asyncio.gather(sandbox.close(), child.close(), *(fork.close() for fork in forks))

asyncio.run(main())
"""


@pytest.fixture
def client(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", CLIENT, str(tmp_path / "state")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("moment", range(4))
@pytest.mark.parametrize("helper", ["lives", "dies"])
async def test_whenever_a_client_is_killed_nothing_is_left_after_reaping(
    client: subprocess.Popen[str], local: LocalProvider, tmp_path: Path, moment: int, helper: str
) -> None:
    state, seed = tmp_path / "state", random.randrange(1 << 32)
    assert client.stdout is not None
    pid = int(client.stdout.readline())
    await asyncio.sleep(random.Random(seed).random() * 0.4)
    if helper == "dies":
        os.kill(pid, signal.SIGKILL)
    client.kill()
    client.wait()
    await local.reap()
    assert await local.list() == [], f"seed {seed}"
    for info in await local.snapshots():
        sandbox = await local.create(SandboxSpec(snapshot=info.id))
        assert await output(sandbox, "cat [0-9] | tr -d '\\n'") == "123456789", f"seed {seed}"
        await sandbox.close()
        await local.delete_snapshot(info.id)
    for _ in range(1000):  # its helper, where it lives, may be about the same
        left = list(state.iterdir())
        if not left:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"left: {left} (seed {seed})")


async def test_closing_waits_for_what_a_cancelled_caller_had_begun(local: LocalProvider, tmp_path: Path) -> None:
    sandbox = await local.create(SandboxSpec())
    assert (await sandbox.exec("for i in $(seq 2000); do echo > $i; done")).ok
    snapshot = await sandbox.snapshot()
    await sandbox.close()
    removing = asyncio.create_task(local.delete_snapshot(snapshot))
    while not removing.done() and (tmp_path / "state" / snapshot).exists():  # noqa: ASYNC110 -- nothing tells of it
        await asyncio.sleep(0)
    removing.cancel()
    await local.close()
    assert list((tmp_path / "state").iterdir()) == []
