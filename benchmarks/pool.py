"""What prepared environments and ready sandboxes are worth: leases one by one, and whole runs of a task that has
something to set up, with and without them, in one go.

python benchmarks/pool.py --sandbox local
python benchmarks/pool.py --sandbox docker --image IMAGE --concurrency 2

Exits 1 when a warm lease takes more than 2 ms (local) or 5 % of a start (elsewhere), or when snapshots and pool give
less than 5 times the episodes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from rl_harness.contracts import EnvironmentSpec, SandboxProvider, SandboxSpec
from rl_harness.plugins import load_registry
from rl_harness.sandboxes.pool import Pool

ROUNDS = 20
#: What a ready sandbox may cost: seconds on local, a part of a start elsewhere; and what both together must gain.
MOST_LOCAL, MOST_OF_A_START, LEAST_GAIN = 0.002, 0.05, 5.0
NEITHER = ("-o", "snapshots.use=false", "-o", "pool.size=0")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sandbox", default="local")
    parser.add_argument("--image", help="start from this image instead of the provider's own root")
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--setup", type=float, default=2.0, help="seconds of set-up")
    parser.add_argument("--work", type=float, default=0.2, help="seconds of work")
    parser.add_argument("--all", action="store_true", help="also snapshots alone, and what was prepared before")
    parser.add_argument("--leases-only", action="store_true")
    arguments = parser.parse_args()
    fine = asyncio.run(leases(arguments))
    if not arguments.leases_only:
        fine = runs(arguments) and fine
    return 0 if fine else 1


async def leases(arguments: argparse.Namespace) -> bool:
    provider = load_registry().create("sandboxes", arguments.sandbox, {})
    assert isinstance(provider, SandboxProvider)
    await provider.preflight()
    spec = SandboxSpec(environment=EnvironmentSpec(image=arguments.image), labels={"run": "benchmark"}, lifetime=600)
    try:
        await timed(lambda: provider.create(spec))  # whatever is started or fetched once
        cold = [await timed(lambda: provider.create(spec)) for _ in range(ROUNDS)]
        pool = Pool(provider, size=1, labels={"run": "benchmark"})
        pool.expect(spec, ROUNDS)
        pool.start()
        warm = []
        for _ in range(ROUNDS):
            while not pool.ready():  # noqa: ASYNC110 -- a pool has no event for this
                await asyncio.sleep(0.005)
            warm.append(await timed(lambda: pool.create(spec)))
        assert pool.counts.hits == ROUNDS, pool.counts
        await pool.close()
    finally:
        await provider.close()
    slow, fast = statistics.median(cold), statistics.median(warm)
    fine = fast <= (MOST_LOCAL if arguments.sandbox == "local" else MOST_OF_A_START * slow)
    measured = f"create and start {slow * 1e3:.1f} ms, warm lease {fast * 1e3:.2f} ms ({fast / slow:.1%})"
    print(f"{arguments.sandbox}: {measured}{'' if fine else '  TOO SLOW'}")
    return fine


async def timed(create: Callable[[], Awaitable[object]]) -> float:
    started = time.perf_counter()
    sandbox = await create()
    seconds = time.perf_counter() - started
    await sandbox.close()  # type: ignore[attr-defined]
    return seconds


def runs(arguments: argparse.Namespace) -> bool:
    with tempfile.TemporaryDirectory(prefix="rl-harness-benchmark-") as folder:
        write_task(Path(folder), arguments)
        kinds = {
            "neither": NEITHER,
            "snapshots": ("-o", "pool.size=0"),
            "snapshots and pool": (),
            "prepared before": (),
        }
        chosen = kinds if arguments.all else ("neither", "snapshots and pool")
        rates = {name: throughput(Path(folder), arguments, *kinds[name]) for name in chosen}
    each = f"{arguments.setup:g} s of set-up, {arguments.work:g} s of work, {arguments.concurrency} at once"
    print(f"{arguments.sandbox}: {arguments.episodes} episodes, {each}")
    for name, rate in rates.items():
        print(f"  {name:18}  {rate:6.2f} episodes a second  ({rate / rates['neither']:.1f} x)")
    fine = rates["snapshots and pool"] >= LEAST_GAIN * rates["neither"]
    if not fine:
        print(f"  snapshots and pool give LESS THAN {LEAST_GAIN:g} x")
    return fine


def write_task(folder: Path, arguments: argparse.Namespace) -> None:
    task = folder / "task"
    subprocess.run([sys.executable, "-m", "rl_harness", "tasks", "new", str(task)], check=True, capture_output=True)
    image = f"docker_image = {json.dumps(arguments.image)}\n" if arguments.image else ""
    (task / "task.toml").write_text(
        f'[environment]\nnetwork_mode = "no-network"\n{image}[rl_harness]\nverifier = "separate"\n'
    )
    # Unlike any other benchmark's: what is measured includes preparing it.
    (task / "environment/setup.sh").write_text(
        f"sleep {arguments.setup}\nmkdir -p /opt\necho {time.time()} > /opt/prepared\n"
    )
    (task / "solution/solve.sh").write_text(f"sleep {arguments.work}\nwc -l < names.txt > count.txt\n")


def throughput(folder: Path, arguments: argparse.Namespace, *options: str) -> float:
    """Episodes a second of one whole run, from the command's start to its end."""
    command = [
        *(sys.executable, "-m", "rl_harness", "run", str(folder / "task"), "--json", "--fresh"),
        *("--harness", "oracle", "--sandbox", arguments.sandbox, "--runs-dir", str(folder / "runs")),
        *("--samples", str(arguments.episodes), "--concurrency", str(arguments.concurrency), *options),
    ]
    state = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, cwd=folder, env=state, check=False)
    seconds = time.perf_counter() - started
    assert done.returncode == 0, (done.stderr + done.stdout).decode()
    report = json.loads(done.stdout)
    assert report["evaluations"][0]["summary"]["passed"] == arguments.episodes, report["evaluations"]
    counts = report["sandboxes"]
    print(f"  {seconds:6.1f} s  {' '.join(options) or 'as it is'}: {json.dumps(counts)}", file=sys.stderr)
    return arguments.episodes / seconds


if __name__ == "__main__":
    sys.exit(main())
