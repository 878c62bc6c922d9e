"""What a local sandbox costs beside a plain process: cold start, a command, snapshots, forks, and many at once.

    python benchmarks/sandbox_local.py [--rounds 20] [--many 200]

Prints medians with their ratio to ``subprocess.run(["sh", "-c", "true"])``, interleaved in the same run, and to
bubblewrap where it is installed. Snapshots and forks are of a sandbox that has written 500 files, 5 MB in all; a
fork's time is that of eight divided by eight. Then ``--many`` sandboxes are opened at once and kept alive together, and
the longest time is reported that the event loop was not at its turn. Exits 1 when a figure is missed: a cold start over
15 ms, a command over 3 ms, a start from a snapshot over 20 ms, not all alive, a lag over 100 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

from rl_harness.contracts.sandbox import Sandbox, SandboxSpec
from rl_harness.sandboxes.local import LocalProvider

LAG_LIMIT = 0.100
TICK = 0.005
FORKS = 8
FILES, FILE_BYTES = 500, 10_000
LIMITS = {"cold start": 0.015, "command": 0.003, "start from a snapshot": 0.020, f"one of {FORKS} forks": 0.020}
BUBBLEWRAP = [
    *("bwrap", "--unshare-all", "--die-with-parent", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"),
    *("--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib"),
    *("--symlink", "usr/lib64", "/lib64", "sh", "-c", "true"),
]

Times = dict[str, list[float]]


def plain(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True)
    return time.perf_counter() - started


async def timed(times: Times, name: str, work: Callable[[], Awaitable[object]]) -> None:
    started = time.perf_counter()
    await work()
    times.setdefault(name, []).append(time.perf_counter() - started)


async def one_by_one(provider: LocalProvider, rounds: int) -> Times:
    """Every kind once a round, so that what else runs on this machine falls on all alike."""
    times: Times = {}
    for _ in range(rounds):
        times.setdefault("plain process", []).append(plain(["sh", "-c", "true"]))
        if shutil.which("bwrap"):
            times.setdefault("bubblewrap", []).append(plain(BUBBLEWRAP))
        started = time.perf_counter()
        sandbox = await provider.create(SandboxSpec())
        times.setdefault("cold start", []).append(time.perf_counter() - started)
        await timed(times, "first command", lambda s=sandbox: s.exec("true"))
        await timed(times, "command", lambda s=sandbox: s.exec("true"))
        await timed(times, "write and read a file", lambda s=sandbox: write_and_read(s))
        await timed(times, "teardown", sandbox.close)
    return times


async def snapshots(provider: LocalProvider, rounds: int) -> Times:
    times: Times = {}
    parent = await provider.create(SandboxSpec())
    write = f"for n in $(seq {FILES}); do head -c {FILE_BYTES} /dev/zero > $n; done"
    if not (await parent.exec(write)).ok:
        raise RuntimeError("the files of the snapshot were not written")
    for _ in range(rounds):
        started = time.perf_counter()
        snapshot = await parent.snapshot()
        times.setdefault("snapshot", []).append(time.perf_counter() - started)
        started = time.perf_counter()
        child = await provider.create(SandboxSpec(snapshot=snapshot))
        times.setdefault("start from a snapshot", []).append(time.perf_counter() - started)
        if (await child.exec("ls | wc -l")).stdout.strip() != str(FILES).encode():
            raise RuntimeError("the snapshot is not whole")
        started = time.perf_counter()
        forks = await child.fork(FORKS)
        times.setdefault(f"one of {FORKS} forks", []).append((time.perf_counter() - started) / FORKS)
        await asyncio.gather(child.close(), *(fork.close() for fork in forks))
        await timed(times, "delete the snapshot", lambda s=snapshot: provider.delete_snapshot(s))
    await parent.close()
    return times


async def write_and_read(sandbox: Sandbox) -> None:
    await sandbox.write_file("/app/file", b"x" * 10_000)
    await sandbox.read_file("/app/file")


async def many_at_once(provider: LocalProvider, count: int) -> tuple[float, float, int]:
    """Seconds until ``count`` sandboxes are there and each has run a command; the longest lag of the event loop, their
    end included; how many were alive together."""
    lag = 0.0
    done = False

    async def watch() -> None:
        nonlocal lag
        while not done:
            before = time.perf_counter()
            await asyncio.sleep(TICK)
            lag = max(lag, time.perf_counter() - before - TICK)

    async def one() -> Sandbox:
        sandbox = await provider.create(SandboxSpec())
        result = await sandbox.exec("echo fine")
        if result.stdout != b"fine\n":
            raise RuntimeError(f"a sandbox did not work: {result}")
        return sandbox

    watching = asyncio.create_task(watch())
    started = time.perf_counter()
    sandboxes = await asyncio.gather(*(one() for _ in range(count)))
    seconds = time.perf_counter() - started
    alive = 0
    for sandbox in sandboxes:
        alive += (await sandbox.exec("echo alive")).stdout == b"alive\n"
    await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))
    done = True
    await watching
    return seconds, lag, alive


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--many", type=int, default=200)
    arguments = parser.parse_args()
    provider = LocalProvider(LocalProvider.Options())
    started = time.perf_counter()
    await provider.preflight()
    print(f"helper and first sandbox: {(time.perf_counter() - started) * 1e3:.0f} ms, once a run")
    times = await one_by_one(provider, arguments.rounds) | await snapshots(provider, arguments.rounds)
    base = statistics.median(times["plain process"])
    missed = []
    print(f"{'':24}{'median':>10}{'best':>10}  ratio to a plain process")
    for name, values in times.items():
        median = statistics.median(values)
        limit = LIMITS.get(name)
        if limit is not None and median > limit:
            missed.append(name)
        told = f"  (at most {limit * 1e3:.0f} ms)" if limit is not None else ""
        print(f"{name:24}{median * 1e3:7.2f} ms{min(values) * 1e3:7.2f} ms  {median / base:6.1f}{told}")
    seconds, lag, alive = await many_at_once(provider, arguments.many)
    print(f"{arguments.many} at once: {seconds:.2f} s until all had run a command, {alive} alive together;", end=" ")
    print(f"event loop lag at most {lag * 1e3:.0f} ms (at most {LAG_LIMIT * 1e3:.0f})")
    if lag > LAG_LIMIT:
        missed.append("lag of the event loop")
    if alive < arguments.many:
        missed.append("alive at once")
    await provider.close()
    print(f"missed: {', '.join(missed)}" if missed else "every figure is reached")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
