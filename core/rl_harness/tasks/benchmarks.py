"""Opens a benchmark by name: chooses the plugin, checks version and split, and loads its tasks in a seeded order."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rl_harness.contracts.benchmark import Benchmark, Prompts
from rl_harness.errors import ConfigError, PluginError
from rl_harness.tasks.load import load_task
from rl_harness.tasks.task import Task
from rl_harness.tasks.toml_file import nearest

T = TypeVar("T")

#: The split that is evaluated when nobody names one.
PREFERRED_SPLITS = ("heldout", "test", "dev")


class Registry(Protocol):
    """The part of :class:`rl_harness.plugins.Registry` that is used here."""

    def create(self, kind: str, name: str, options: Mapping[str, Any]) -> Any: ...


class BenchmarkHandle:
    """A benchmark that was asked for, with the folder its tasks are built in."""

    def __init__(self, benchmark: Benchmark, cache: Path) -> None:
        self._benchmark = benchmark
        self._cache = cache

    @property
    def name(self) -> str:
        return self._benchmark.name

    @property
    def version(self) -> str:
        return self._benchmark.version

    @property
    def splits(self) -> Mapping[str, int]:
        return self._benchmark.splits

    @property
    def prompts(self) -> Prompts:
        return self._benchmark.prompts

    async def preflight(self) -> None:
        """Raises :class:`~rl_harness.errors.Unavailable` when something the benchmark needs is missing here."""
        await self._benchmark.preflight()

    def default_split(self) -> str:
        """``heldout``, ``test`` or ``dev``, the first of these there is; else the first of all."""
        return next((name for name in PREFERRED_SPLITS if name in self.splits), next(iter(self.splits)))

    def tasks(self, split: str | None = None, limit: int | None = None, seed: int = 0) -> list[Task]:
        """The first ``limit`` tasks of a split in an order drawn from ``seed``. Blocking: builds on first use."""
        split = split or self.default_split()
        if split not in self.splits:
            has = "it is there for measuring only, with" if split == "train" else "it has"
            raise ConfigError(
                f"benchmark {self.name!r} has no split {split!r}", remedy=nearest(split, self.splits, has)
            )
        directories = list(self._benchmark.directories(split, self._cache / self.name))
        if len(directories) != self.splits[split]:
            raise PluginError(
                f"benchmark {self.name!r} states {self.splits[split]} tasks in {split!r} and made {len(directories)}"
            )
        directories = in_seeded_order(directories, f"{self.name}/{split}/{seed}")
        return [load_task(directory) for directory in directories[:limit]]


def in_seeded_order(items: Sequence[T], seed: str) -> list[T]:
    """The same order for the same seed, in every process."""
    ordered = list(items)
    random.Random(seed).shuffle(ordered)
    return ordered


def open_benchmark(
    registry: Registry, spec: str, cache: Path | None = None, options: Mapping[str, Any] | None = None
) -> BenchmarkHandle:
    """``spec`` is ``NAME`` or ``NAME@VERSION``; ``options`` are the benchmark's own."""
    name, _, version = spec.partition("@")
    benchmark = registry.create("benchmarks", name, options or {})
    if version and version != benchmark.version:
        raise ConfigError(
            f"benchmark {name!r} is here in version {benchmark.version}, not {version}",
            remedy=f"write {name} or {name}@{benchmark.version}, or install the package that has {version}",
        )
    return BenchmarkHandle(benchmark, cache or default_cache())


def default_cache() -> Path:
    """``$XDG_CACHE_HOME/rl-harness/benchmarks``, in ``~/.cache`` unless the variable says otherwise."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "rl-harness" / "benchmarks"
