"""Weight folders as everyone but their writer sees them: the source handed to engines, and clearing up after a
writer that is gone. Imports no torch, since the main process uses it.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from rl_harness.contracts import TensorInfo, WeightManifest, WeightSource

PREFIX = "rl-harness-weights-"
FILE = "model.safetensors"
LOCK = "lock"
#: A folder without a lock file this old was left by a process that died while making it.
_NEWBORN_SECONDS = 60.0


def default_bases() -> tuple[Path, ...]:
    """Where weight folders are made, best first: a memory file system where there is one."""
    return Path("/dev/shm"), Path(tempfile.gettempdir())


class FileWeights(WeightSource):
    """A folder of safetensors files that stays as it is until released."""

    transport = "file"

    def __init__(self, path: Path, manifest: WeightManifest, release: Callable[[Path], Awaitable[None]]) -> None:
        self.path: Path = path
        self.manifest = manifest
        self._release = release

    async def buckets(self) -> AsyncIterator[tuple[TensorInfo, memoryview]]:
        with (self.path / FILE).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            start = 8 + int.from_bytes(mapped[:8], "little")
            entries = json.loads(mapped[8:start])
            for info in self.manifest.tensors:
                first, end = entries[info.name]["data_offsets"]
                yield info, memoryview(mapped[start + first : start + end])

    async def release(self) -> None:
        await self._release(self.path)


def reap(base: Path) -> list[Path]:
    """Remove weight folders in ``base`` whose process is gone; returns them.

    A writer holds its folder's lock file locked, and the kernel lets go of it when the writer ends, however it ends.
    """
    removed = []
    for folder in base.glob(f"{PREFIX}*") if base.is_dir() else ():
        try:
            if folder.lstat().st_uid == os.geteuid() and not folder.is_symlink() and _abandoned(folder):
                shutil.rmtree(folder)
                removed.append(folder)
        except OSError:
            continue  # another process was faster
    return removed


def _abandoned(folder: Path) -> bool:
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return time.time() - folder.stat().st_mtime > _NEWBORN_SECONDS
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
