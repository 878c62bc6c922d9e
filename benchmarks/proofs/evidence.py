"""The long proof: an agent's model learns its task, on every seed, measured on tasks it never trained on.

For each seed: evaluate on 300 heldout tasks whose operand pairs no training task has, train, evaluate again. The
claim is a sampled pass rate from below 0.3 to at least 0.85 on each seed. Exit code 1 when it is not met. A run that
was interrupted continues; finished ones are not run again unless their directory is removed.

    python benchmarks/proofs/evidence.py --config examples/quickstart.toml --model smollm2-135m-instruct --seeds 1 2 3
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

BEFORE, AFTER = 0.3, 0.85
TASKS = 300


def report(runs: Path, name: str) -> Any:
    """The JSON report of a finished run, or None."""
    if not (runs / name).is_dir():
        return None
    command = [sys.executable, "-m", "rl_harness", "runs", "show", str(runs / name), "--json"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return found if found["status"] == "done" else None


def operands(directory: Path) -> frozenset[str]:
    """The numbers of a task, in any order."""
    return frozenset((directory / "environment" / "workspace" / "input.txt").read_text().split())


def overlap() -> int:
    """Heldout tasks whose operands some training task has too."""
    from rl_harness.plugins import load_registry
    from rl_harness.tasks import open_benchmark

    benchmark = open_benchmark(load_registry(), "shell-arithmetic")
    train, heldout = ({operands(task.directory) for task in benchmark.tasks(split)} for split in ("train", "heldout"))
    return len(train & heldout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--runs-dir", type=Path, default=Path("evidence"))
    given = parser.parse_args()
    shared = overlap()
    print(f"operand pairs that training and heldout tasks share: {shared}", flush=True)
    met = shared == 0
    lines = []
    for seed in given.seeds:
        name = f"seed-{seed}"
        if (found := report(given.runs_dir, name)) is None:
            command = [sys.executable, "-m", "rl_harness", "run", "shell-arithmetic", "--config", str(given.config)]
            command += ["--model", given.model, "--trainer", "grpo", "--seed", str(seed), "--name", name]
            command += ["--runs-dir", str(given.runs_dir), "-o", f"evaluation.limit={TASKS}"]
            subprocess.run(command, check=True)
            found = report(given.runs_dir, name)
        rates = {entry["phase"]: entry["summary"] for entry in found["evaluations"]}
        before, after = rates["before"], rates["after"]
        good = before["pass_rate"] < BEFORE and after["pass_rate"] >= AFTER and after["scored"] == TASKS
        met = met and good
        lines.append(
            f"seed {seed}: {shown(before)} -> {shown(after)} sampled"
            f"; {shown(rates['before-greedy'])} -> {shown(rates['after-greedy'])} greedy"
            f"; {len(found['training'])} steps; {'met' if good else 'NOT MET'}"
        )
    print("\n".join(lines))
    return 0 if met else 1


def shown(summary: Any) -> str:
    unscored = sum(summary["unscored"].values())
    return f"{summary['pass_rate']:.3f} [{summary['low']:.3f}, {summary['high']:.3f}] ({unscored} unscored)"


if __name__ == "__main__":
    sys.exit(main())
