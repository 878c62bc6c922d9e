"""Trees as tar streams: written from files of the host, and read from a side that is not trusted.

Only ustar, GNU long names and pax paths, links and sizes are read (POSIX.1-2017 *pax*, GNU tar manual "Basic Tar
Format"), which is what tar programs and container engines write. What is made on the host follows the rules of
:mod:`rl_harness.sandboxes.trees`.
"""

from __future__ import annotations

import asyncio
import os
import stat
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from rl_harness.errors import BrokenSandbox, UnsafeFiles
from rl_harness.sandboxes import trees
from rl_harness.sandboxes.streams import Writer

BLOCK = 512
CHUNK = 1 << 20
_MAX_EXTENDED = 1 << 20  # of one member
_MAX_PADDING = 1 << 20  # after the end
_SIXTY_FOUR_K = 1 << 16
_EXTENDED = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_DIGITS = 20  # of the largest number of 64 bits


def pack(source: Path, name: str) -> Iterator[bytes]:
    """A tar stream of the file or directory ``source`` as ``name``: modes, times and symbolic links as they are, the
    owner root, further names of one file as files of their own.

    Raises :class:`~rl_harness.errors.UnsafeFiles` for a device, socket or FIFO; ``FileNotFoundError``.
    """
    small = bytearray()
    for piece in _pieces(source, name):
        if len(small) + len(piece) < _SIXTY_FOUR_K:
            small += piece
            continue
        if small:
            yield bytes(small)
            small.clear()
        yield piece
    yield bytes(small) + bytes(2 * BLOCK)


async def packed(source: Path, name: str) -> AsyncIterator[bytes]:
    """:func:`pack` without holding up the event loop."""
    pieces = pack(source, name)
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece


def _pieces(source: Path, name: str) -> Iterator[bytes]:
    pending = [(source, name)]
    while pending:
        path, member = pending.pop()
        status = path.lstat()
        info = tarfile.TarInfo(member)
        info.mode, info.mtime = stat.S_IMODE(status.st_mode), status.st_mtime_ns // 10**9
        info.uname = info.gname = "root"
        if stat.S_ISREG(status.st_mode):
            info.size = status.st_size
            yield header(info)
            yield from _content(path, status.st_size)
        elif stat.S_ISLNK(status.st_mode):
            info.type, info.linkname = tarfile.SYMTYPE, str(path.readlink())
            yield header(info)
        elif stat.S_ISDIR(status.st_mode):
            info.type = tarfile.DIRTYPE
            yield header(info)
            pending += [(entry, f"{member}/{entry.name}") for entry in sorted(path.iterdir(), reverse=True)]
        else:
            raise UnsafeFiles(f"{path}: a device, socket or FIFO")


def header(info: tarfile.TarInfo) -> bytes:
    """The blocks that a member begins with."""
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _content(path: Path, size: int) -> Iterator[bytes]:
    left = size
    with path.open("rb", buffering=0) as file:
        while left:
            chunk = file.read(min(CHUNK, left)) or bytes(min(CHUNK, left))  # zeros for a file that shrank meanwhile
            left -= len(chunk)
            yield chunk
    if size % BLOCK:
        yield bytes(BLOCK - size % BLOCK)


async def unpack(
    chunks: AsyncIterator[bytes], target: Path, *, limit: int | None = None, skip_unsafe: bool = False
) -> list[str]:
    """Make what a tar stream holds (one file or directory, whatever its name) at the host path ``target``.

    Devices, FIFOs, and links that leave the tree are refused, or with ``skip_unsafe`` left out and their paths
    returned. At most ``limit`` bytes of files are written. Parents of ``target`` are made. Raises
    :class:`~rl_harness.errors.UnsafeFiles`; for what no program that makes archives writes,
    :class:`~rl_harness.errors.BrokenSandbox`.
    """
    await asyncio.to_thread(target.parent.mkdir, parents=True, exist_ok=True)
    read, write = os.pipe()
    writer = Writer(write)
    receiving = asyncio.create_task(asyncio.to_thread(_receive, read, target, limit, skip_unsafe))
    feeding = asyncio.create_task(_feed(chunks, writer))
    try:
        await asyncio.wait({receiving, feeding}, return_when=asyncio.FIRST_COMPLETED)
        if feeding.done() and not feeding.cancelled() and (error := feeding.exception()):
            raise error  # the cause; what the receiver then says of a stream that ended early follows from it
        try:
            return await asyncio.shield(receiving)
        except trees.Malformed as error:
            raise BrokenSandbox(f"{target.name}: {error}") from None
        except trees.TreeError as error:
            raise UnsafeFiles(f"{target.name}: {error}") from None
    finally:
        feeding.cancel()
        await asyncio.wait({feeding})
        writer.close()
        await asyncio.wait({receiving})  # its end of the pipe is closed by the thread, which must have ended
        receiving.exception()


async def _feed(chunks: AsyncIterator[bytes], writer: Writer) -> None:
    async for chunk in chunks:
        await writer.write(chunk)
        if writer.closed:  # refused: the rest is not wanted
            return
    writer.close()


def _receive(source: int, target: Path, limit: int | None, skip_unsafe: bool) -> list[str]:
    parent = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with os.fdopen(source, "rb", buffering=CHUNK) as stream:
            entries = _Tar(stream)
            left_out = trees.receive(
                entries, parent, target.name, keep_links=False, limit=limit, skip_unsafe=skip_unsafe
            )
            padding = 0
            while more := stream.read(_SIXTY_FOUR_K):
                padding += len(more)
                if padding > _MAX_PADDING:
                    raise trees.Malformed("the stream goes on after its end")
            return left_out
    finally:
        os.close(parent)


class _Tar:
    """A tar stream as the records a receiver takes. The first member is the tree's root."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._left = 0
        self._padding = 0
        self._root: str | None = None

    def header(self) -> dict[str, Any]:
        if self._left:
            raise trees.TreeError("a file was not read to its end")
        self._exactly(self._padding)
        self._padding = 0
        member = self._member()
        if member is None:
            if self._root is None:
                raise trees.Malformed("an empty archive")
            return {"p": "", "t": "end"}
        name = self._relative(member.name)
        if member.type in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE):
            self._left, self._padding = member.size, -member.size % BLOCK
            return {"p": name, "t": "f", "m": member.mode, "s": member.size}
        if member.type == tarfile.DIRTYPE:
            return {"p": name, "t": "d", "m": member.mode}
        if member.type == tarfile.SYMTYPE and name:
            return {"p": name, "t": "l", "l": member.linkname}
        if member.type == tarfile.LNKTYPE and name:
            return {"p": name, "t": "h", "l": self._relative(member.linkname)}
        if member.size and member.type not in (tarfile.SYMTYPE, tarfile.LNKTYPE):
            raise trees.TreeError(f"{member.name[:200]}: an unknown kind of member")
        return {"p": name, "t": "skipped"}

    def read(self, size: int) -> bytes:
        data: bytes = self._stream.read(min(size, self._left))
        self._left -= len(data)
        return data

    def _relative(self, path: str) -> str:
        path = "/".join(part for part in path.split("/") if part not in ("", "."))
        if self._root is None:
            self._root = path
        if path == self._root:
            return ""
        prefix = f"{self._root}/" if self._root else ""
        if not path.startswith(prefix):
            raise trees.TreeError(f"{path[:200]}: a member outside the tree")
        return path[len(prefix) :]

    def _member(self) -> tarfile.TarInfo | None:
        """The next member with its extended headers applied, or None at the end."""
        fields: dict[str, str] = {}
        extended = 0
        while True:
            block = self._stream.read(BLOCK)
            if not block or block == bytes(BLOCK):
                return None
            try:
                info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            except tarfile.TarError:
                raise trees.Malformed("not a tar stream") from None
            if info.size < 0:
                raise trees.Malformed("malformed size")
            extended += BLOCK + info.size
            if info.type in _EXTENDED and extended > _MAX_EXTENDED:
                raise trees.TreeError("an extended header too long")
            if info.type == tarfile.XHDTYPE:
                fields |= _pax_fields(self._extended(info))
            elif info.type == tarfile.XGLTYPE:
                self._extended(info)
            elif info.type in (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
                key = "path" if info.type == tarfile.GNUTYPE_LONGNAME else "linkpath"
                fields[key] = self._extended(info).rstrip(b"\0").decode("utf-8", "surrogateescape")
            else:
                return _with(info, fields)

    def _extended(self, info: tarfile.TarInfo) -> bytes:
        data = self._exactly(info.size)
        self._exactly(-info.size % BLOCK)
        return data

    def _exactly(self, size: int) -> bytes:
        data: bytes = self._stream.read(size)
        if len(data) != size:
            raise trees.Malformed("the stream ended early")
        return data


def _pax_fields(data: bytes) -> dict[str, str]:
    """Records ``LENGTH KEY=VALUE\\n``, LENGTH counting the whole record."""
    fields: dict[str, str] = {}
    while data.rstrip(b"\0"):
        length, _, _ = data.partition(b" ")
        end = _number(length.decode("ascii", "replace"))
        if end is None or not len(length) < end <= len(data):
            raise trees.Malformed("malformed extended header")
        record, data = data[:end], data[end:]
        key, _, value = record[len(length) + 1 :].removesuffix(b"\n").partition(b"=")
        fields[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
    return fields


def _with(info: tarfile.TarInfo, fields: dict[str, str]) -> tarfile.TarInfo:
    if any(key.startswith("GNU.sparse") for key in fields) or info.type == tarfile.GNUTYPE_SPARSE:
        raise trees.TreeError(f"{info.name[:200]}: a sparse member")
    info.name = fields.get("path", info.name)
    info.linkname = fields.get("linkpath", info.linkname)
    if "size" in fields:
        size = _number(fields["size"])
        if size is None:
            raise trees.Malformed("malformed size")
        info.size = size
    return info


def _number(text: str) -> int | None:
    """Of plain decimal digits: Python's own idea of a number is wider, and has a limit of its own."""
    return int(text) if len(text) <= _DIGITS and text.isascii() and text.isdigit() else None
