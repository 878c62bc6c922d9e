"""Files out of a machine whose ``sh`` or ``tar`` an agent broke, through its service's own interface for files: slower,
and by the same rules as the archives that those programs make."""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import tarfile
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from rl_harness.errors import UnsafeFiles
from rl_harness.sandboxes.remote.archives import BLOCK, header, unpack

_AT_ONCE = 8
_MOST_ENTRIES = 1_000_000


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One file as the service tells of it. ``kind``: "file", "directory", "link" (``target``: where to), or "other"."""

    name: str
    kind: str
    size: int = 0
    mode: int = 0o644
    target: str = ""


class FileService(Protocol):
    """A service's interface for files. No method follows a link in the last place of a path; all raise
    ``SandboxError`` when the service fails."""

    async def stat(self, path: str) -> Entry:
        """Raises ``FileNotFoundError``."""

    async def entries(self, path: str) -> Sequence[Entry]:
        """What is in a directory."""

    def content(self, path: str) -> AsyncGenerator[bytes]:
        """A regular file's bytes."""


async def rescued_file(files: FileService, path: str, limit: int | None) -> bytes:
    """As :meth:`~rl_harness.contracts.Sandbox.read_file`."""
    entry = await _found(files, path)
    if entry.kind != "file":
        raise UnsafeFiles(f"{path}: not a regular file")
    if limit is not None and entry.size > limit:
        raise UnsafeFiles(f"{path}: {entry.size} bytes, more than the limit of {limit}")
    data = bytearray()
    async with contextlib.aclosing(files.content(path)) as chunks:
        async for chunk in chunks:
            data += chunk
            if limit is not None and len(data) > limit:
                raise UnsafeFiles(f"{path}: more than {limit} bytes")
    return bytes(data)


async def rescued(files: FileService, source: str, target: Path, *, limit: int | None, skip_unsafe: bool) -> list[str]:
    """As :meth:`~rl_harness.contracts.Sandbox.download`, for a ``target`` that is not there."""
    root = await _found(files, source)
    if root.kind not in ("file", "directory"):
        raise UnsafeFiles(f"{source}: not a file or directory")
    members = _members(files, source, root, limit)
    async with contextlib.aclosing(members):
        return await unpack(members, target, limit=limit, skip_unsafe=skip_unsafe)


async def _found(files: FileService, path: str) -> Entry:
    """What is there, where no link leads: as the scripts do, with links among the root's own entries allowed."""
    parents = [path[:at] for at, letter in enumerate(path) if letter == "/" and at]
    for parent in parents[1:]:
        if (await files.stat(parent)).kind == "link":
            raise UnsafeFiles(f"{path}: goes through a symbolic link")
    return await files.stat(path)


async def _members(files: FileService, source: str, root: Entry, limit: int | None) -> AsyncGenerator[bytes]:
    """The tree as a tar stream; directories before what is in them."""
    left = limit
    seen = 0
    level = [(source, "root", root)]
    while level:
        folders = []
        for path, name, entry in level:
            seen += 1
            if seen > _MOST_ENTRIES:
                raise UnsafeFiles(f"{source}: more than {_MOST_ENTRIES} entries")
            if entry.kind == "file" and left is not None:
                left -= entry.size
                if left < 0:
                    raise UnsafeFiles(f"{source}: more than {limit} bytes")
            async for chunk in _member(files, source, path, name, entry):
                yield chunk
            if entry.kind == "directory":
                folders.append((path, name))
        level = []
        for start in range(0, len(folders), _AT_ONCE):
            some = folders[start : start + _AT_ONCE]
            for (path, name), inside in zip(
                some, await asyncio.gather(*(files.entries(path) for path, _ in some)), strict=True
            ):
                level += [(f"{path}/{one.name}", f"{name}/{one.name}", one) for one in inside]
    yield bytes(2 * BLOCK)


async def _member(files: FileService, source: str, path: str, name: str, entry: Entry) -> AsyncGenerator[bytes]:
    info = tarfile.TarInfo(name)
    info.mode = entry.mode & 0o7777
    if entry.kind == "directory":
        info.type = tarfile.DIRTYPE
    elif entry.kind == "link":
        info.type, info.linkname = tarfile.SYMTYPE, _link(source, path, entry.target)
    elif entry.kind != "file":
        info.type = tarfile.FIFOTYPE  # refused, or left out, as what it is no file for
    if entry.kind != "file":
        yield header(info)
        return
    info.size = left = entry.size
    yield header(info)
    async with contextlib.aclosing(files.content(path)) as chunks:
        async for chunk in chunks:
            piece = chunk[:left]  # of a file that grew meanwhile, as much as was told
            left -= len(piece)
            yield piece
            if not left:
                break
    yield bytes(left + -info.size % BLOCK)  # zeros for one that shrank


def _link(source: str, path: str, target: str) -> str:
    """Services may tell where a link leads in the end: within the tree, that is as good relative to the link."""
    if target.startswith(f"{source}/") or target == source:
        return posixpath.relpath(target, posixpath.dirname(path))
    return target
