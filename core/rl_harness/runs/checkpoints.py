"""Checkpoints of a run: folders that appear complete or not at all, and which of them is the newest valid one.

A checkpoint is valid when the database lists it and the listed files are there with their sizes. To make one: write
the folder under a hidden name, rename it, list it. To remove one: unlist it, hide it, delete it. A crash between any
two of these leaves the previous valid checkpoint in place, and at worst a folder that nobody lists.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_harness.errors import RunError
from rl_harness.runs.files import explain
from rl_harness.runs.store import RunStore


class Checkpoints:
    """The folder ``checkpoints/`` of a run. Only the process that holds the run's lock may use it to write."""

    def __init__(self, directory: Path, store: RunStore) -> None:
        self.directory = directory
        self._store = store

    def path(self, step: int) -> Path:
        """Where to write the checkpoint of ``step``: a path that does not exist yet, in a directory that does."""
        partial = self._partial(step)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if partial.exists():
                shutil.rmtree(partial)
        except OSError as error:
            raise explain(partial, error) from error
        return partial

    async def commit(self, step: int, state: Mapping[str, Any] | None = None) -> Path:
        """Make what was written at :meth:`path` the checkpoint of ``step``; returns its final place.

        ``state`` (JSON-compatible) goes with it: :meth:`state` of the checkpoint that :meth:`latest` finds is always
        the state of exactly those weights.
        """
        partial, final = self._partial(step), self._final(step)
        if not partial.is_dir():
            raise RunError(f"{partial}: nothing was written for the checkpoint of step {step}")
        files = {str(path.relative_to(partial)): path.stat().st_size for path in partial.rglob("*") if path.is_file()}
        try:
            if final.exists():
                self._remove(step)
            partial.rename(final)
        except OSError as error:
            raise explain(final, error) from error
        await self._store.add_checkpoint(step, files, state or {})
        return final

    def latest(self) -> tuple[int, Path] | None:
        """The newest valid checkpoint."""
        for step, files in reversed(self._store.checkpoints().items()):
            final = self._final(step)
            if _valid(final, files):
                return step, final
        return None

    def state(self, step: int) -> dict[str, Any]:
        """What was committed with the checkpoint of ``step``."""
        return self._store.checkpoint_state(step)

    def prune(self, keep: int) -> None:
        """Remove all but the newest ``keep`` (at least one) valid checkpoints, and every invalid folder."""
        if keep < 1:
            raise ValueError("at least one checkpoint is kept")
        listed = self._store.checkpoints()
        valid = [step for step, files in listed.items() if _valid(self._final(step), files)]
        kept = set(valid[-keep:])
        try:
            for step in listed:
                if step not in kept:
                    self._remove(step)
            self.sweep()
        except OSError as error:
            raise explain(self.directory, error) from error

    def sweep(self) -> None:
        """Delete what a crash left behind: folders that were never finished or that nobody lists."""
        if not self.directory.is_dir():
            return
        wanted = {self._final(step).name for step in self._store.checkpoints()}
        for folder in self.directory.iterdir():
            if folder.is_dir() and folder.name.startswith(("step-", ".step-")) and folder.name not in wanted:
                shutil.rmtree(folder)

    def _remove(self, step: int) -> None:
        self._store.drop_checkpoint(step)
        trash = self.directory / f".step-{step:06d}.trash"
        if trash.exists():
            shutil.rmtree(trash)
        final = self._final(step)
        if final.exists():
            final.rename(trash)
            shutil.rmtree(trash)

    def _partial(self, step: int) -> Path:
        return self.directory / f".step-{step:06d}.partial"

    def _final(self, step: int) -> Path:
        return self.directory / f"step-{step:06d}"


def _valid(folder: Path, files: Mapping[str, int]) -> bool:
    return all((folder / name).is_file() and (folder / name).stat().st_size == size for name, size in files.items())
