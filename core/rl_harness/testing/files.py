"""For stand-ins of services: what an interface for files tells of a sandbox that stands for a service's machine."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path

from rl_harness.contracts.sandbox import Sandbox
from rl_harness.errors import UnsafeFiles
from rl_harness.sandboxes.remote import Entry


class SandboxFiles:
    """A :class:`rl_harness.sandboxes.remote.FileService` made of a sandbox's own ``download`` and ``write_file``, which
    for the local sandbox need nothing of its programs."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    @contextlib.asynccontextmanager
    async def _copy(self, path: str) -> AsyncIterator[tuple[Path, list[str]]]:
        with tempfile.TemporaryDirectory(prefix="rl-harness-files-") as folder:
            copy = Path(folder) / "copy"
            left_out = await self._sandbox.download(path, copy, skip_unsafe=True)
            yield copy, left_out

    async def stat(self, path: str) -> Entry:
        parent, _, name = path.rstrip("/").rpartition("/")
        if parent:
            found = [entry for entry in await self.entries(parent) if entry.name == name]
            if not found:
                raise FileNotFoundError(path)
            return found[0]
        try:
            async with self._copy(path) as (copy, _):
                return _entry(name, copy)
        except UnsafeFiles:
            return Entry(name=name, kind="link")

    async def entries(self, path: str) -> Sequence[Entry]:
        async with self._copy(path) as (copy, left_out):
            if not copy.is_dir():
                raise NotADirectoryError(path)
            there = [_entry(file.name, file) for file in sorted(copy.iterdir())]
            # No copy is made of what leads out of the tree, and of what is no file.
            return [*there, *(Entry(name=name, kind="other") for name in left_out if "/" not in name)]

    async def content(self, path: str) -> AsyncGenerator[bytes]:
        yield await self._sandbox.read_file(path)

    async def write(self, path: str, data: bytes) -> None:
        """Over what is there, whose mode stays."""
        try:
            mode = (await self.stat(path)).mode
        except FileNotFoundError:
            mode = 0o644
        await self._sandbox.write_file(path, data, mode=mode)


def _entry(name: str, file: Path) -> Entry:
    info = file.lstat()
    mode = stat.S_IMODE(info.st_mode)
    if stat.S_ISLNK(info.st_mode):
        return Entry(name=name, kind="link", target=os.readlink(file))  # noqa: PTH115 -- as it is written
    if stat.S_ISDIR(info.st_mode):
        return Entry(name=name, kind="directory", mode=mode)
    return Entry(name=name, kind="file", size=info.st_size, mode=mode)
