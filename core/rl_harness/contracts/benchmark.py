"""Benchmark plugins: a named, versioned set of task directories with splits."""

from __future__ import annotations

import abc
import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rl_harness.contracts.common import Plugin
from rl_harness.records.turn import Message


class Prompts(msgspec.Struct, frozen=True, kw_only=True):
    """What a benchmark tells an agent besides each task's instruction: a system prompt and worked examples
    (as real user and assistant turns), and how many turns a task is meant to take."""

    system: str | None = None
    examples: tuple[Message, ...] = ()
    max_turns: int | None = None


class Benchmark(Plugin):
    """Task directories made from a data set, a generator, or a folder.

    ``directories`` may build them on first use into ``cache`` (a folder that belongs to this benchmark, keyed
    by what determines its content); it is deterministic: the same options give the same tasks in the same order.
    """

    name: str
    version: str

    @property
    @abc.abstractmethod
    def splits(self) -> Mapping[str, int]:
        """Name and number of tasks of every split, known without building anything."""

    @property
    def prompts(self) -> Prompts:
        return Prompts()

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Configuration this benchmark is meant to be run with, by dotted key (``"sampling.max_tokens": 32``). It
        applies where the user says nothing. Models, plugin files and run directories are not its to choose."""
        return {}

    @abc.abstractmethod
    def directories(self, split: str, cache: Path) -> Sequence[Path]:
        """Every task directory of a split. Blocking; core calls it in a thread."""


class GeneratedBenchmark(Benchmark):
    """A benchmark whose task directories are written by code, once, into the cache.

    A split is written under another name and renamed, so it is whole when it exists. Of several processes that
    build it at once the first to finish wins, and the others use its work.
    """

    @abc.abstractmethod
    def sources(self) -> Sequence[Path | str]:
        """All that determines what :meth:`write` writes: files (templates, data, the code itself) and options as
        text. Another content is built in another folder."""

    @abc.abstractmethod
    def write(self, split: str, folder: Path) -> None:
        """Write every task directory of a split into ``folder``, an empty directory. They are used in order of
        their names. Blocking."""

    def directories(self, split: str, cache: Path) -> Sequence[Path]:
        folder = cache / self._key() / split
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            unfinished = Path(tempfile.mkdtemp(prefix=f".{split}-", dir=folder.parent))
            try:
                self.write(split, unfinished)
                unfinished.chmod(0o755)
                os.rename(unfinished, folder)  # noqa: PTH104 - its atomicity is the point
            except OSError:
                if not folder.is_dir():
                    raise
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
        return sorted(path for path in folder.iterdir() if path.is_dir())

    def _key(self) -> str:
        total = hashlib.sha256()
        for source in self.sources():
            content = source.encode() if isinstance(source, str) else source.read_bytes()
            total.update(f"{len(content)}:".encode())
            total.update(content)
        return total.hexdigest()[:20]
