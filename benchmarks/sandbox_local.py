"""What a local sandbox costs beside a plain process: cold start, a command, teardown, and many at once.

    python benchmarks/sandbox_local.py [--rounds 30] [--many 64]

Prints medians with their ratio to ``subprocess.run(["sh", "-c", "true"])``, interleaved in the same run, and to
bubblewrap where it is installed; then opens ``--many`` sandboxes at once and reports the longest time that the event
loop was not at its turn. Exits 1 when that is over 100 ms.
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


async def write_and_read(sandbox: Sandbox) -> None:
    await sandbox.write_file("/app/file", b"x" * 10_000)
    await sandbox.read_file("/app/file")


async def many_at_once(provider: LocalProvider, count: int) -> tuple[float, float]:
    """Seconds for ``count`` sandboxes, each with one command; the longest lag of the event loop meanwhile."""
    lag = 0.0
    done = False

    async def watch() -> None:
        nonlocal lag
        while not done:
            before = time.perf_counter()
            await asyncio.sleep(TICK)
            lag = max(lag, time.perf_counter() - before - TICK)

    async def one() -> None:
        sandbox = await provider.create(SandboxSpec())
        result = await sandbox.exec("echo fine")
        await sandbox.close()
        if result.stdout != b"fine\n":
            raise RuntimeError(f"a sandbox did not work: {result}")

    watching = asyncio.create_task(watch())
    started = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(count)))
    seconds = time.perf_counter() - started
    done = True
    await watching
    return seconds, lag


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--many", type=int, default=64)
    arguments = parser.parse_args()
    provider = LocalProvider(LocalProvider.Options())
    started = time.perf_counter()
    await provider.preflight()
    print(f"helper and first sandbox: {(time.perf_counter() - started) * 1e3:.0f} ms, once a run")
    times = await one_by_one(provider, arguments.rounds)
    base = statistics.median(times["plain process"])
    print(f"{'':24}{'median':>10}{'best':>10}  ratio to a plain process")
    for name, values in times.items():
        median = statistics.median(values)
        print(f"{name:24}{median * 1e3:7.2f} ms{min(values) * 1e3:7.2f} ms  {median / base:6.1f}")
    seconds, lag = await many_at_once(provider, arguments.many)
    verdict = "within" if lag <= LAG_LIMIT else "OVER"
    print(f"{arguments.many} at once: {seconds:.2f} s; event loop lag at most {lag * 1e3:.0f} ms, {verdict} 100 ms")
    await provider.close()
    return 0 if lag <= LAG_LIMIT else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
