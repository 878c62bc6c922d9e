"""What an agent in a local sandbox tries, and what comes of it (nothing)."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rl_harness.contracts.sandbox import Limits, Sandbox, SandboxSpec
from rl_harness.sandboxes.local import LocalProvider

pytestmark = pytest.mark.needs("userns")


REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
async def sandbox(local: LocalProvider) -> AsyncIterator[Sandbox]:
    sandbox = await local.create(SandboxSpec(labels={"run": "isolation"}))
    yield sandbox
    await sandbox.close()


async def output(sandbox: Sandbox, command: str) -> str:
    result = await sandbox.exec(command, timeout=60)
    return (result.stdout + result.stderr).decode()


async def python(sandbox: Sandbox, code: str) -> str:
    result = await sandbox.exec(["/usr/bin/python3", "-c", code], timeout=60)
    return (result.stdout + result.stderr).decode()


needs_python = pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="no /usr/bin/python3 to run inside")


async def test_nothing_of_the_host_beyond_its_system_directories_is_seen(sandbox: Sandbox) -> None:
    assert "No such file" in await output(sandbox, f"ls {REPOSITORY}")
    assert await output(sandbox, "find /root /home /opt /srv /mnt /media /tmp -mindepth 1") == "/home/agent\n"
    allowed = "app bin dev etc home lib lib32 lib64 libx32 logs media mnt opt proc root run sbin srv tmp usr var"
    assert set((await output(sandbox, "ls -A /")).split()) <= set(allowed.split())
    assert "shadow" not in await output(sandbox, "ls /etc /etc/ssl")
    assert "private" not in await output(sandbox, "ls /etc/ssl")


async def test_privileges_are_gone(sandbox: Sandbox) -> None:
    status = dict(
        line.split(":\t", 1) for line in (await output(sandbox, "cat /proc/self/status")).splitlines() if ":\t" in line
    )
    forbidden = {
        2: "dac_read_search",
        12: "net_admin",
        13: "net_raw",
        16: "sys_module",
        19: "sys_ptrace",
        21: "sys_admin",
    }
    for field in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        held = int(status[field], 16)
        assert not [name for bit, name in forbidden.items() if held >> bit & 1], field
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")


async def test_mounts_and_namespaces_are_refused(sandbox: Sandbox) -> None:
    for command in (
        "mount -t tmpfs x /mnt",
        "umount /proc",
        "unshare -U true",
        "unshare -m true",
        "nsenter -t 1 -m true",
    ):
        result = await sandbox.exec(command)
        assert not result.ok, command
        assert any(word in result.stderr for word in (b"permitted", b"denied", b"superuser")), result.stderr


@needs_python
async def test_dangerous_system_calls_are_refused(sandbox: Sandbox) -> None:
    code = """
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
numbers = {"x86_64": (101, 250, 321, 298, 425, 246, 310, 323), "aarch64": (117, 219, 280, 241, 425, 104, 270, 282)}
for number in numbers[os.uname().machine]:
    assert libc.syscall(number, 0, 0, 0, 0, 0) == -1 and ctypes.get_errno() == 1, number
for flag in (0x10000000, 0x20000000, 0x40000000, 0x20000):
    clone = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
    assert libc.syscall(clone, flag | 17, 0, 0, 0, 0) == -1 and ctypes.get_errno() == 1, flag
for family in (40, 38, 17):  # vsock, alg, packet
    try:
        socket.socket(family, socket.SOCK_STREAM if family != 17 else socket.SOCK_RAW)
        raise AssertionError(family)
    except OSError as error:
        assert error.errno == 97, error
import subprocess, threading
thread = threading.Thread(target=lambda: None); thread.start(); thread.join()
assert subprocess.run(["true"]).returncode == 0
print("refused")
"""
    assert await python(sandbox, code) == "refused\n"


async def test_init_cannot_be_killed_read_or_hampered(sandbox: Sandbox) -> None:
    await output(sandbox, "for n in 1 2 3 6 9 11 15 19; do kill -$n 1; done; true")
    for path in ("mem", "environ", "maps", "root/etc", "cwd/etc", "fd", "map_files", "stack", "syscall"):
        result = await sandbox.exec(f"head -c1 /proc/1/{path} || ls /proc/1/{path}/")
        assert not result.ok, path
    for command in (
        "echo 1000 > /proc/1/oom_score_adj",
        "renice 19 -p 1",
        "taskset -p 1 1",
        "chrt -i -p 0 1",
        "prlimit --pid 1 --cpu=1",
        "prlimit --pid 1 --nproc=1",
    ):
        result = await sandbox.exec(command)
        assert not result.ok, command
        assert result.exit_code != 127, command
    assert await output(sandbox, "echo alive") == "alive\n"


async def test_killing_everything_in_sight_ends_the_commands_not_the_sandbox(sandbox: Sandbox) -> None:
    other = asyncio.create_task(sandbox.exec("sleep 600", timeout=60))
    while "sleep" not in await output(sandbox, "cat /proc/*/comm"):
        pass
    result = await sandbox.exec(
        "(setsid sh -c 'while :; do echo >> /app/alive; sleep 0.01; done' &); sleep 0.1; kill -9 -1"
    )
    assert result.signal == 9
    assert (await other).signal == 9
    comms = (await output(sandbox, "cat /proc/*/comm")).split()
    assert "sleep" not in comms
    assert "sh" not in comms, "a child outlived the death of its worker"


async def test_a_stopped_worker_does_not_stop_the_timeout(sandbox: Sandbox) -> None:
    result = await sandbox.exec("(setsid sleep 600 &); kill -STOP $PPID; sleep 600", timeout=0.5)
    assert result.timed_out
    assert "sleep" not in (await output(sandbox, "cat /proc/*/comm")).split()


async def test_root_inside_is_nobody_outside(local: LocalProvider, tmp_path: Path) -> None:
    sandbox = await local.create(SandboxSpec())
    assert await output(sandbox, "id -u") == "0\n"
    running = asyncio.create_task(sandbox.exec("exec sleep 98765"))
    found: list[int] = []
    while not found:
        await asyncio.sleep(0.01)
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if path.read_bytes() == b"sleep\x0098765\x00":
                    found.append(path.parent.stat().st_uid)
            except OSError:
                continue
    assert found[0] != 0
    await sandbox.close()
    await asyncio.wait([running])


async def test_programs_replaced_by_the_agent_are_its_own_problem(sandbox: Sandbox) -> None:
    await sandbox.write_file("/tmp/fake", b"#!/bin/echo replaced\n", mode=0o755)
    for name in ("bash", "sh", "dash", "python3"):
        await sandbox.exec(["rm", f"/usr/bin/{name}"])
        await sandbox.exec(["cp", "/tmp/fake", f"/usr/bin/{name}"])
    assert "replaced" in await output(sandbox, "echo hello")
    changed = await sandbox.changes()
    assert {"/usr/bin/bash", "/usr/bin/sh", "/usr/bin/python3"} & set(changed)
    await sandbox.write_file("/app/file", b"still works")
    assert await sandbox.read_file("/app/file") == b"still works"
    assert Path("/bin/bash").read_bytes()[:4] == b"\x7fELF", "the host's bash"


async def test_deleting_everything_hurts_only_the_agent(sandbox: Sandbox) -> None:
    result = await sandbox.exec("rm -rf /app /etc /usr/bin /lib64 /tmp; echo gone")
    assert result.stdout == b"gone\n"
    assert (await sandbox.exec("ls")).exit_code in (126, 127)
    assert {"/usr/bin", "/etc", "/lib64", "/tmp"} <= set(await sandbox.changes())
    await sandbox.write_file("/new/file", b"x")
    assert await sandbox.read_file("/new/file") == b"x"
    await sandbox.kill_processes()
    assert Path("/usr/bin/ls").exists()


async def test_modules_planted_on_the_helpers_path_are_never_loaded(sandbox: Sandbox) -> None:
    import sys

    for directory in {path for path in sys.path if path.startswith("/")}:
        for name in ("tarfile", "stat", "json", "pwd", "linecache", "traceback", "_trap"):
            await sandbox.write_file(f"{directory}/{name}.py", b"open('/app/loaded', 'w')")
        break
    await sandbox.exec("true", user="nobody", cwd="/none")
    await sandbox.exec(["\ud800"])
    await sandbox.exec("x", env={"A": "\0"})
    with pytest.raises(FileNotFoundError):
        await sandbox.read_file("/app/loaded")


async def test_a_hostile_account_file_does_not_hang_a_command(sandbox: Sandbox, local: LocalProvider) -> None:
    await sandbox.exec("rm /etc/passwd; mkfifo /etc/passwd")
    assert (await sandbox.exec("true", user="somebody", timeout=60)).exit_code == 126
    await sandbox.write_file("/etc/passwd", b"somebody:x:99999999:7::/:/bin/sh")
    assert (await sandbox.exec("true", user="somebody", timeout=60)).exit_code == 126


async def test_the_hosts_sockets_are_out_of_reach(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        name = f"\0rl-harness-{os.getpid()}"
        abstract.bind(name)
        abstract.listen()
        port = server.getsockname()[1]
        result = await sandbox.exec(f"exec 3<>/dev/tcp/127.0.0.1/{port}")
        assert b"refused" in result.stderr
    assert (await sandbox.exec("(sleep 0.2; true) & exec 3<>/dev/tcp/8.8.8.8/53")).exit_code != 0


async def test_a_fork_bomb_without_a_limit_of_the_task_is_contained(tmp_path: Path) -> None:
    provider = LocalProvider(LocalProvider.Options(state_dir=tmp_path / "state", processes=100))
    sandbox = await provider.create(SandboxSpec())
    result = await sandbox.exec("bomb() { bomb | bomb & }; bomb; sleep 600", timeout=0.5)
    assert result.timed_out
    assert len((await output(sandbox, "cat /proc/[0-9]*/comm 2>/dev/null")).split()) < 20
    await provider.close()


@pytest.mark.needs("root")
@needs_python
async def test_a_fork_bomb_under_many_users_is_one_fork_bomb(tmp_path: Path) -> None:
    provider = LocalProvider(LocalProvider.Options(state_dir=tmp_path / "state", processes=50))
    sandbox = await provider.create(SandboxSpec())
    code = """
import os, sys, time
made = 0
for uid in range(1, 200):
    try:
        pid = os.fork()
    except OSError:
        continue
    if pid == 0:
        os.setgid(uid); os.setuid(uid)
        try:
            os.fork()
        except OSError:
            pass
        time.sleep(600)
    made += 1
print(made, flush=True)
time.sleep(600)
"""
    result = await sandbox.exec(["/usr/bin/python3", "-c", code], timeout=1)
    assert result.timed_out
    made = int(result.stdout)
    assert 10 < made < 50 + 64
    await provider.close()


async def test_a_daemon_that_keeps_forking_away_is_caught(sandbox: Sandbox) -> None:
    hop = "hop() { echo >> /app/hops; (hop &); }; hop"
    hop = f"(setsid bash -c '{hop}' &); {hop}; sleep 600"
    result = await sandbox.exec(hop, timeout=0.5)
    assert result.timed_out
    before = await sandbox.read_file("/app/hops")
    await asyncio.sleep(0.1)
    assert await sandbox.read_file("/app/hops") == before


@pytest.mark.needs("root")
async def test_memory_of_the_whole_sandbox_is_limited_and_init_survives(local: LocalProvider) -> None:
    sandbox = await local.create(SandboxSpec(limits=Limits(memory=64 << 20, disk=16 << 20)))
    hog = "dd if=/dev/zero of=/dev/null bs=30M count=1000000 &"
    result = await sandbox.exec(f"{hog} {hog} {hog} {hog} {hog} wait", timeout=1)
    assert not result.ok
    await sandbox.exec("head -c 1G /dev/zero > /app/full; head -c 1G /dev/zero > /dev/shm/full", timeout=60)
    await sandbox.kill_processes()
    assert await output(sandbox, "echo alive") == "alive\n"
