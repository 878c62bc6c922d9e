"""Benchmark plugins: a named, versioned set of task directories with splits."""

from __future__ import annotations

import abc
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
