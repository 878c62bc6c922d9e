"""The local provider's own promises: options, limits, diagnoses, hostile replies."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rl_harness.contracts.sandbox import EnvironmentSpec, Limits, SandboxSpec
from rl_harness.errors import SandboxError, Unavailable, Unsupported
from rl_harness.sandboxes.local import LocalProvider, cgroups, diagnosis, seccomp, storage
from rl_harness.sandboxes.local.channel import Channel, StartFailed
from rl_harness.sandboxes.local.limits import MEMORY_HEADROOM, plan
from rl_harness.shortages import shortage

userns = pytest.mark.needs("userns")


@userns
@pytest.mark.skipif(not shutil.which("ldd"), reason="no ldd to collect a root file system with")
async def test_a_given_root_file_system_is_used_and_left_untouched(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for program in ("/bin/sh", "/bin/cat", "/bin/mkdir", "/bin/rm"):
        listing = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for path in [program, *(word for word in listing.split() if word.startswith("/"))]:
            (root / path[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, root / path[1:])
    (root / "given").write_text("original")
    provider = LocalProvider(LocalProvider.Options(root=root, state_dir=tmp_path / "state"))
    await provider.preflight()
    sandbox = await provider.create(SandboxSpec())
    result = await sandbox.exec("cat /given; echo changed > /given; rm /bin/rm; mkdir /new; cat /given")
    assert result.stdout == b"originalchanged\n"
    assert {"/given", "/bin/rm", "/new"} <= set(await sandbox.changes())
    await provider.close()
    assert (root / "given").read_text() == "original"
    assert (root / "bin/rm").exists()


@userns
async def test_when_memory_runs_out_sandboxes_are_the_first_to_go(tmp_path: Path) -> None:
    provider = LocalProvider(LocalProvider.Options(state_dir=tmp_path / "state"))
    sandbox = await provider.create(SandboxSpec())
    result = await sandbox.exec("echo -1000 > /proc/self/oom_score_adj; cat /proc/self/oom_score_adj")
    assert result.stdout == b"1000\n"
    await provider.close()


async def test_a_root_file_system_that_is_not_there_is_named(tmp_path: Path) -> None:
    provider = LocalProvider(LocalProvider.Options(root=tmp_path / "missing", state_dir=tmp_path / "state"))
    with pytest.raises(Unavailable, match=r"sandbox\.root: there is no directory .*missing") as refusal:
        await provider.preflight()
    assert refusal.value.exit_code == 2


@userns
async def test_storage_in_memory_leaves_nothing_on_disk(tmp_path: Path) -> None:
    provider = LocalProvider(LocalProvider.Options(storage="memory", state_dir=tmp_path / "state"))
    sandbox = await provider.create(SandboxSpec())
    assert (await sandbox.exec("head -c 3M /dev/zero > file; rm /usr/bin/env; wc -c < file")).stdout == b"3145728\n"
    assert "/usr/bin/env" in await sandbox.changes()
    written = [path for path in (tmp_path / "state").rglob("*") if path.is_file() and path.suffix != ".json"]
    assert written == []
    await provider.close()


@userns
async def test_a_configured_limit_on_memory_holds_whatever_the_task_says(tmp_path: Path) -> None:
    provider = LocalProvider(LocalProvider.Options(memory="100MiB", state_dir=tmp_path / "state"))
    sandbox = await provider.create(SandboxSpec(limits=Limits(memory=1 << 30)))
    assert (await sandbox.exec("dd if=/dev/zero of=/dev/null bs=20M count=1")).ok
    assert not (await sandbox.exec("dd if=/dev/zero of=/dev/null bs=300M count=1", timeout=60)).ok
    await provider.close()


@userns
async def test_without_namespaces_preflight_says_how_to_get_them(tmp_path: Path) -> None:
    """In a user namespace whose own limit of user namespaces is 0, as an administrator sets it for the machine."""
    code = f"""
import asyncio, ctypes, os
from rl_harness.errors import Unavailable
from rl_harness.sandboxes.local import LocalProvider
uid = os.getuid()
assert ctypes.CDLL(None).unshare(0x10000000) == 0
open("/proc/self/uid_map", "w").write(f"1000 {{uid}} 1")
open("/proc/sys/user/max_user_namespaces", "w").write("0")
try:
    asyncio.run(LocalProvider(LocalProvider.Options(state_dir={str(tmp_path / "state")!r})).preflight())
except Unavailable as error:
    print(error)
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "sysctl user.max_user_namespaces" in child.stdout, child
    assert "choose another sandbox" in child.stdout


@userns
async def test_where_a_seccomp_profile_forbids_namespaces_preflight_says_so(tmp_path: Path) -> None:
    code = f"""
import asyncio
from rl_harness.errors import Unavailable
from rl_harness.sandboxes.local import LocalProvider, seccomp, syscalls
syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
syscalls.set_seccomp(seccomp.build())
try:
    asyncio.run(LocalProvider(LocalProvider.Options(state_dir={str(tmp_path / "state")!r})).preflight())
except Unavailable as error:
    print(error)
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "cannot start: unshare" in child.stdout, child
    assert "remedy: " in child.stdout


async def test_a_state_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    provider = LocalProvider(LocalProvider.Options(state_dir=tmp_path / "file/state"))
    with pytest.raises(Unavailable, match=r"file/state.*\n.*-o sandbox.state_dir=DIR") as refusal:
        await provider.list()
    assert refusal.value.exit_code == 2


@userns
@pytest.mark.needs("root")
async def test_a_full_disk_is_an_error_of_the_sandbox_and_leaves_nothing(tmp_path: Path) -> None:
    """On a tmpfs of one page that is then filled, in a process that may mount it."""
    code = f"""
import asyncio, os
from pathlib import Path
from rl_harness.contracts.sandbox import SandboxSpec
from rl_harness.errors import SandboxError
from rl_harness.sandboxes.local import LocalProvider, syscalls as sc
sc.unshare(sc.CLONE_NEWNS)
sc.mount(None, "/", None, sc.MS_REC | sc.MS_PRIVATE)
state = Path({str(tmp_path)!r})
sc.mount("small", str(state), "tmpfs", 0, "size=64k")

async def main():
    provider = LocalProvider(LocalProvider.Options(state_dir=state))
    await provider.preflight()
    with open(state / "filler", "wb", buffering=0) as filler:
        try:
            while filler.write(bytes(4096)):
                pass
        except OSError:
            pass
    try:
        await provider.create(SandboxSpec())
    except SandboxError as error:
        print(error)
    print(sorted(os.listdir(state)))
    await provider.close()

asyncio.run(main())
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"{tmp_path}, cannot be written: No space left on device" in child.stdout, child
    assert f"no space left in {tmp_path}: free some there, also with rl-harness sandbox prune, or -o" in child.stdout
    assert child.stdout.splitlines()[-1] == "['filler']"


@pytest.mark.parametrize(
    ("number", "step", "told"),
    [
        (
            errno.ENOSPC,
            "write its record",
            r"no space left in STATE: free .*sandbox prune, or -o sandbox.state_dir=DIR$",
        ),
        (errno.ENOSPC, "set up", "no space left in STATE"),
        (errno.EDQUOT, "start", "disk quota of this user is used up in STATE: free some"),
        (errno.EROFS, "start", r"STATE is on a file system that is mounted read-only: -o sandbox.state_dir=DIR$"),
        (errno.EMFILE, "ask the helper", "too many files open: raise its limit .ulimit -n."),
        (errno.ENFILE, "start helper", "machine has too many files open: .*fs.file-max"),
        (errno.ENOMEM, "fork", "memory ran out: lower the concurrency"),
        (errno.EAGAIN, "fork", "too many processes: .*ulimit -u"),
    ],
)
def test_what_ran_out_is_told_and_not_a_profile_that_forbids_namespaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, step: str, told: str
) -> None:
    """A full disk was told to be a seccomp profile."""
    monkeypatch.setattr(diagnosis, "_in_container", lambda: True)
    found = diagnosis.remedy(StartFailed(step, number), tmp_path)
    assert re.search(told.replace("STATE", str(tmp_path)), found), found
    assert "seccomp" not in found


@pytest.mark.parametrize("step", ["unshare", "mount overlay on /x"])
def test_a_limit_on_namespaces_or_mounts_is_not_told_to_be_a_full_disk(tmp_path: Path, step: str) -> None:
    """The kernel says of these, too, that no space is left."""
    assert "no space left" not in diagnosis.remedy(StartFailed(step, errno.ENOSPC), tmp_path)


def test_a_file_system_without_inodes_is_told_from_a_full_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = os.statvfs(tmp_path)
    none = os.statvfs_result([*status[:7], 0, *status[8:]])  # f_favail
    monkeypatch.setattr(os, "statvfs", lambda path: none)
    found = shortage(errno.ENOSPC, tmp_path, "elsewhere")
    assert found is not None
    assert found.what == f"no inode left (too many files) in {tmp_path}"


@userns
async def test_a_workspace_without_room_for_it_names_the_remedy(tmp_path: Path) -> None:
    workspace = tmp_path / "task/environment/workspace"
    workspace.mkdir(parents=True)
    (workspace / "big").write_bytes(bytes(3 << 20))
    provider = LocalProvider(LocalProvider.Options(state_dir=tmp_path / "state"))
    spec = SandboxSpec(environment=EnvironmentSpec(directory=workspace.parent), limits=Limits(disk=1 << 20))
    with pytest.raises(SandboxError, match=r"No space left on device\n  remedy: .*storage_mb in task.toml"):
        await provider.create(spec)
    await provider.close()


@userns
async def test_a_sandbox_whose_record_cannot_be_written_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fills up between its folder and its process: nobody could find that process later."""
    provider = LocalProvider(LocalProvider.Options(state_dir=tmp_path / "state"))
    await provider.preflight()
    write = storage.write

    def full(state: int, path: str, content: dict[str, object]) -> None:
        if path.endswith(storage.INIT):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(state, path, content)

    monkeypatch.setattr(storage, "write", full)
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
    with pytest.raises(SandboxError, match="write its record: No space left on device"):
        await provider.create(SandboxSpec())
    await provider.close()
    assert failures == []
    assert list((tmp_path / "state").iterdir()) == []


def test_limits_are_planned_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    every = dict.fromkeys(cgroups.CONTROLLERS, "/somewhere")
    monkeypatch.setattr(cgroups, "parents", lambda: every)
    limits = Limits(memory=1 << 30, pids=10, cpus=0.5, disk=1 << 20)
    planned = plan(limits, processes=99, in_memory=False)
    assert (planned.processes, planned.address_space, planned.disk) == (10, None, 1 << 20)
    assert planned.groups == {"memory": (1 << 30) + MEMORY_HEADROOM + (1 << 20), "cpus": 0.5}
    monkeypatch.setattr(cgroups, "parents", dict)
    with pytest.raises(Unsupported, match="cpus"):
        plan(limits, processes=99, in_memory=False)
    planned = plan(Limits(memory=1 << 30), processes=99, in_memory=False)
    assert (planned.processes, planned.address_space, planned.disk, planned.groups) == (99, 1 << 30, None, {})


def test_groups_of_a_unified_hierarchy_go_where_controllers_are_handed_down(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/user.slice/user@1.service/app.slice/shell.scope\n")
    inner = tmp_path / "user.slice/user@1.service/app.slice/shell.scope"
    inner.mkdir(parents=True)
    for directory in (inner, *inner.parents):
        if directory.is_relative_to(tmp_path):
            (directory / "cgroup.procs").write_text("")
            (directory / "cgroup.subtree_control").write_text("")
    (inner.parent / "cgroup.subtree_control").write_text("memory hugetlb\n")
    assert cgroups.parents(str(tmp_path), str(own)) == {"memory": str(inner.parent)}
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory pids\n")
    assert cgroups.parents(str(tmp_path), str(own)) == dict.fromkeys(cgroups.CONTROLLERS, str(tmp_path))


@userns
@pytest.mark.needs("root")
async def test_control_groups_hold_the_limits_and_go_away(local: LocalProvider) -> None:
    if set(cgroups.parents()) != set(cgroups.CONTROLLERS):
        pytest.skip("not all controllers are available here")
    sandbox = await local.create(SandboxSpec(limits=Limits(memory=64 << 20, pids=20, cpus=0.5)))
    groups = [Path(path) / sandbox.id for path in set(cgroups.parents().values())]
    assert all(path.is_dir() for path in groups)
    assert all((path / "cgroup.procs").read_text().strip() for path in groups)
    await sandbox.close()
    assert not any(path.exists() for path in groups)


@pytest.mark.parametrize("reply", [b"[1]", b"nonsense", b"\xff\xfe", b"9" * 5000, b"{" * 50_000])
async def test_a_malformed_reply_is_the_death_of_the_sandbox(reply: bytes) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(ours, "hostile", lambda _: None)
    answer = channel.request({"op": "exec"})
    theirs.send(reply)
    with pytest.raises(SandboxError, match="malformed"):
        await answer
    assert not channel.alive
    theirs.close()


def _descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def test_replies_nobody_asked_for_are_ignored() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(ours, "confused", lambda _: None)
    answer = channel.request({"op": "exec"})
    before = _descriptors()
    socket.send_fds(theirs, [b'{"id": 77, "status": 0}'], [0, 1, 2])
    theirs.send(b'{"id": "x"}')
    theirs.send(b'{"id": 1, "status": 0}')
    assert (await answer)["status"] == 0
    assert _descriptors() == before, "descriptors sent by the sandbox were kept"
    channel.close("done")
    theirs.close()


async def test_requests_wait_for_a_busy_init() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(ours, "busy", lambda _: None)
    answers = [channel.request({"op": "exec", "padding": "x" * 50_000}) for _ in range(50)]
    theirs.setblocking(False)
    for number in range(1, 51):
        while True:
            try:
                assert theirs.recv(60_000).startswith(b'{"id": %d,' % number)
                break
            except BlockingIOError:
                await asyncio.sleep(0)
        theirs.send(b'{"id": %d}' % number)
    await asyncio.gather(*answers)
    channel.close("done")
    theirs.close()


@pytest.mark.parametrize("machine", sorted(seccomp.MACHINES))
def test_the_filter_is_well_formed(machine: str) -> None:
    program = seccomp.build(machine)
    count = len(program) // 8
    assert len(program) % 8 == 0
    for index in range(count):
        code, true, false = (
            int.from_bytes(program[8 * index : 8 * index + 2], sys.byteorder),
            *program[8 * index + 2 : 8 * index + 4],
        )
        if code & 7 == 5:  # a jump stays inside the program
            assert index + 1 + max(true, false) < count


async def test_a_relative_working_directory_is_refused(local: LocalProvider) -> None:
    with pytest.raises(Unsupported, match="workdir"):
        await local.create(SandboxSpec(environment=EnvironmentSpec(workdir="app")))
