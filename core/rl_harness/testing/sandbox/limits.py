"""Checks of resource limits, for the providers that claim them."""

from __future__ import annotations

import re
import time

from rl_harness.contracts.sandbox import Limits
from rl_harness.errors import Unsupported
from rl_harness.testing.sandbox.kit import Checks, Context, equal, succeeded, without_limit

checks = Checks()

MIB = 1 << 20


@checks.check_if(without_limit("pids"))
async def a_fork_bomb_is_contained(context: Context) -> None:
    sandbox = await context.sandbox(limits=Limits(pids=60))
    bomb = "bomb() { bomb | bomb & }; bomb; sleep 600"
    result = await sandbox.exec(bomb, timeout=0.5)
    equal(result.timed_out, True, "timed_out")
    await sandbox.kill_processes()
    equal(succeeded(await sandbox.exec("echo fine")), b"fine\n")


@checks.check_if(without_limit("memory"))
async def memory_is_limited(context: Context) -> None:
    sandbox = await context.sandbox(limits=Limits(memory=100 * MIB))
    # dd needs a buffer of bs bytes: below the limit it works, above it does not.
    succeeded(await sandbox.exec("dd if=/dev/zero of=/dev/null bs=20000000 count=1"))
    result = await sandbox.exec("dd if=/dev/zero of=/dev/null bs=300000000 count=1", timeout=60)
    assert not result.ok, "300 MiB were had under a limit of 100"


@checks.check_if(without_limit("disk"))
async def disk_is_limited(context: Context) -> None:
    sandbox = await context.sandbox(limits=Limits(disk=20 * MIB))
    succeeded(await sandbox.exec("head -c 5000000 /dev/zero > file"))
    result = await sandbox.exec("for n in 1 2 3 4 5; do head -c 10000000 /dev/zero > file$n || exit 3; done")
    equal(result.exit_code, 3, "exit code")


@checks.check_if(without_limit("cpus"))
async def cpus_are_limited(context: Context) -> None:
    """Two busy loops get a quarter of a processor together; on a machine with other work, less. A provider that has
    whole processors only refuses the quarter and gives them one."""
    cpus, most = 0.25, 0.5
    try:
        sandbox = await context.sandbox(limits=Limits(cpus=cpus))
    except Unsupported:
        cpus, most = 1.0, 1.5
        sandbox = await context.sandbox(limits=Limits(cpus=cpus))
    spin = "end=$(($(date +%s) + 2)); while [ $(date +%s) -lt $end ]; do :; done"
    started = time.perf_counter()
    report = succeeded(await sandbox.exec(f"({spin}) & {spin}; wait; times")).decode()
    seconds = time.perf_counter() - started
    used = sum(60 * int(minutes) + float(rest) for minutes, rest in re.findall(r"(\d+)m([\d.]+)s", report))
    assert 0 < used <= most * seconds, f"{used:.2f} s of processor time in {seconds:.2f} s under a limit of {cpus:g}"


@checks.check_if(without_limit("pids"))
async def pids_are_limited(context: Context) -> None:
    sandbox = await context.sandbox(limits=Limits(pids=30))
    script = "n=0; while [ $n -lt 100 ]; do sleep 30 & n=$((n + 1)); done; echo all"
    result = await sandbox.exec(["sh", "-c", script], timeout=20)
    assert b"all" not in result.stdout, "100 processes were had under a limit of 30"
    await sandbox.kill_processes()
    equal(succeeded(await sandbox.exec("echo fine")), b"fine\n")
