"""Where the files of the shipped benchmarks are."""

from __future__ import annotations

from pathlib import Path

import rl_harness
from rl_harness.errors import Unavailable


def registry_folder(name: str) -> Path:
    package = Path(rl_harness.__file__).parent
    for root in (package / "task_registry", package.parents[1] / "task_registry"):
        if (root / name / "benchmark.toml").is_file():
            return root / name
    raise Unavailable(
        f"the files of benchmark {name!r} are neither in the package nor in a source tree around it",
        remedy="reinstall rl-harness",
    )
