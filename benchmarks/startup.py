"""Start-up cost of the command line: CPU time of ``rl-harness --help`` over that of ``python -c pass``.

Both run alternately in one session, median of 20 each, user plus system time of the child as the kernel counts it.
The claim is a ratio of at most 5, with every plugin of this repository installed. Exit code 1 when it is not met.

    python benchmarks/startup.py
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

RUNS = 20
LIMIT = 5.0


def cpu_seconds(command: Sequence[str]) -> float:
    quiet = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    child = os.posix_spawn(command[0], list(command), os.environ, file_actions=quiet)
    _, status, usage = os.wait4(child, 0)
    if status != 0:
        raise SystemExit(f"{' '.join(command)} failed")
    return usage.ru_utime + usage.ru_stime


def main() -> int:
    script = Path(sys.executable).with_name("rl-harness")
    if not script.exists():
        raise SystemExit(f"no {script}; install rl-harness into this environment first")
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "rl-harness --help": [str(script), "--help"],
    }
    for command in commands.values():  # byte code and page cache
        cpu_seconds(command)
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(RUNS):
        for name, command in commands.items():
            seconds[name].append(cpu_seconds(command))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, value in medians.items():
        print(f"{name:<20} {value * 1000:6.1f} ms CPU (median of {RUNS})")
    baseline, ours = medians.values()
    ratio = ours / baseline
    print(f"ratio {ratio:.2f} (claim: at most {LIMIT:g})")
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
