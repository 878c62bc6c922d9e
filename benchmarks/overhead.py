"""What an evaluation costs beside the model: CPU milliseconds an episode, against Inspect AI's mock model.

Both evaluate a question that needs no sandbox with a model that answers at once. Two sizes are run and the
difference is taken, so that start-up does not count; CPU is that of the whole process, as the kernel counts it.
The claim is at most 2 ms an episode at concurrency 1 and 100. Inspect AI gets an environment of its own.

    python benchmarks/overhead.py [--without-baseline]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

from rl_harness.testing.engine import SCRIPTED_PLUGIN
from rl_harness.testing.tokenizer import write_tokenizer

LIMIT_MS = 2.0
SMALL, LARGE = 200, 2200
BASELINE_SMALL, BASELINE_LARGE = 50, 350
INSPECT = "inspect-ai==0.3.285"

BASELINE = """
import sys
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import match
from inspect_ai.solver import generate

count, concurrency = int(sys.argv[1]), int(sys.argv[2])
answer = ModelOutput.from_content("mockllm/model", "4")
answer.usage = ModelUsage(input_tokens=5, output_tokens=1, total_tokens=6)  # else it fetches a tokenizer to count
model = get_model("mockllm/model", custom_outputs=[answer] * count)
samples = [Sample(input="What is 2+2?", target="4") for _ in range(count)]
log = eval(Task(dataset=samples, solver=generate(), scorer=match()), model=model, display="none",
           max_samples=concurrency, max_connections=concurrency, log_dir=sys.argv[3])[0]
assert log.status == "success", log.error.message
"""


def cpu_seconds(command: Sequence[str], directory: Path) -> float:
    """User and system seconds of a command and the children it waited for."""
    output = [
        (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
        (os.POSIX_SPAWN_OPEN, 2, str(directory / "errors"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = os.posix_spawn(command[0], list(command), environment, file_actions=output)
    _, status, usage = os.wait4(child, 0)
    if status != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{(directory / 'errors').read_text()[:2000]}")
    return usage.ru_utime + usage.ru_stime


def ours(directory: Path, concurrency: int) -> float:
    """CPU milliseconds an episode of ``rl-harness run``."""
    task = directory / "question"
    task.mkdir(exist_ok=True)
    (task / "instruction.md").write_text("What is 2+2?\n")
    (task / "task.toml").write_text('[rl_harness]\nanswer = "4"\n')
    model = write_tokenizer(directory / "model")
    command = [sys.executable, "-m", "rl_harness", "run", str(task), "-p", str(SCRIPTED_PLUGIN)]
    command += ["--engine", "scripted", "--model", str(model), "--harness", "chat", "--fresh"]
    command += ["-o", "engine.replies=['4']", "--runs-dir", str(directory / "runs"), "--concurrency", str(concurrency)]
    small, large = (cpu_seconds([*command, "--samples", str(count)], directory) for count in (SMALL, LARGE))
    return (large - small) / (LARGE - SMALL) * 1000


def baseline(directory: Path, python: Path, concurrency: int) -> float:
    """CPU milliseconds a sample of Inspect AI."""
    script = directory / "baseline.py"
    script.write_text(BASELINE)
    command = [str(python), str(script)]
    small, large = (
        cpu_seconds([*command, str(count), str(concurrency), str(directory / "logs")], directory)
        for count in (BASELINE_SMALL, BASELINE_LARGE)
    )
    return (large - small) / (BASELINE_LARGE - BASELINE_SMALL) * 1000


def inspect_environment() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = cache / "rl-harness" / "benchmarks" / INSPECT
    python = home / "bin" / "python"
    if not (home / "complete").exists():
        venv.create(home, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", INSPECT], check=True)
        (home / "complete").touch()
    return python


def main() -> int:
    compare = "--without-baseline" not in sys.argv
    python = inspect_environment() if compare else None
    met = True
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for concurrency in (1, 100):
            cost = ours(directory, concurrency)
            line = f"concurrency {concurrency:>3}: {cost:.2f} ms CPU an episode (claim: at most {LIMIT_MS:g})"
            if python is not None:
                theirs = baseline(directory, python, concurrency)
                line += f"; Inspect AI {theirs:.1f} ms; ratio {cost / theirs:.2f}"
            print(line)
            met = met and cost <= LIMIT_MS
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
