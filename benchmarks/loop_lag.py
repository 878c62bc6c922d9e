"""How long the event loop is held up while 64 sandboxed episodes run at once, beside 64 plain processes at once.

The whole path is on: gateway, scripted model, shell harness, local sandbox, verifier in a second sandbox, database.
A clock task sleeps 5 ms again and again; what it oversleeps is the lag. The claim is at most 100 ms.

    python benchmarks/loop_lag.py [--rounds 3]
"""

from __future__ import annotations

import asyncio
import io
import sys
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path

from rl_harness.jobs.evaluate import evaluate
from rl_harness.plugins import load_registry
from rl_harness.reports import make_view
from rl_harness.runs.config import PluginChoice, RunConfig
from rl_harness.testing.engine import SCRIPTED_PLUGIN
from rl_harness.testing.tokenizer import write_tokenizer

AT_ONCE, EPISODES = 64, 128
LIMIT_MS = 100.0
TICK = 0.005

RULES = [
    {"match": r"Output:\n\d+ \d+", "reply": "```bash\nread a b < input.txt; echo $((a + b)) > answer.txt\n```"},
    {"match": ".", "reply": "```bash\ncat input.txt\n```"},
]


async def largest_lag(work: Awaitable[object]) -> float:
    """Milliseconds by which a 5 ms sleep was late at worst while ``work`` ran."""
    worst = 0.0

    async def clock() -> None:
        nonlocal worst
        while True:
            before = time.perf_counter()
            await asyncio.sleep(TICK)
            worst = max(worst, time.perf_counter() - before - TICK)

    ticking = asyncio.create_task(clock())
    try:
        await work
    finally:
        ticking.cancel()
    return worst * 1000


async def plain_processes() -> None:
    async def one() -> None:
        process = await asyncio.create_subprocess_exec("sh", "-c", "true")
        await process.wait()

    await asyncio.gather(*(one() for _ in range(AT_ONCE)))


async def episodes(directory: Path) -> None:
    config = RunConfig(
        benchmark=PluginChoice(name="shell-arithmetic"),
        limit=EPISODES,
        concurrency=AT_ONCE,
        model=str(write_tokenizer(directory / "model")),
        engine=PluginChoice.model_validate({"name": "scripted", "rules": RULES}),
        runs_dir=directory / "runs",
    )
    outcome = await evaluate(
        config, load_registry([SCRIPTED_PLUGIN]), make_view(json=True, stream=io.StringIO()), fresh=True
    )
    scored = outcome.evaluations["evaluate"].scored
    if scored != EPISODES:
        raise SystemExit(f"{EPISODES - scored} of {EPISODES} episodes came out unscored")


def main() -> int:
    rounds = int(sys.argv[sys.argv.index("--rounds") + 1]) if "--rounds" in sys.argv else 3
    ours, baseline = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as name:
            baseline.append(asyncio.run(largest_lag(plain_processes())))
            ours.append(asyncio.run(largest_lag(episodes(Path(name)))))
    median, plain = sorted(ours)[rounds // 2], sorted(baseline)[rounds // 2]
    print(f"{AT_ONCE} plain processes at once: largest lag {plain:.0f} ms (median of {rounds})")
    print(f"{AT_ONCE} sandboxed episodes at once: largest lag {median:.0f} ms (claim: at most {LIMIT_MS:g})")
    print(f"ratio {median / plain:.2f}")
    return 0 if median <= LIMIT_MS else 1


if __name__ == "__main__":
    sys.exit(main())
