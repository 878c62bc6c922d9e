"""``shell-basics``: hand-written small jobs, read in place."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_harness.contracts.benchmark import Benchmark, Prompts
from rl_harness.tasks.registry.place import registry_folder


class ShellBasics(Benchmark):
    """Varied jobs with files and text, each a directory in ``task_registry/shell-basics/tasks``."""

    api = 1
    name = "shell-basics"

    def __init__(self, options: Any) -> None:
        folder = registry_folder(self.name)
        self._config = tomllib.loads((folder / "benchmark.toml").read_text(encoding="utf-8"))
        self._directories = sorted(file.parent for file in folder.glob("tasks/*/task.toml"))
        self.version = self._config["version"]

    @property
    def splits(self) -> Mapping[str, int]:
        return {"heldout": len(self._directories)}

    @property
    def prompts(self) -> Prompts:
        return Prompts(**self._config["prompts"])

    def directories(self, split: str, cache: Path) -> Sequence[Path]:
        return self._directories
