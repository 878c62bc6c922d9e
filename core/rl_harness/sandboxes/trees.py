"""A file or directory tree as a stream of records, between the host and a sandbox, trusted by neither.

A record is a 4-byte length, a JSON header (``p`` path, ``t`` kind: f, d, l, h, skipped or end, ``m`` mode, ``s`` size,
``l`` link target, or for h, a further name of an earlier file, that file's path), then for a file its ``s`` bytes.
Paths are relative to the tree's root, which is "". The receiver makes every entry through directory descriptors, never
through a link, and refuses ``..``, absolute paths and special files.
"""

from __future__ import annotations

import json
import os
import stat
import struct
import threading
from typing import Any, Protocol

from rl_harness.shortages import SHORT

MAX_HEADER = 20_000
MAX_ENTRIES = 1_000_000
#: Longer paths than most systems take in one piece, and more levels than anybody needs, cost the square of their
#: length to follow: what lies deeper is refused like a device.
MAX_PATH = 4000
MAX_LEVELS = 200
#: Directories opened on the way to all entries, and bytes of paths that are kept until the end: these bound the time
#: and the memory that a tree made to cost them takes. A tree that people made is far below both.
MAX_STEPS = 1_000_000
MAX_KEPT = 16 << 20
CHUNK = 1 << 20

_OPEN_DIRECTORIES = 16

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class TreeError(Exception):
    """The tree holds something that is refused, or the stream is not a tree."""


class Malformed(TreeError):
    """The stream is not a tree: whatever wrote it does not do its work."""


def send(source: int, output: int, *, skip_unsafe: bool = False) -> None:
    """Send the file or directory open at ``source`` to the descriptor ``output``.

    Devices, sockets, FIFOs and what lies too deep are refused, or with ``skip_unsafe`` only named.
    """
    status = os.fstat(source)
    if stat.S_ISREG(status.st_mode):
        _send_file(source, "", status, output)
    elif stat.S_ISDIR(status.st_mode):
        _header(output, {"p": "", "t": "d", "m": stat.S_IMODE(status.st_mode)})
        _send_directory(source, output, skip_unsafe)
    elif skip_unsafe:
        _header(output, {"p": "", "t": "skipped"})
    else:
        raise TreeError("not a file or directory")
    _header(output, {"p": "", "t": "end"})


def _send_directory(source: int, output: int, skip_unsafe: bool) -> None:
    pending = [""]
    with _Directories(source) as directories:
        while pending:
            relative = pending.pop()
            directory = directories.open(relative)
            for name in sorted(os.listdir(directory)):
                path = f"{relative}/{name}" if relative else name
                status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                if len(path) > MAX_PATH or path.count("/") >= MAX_LEVELS:
                    if not skip_unsafe:
                        raise TreeError(f"{path[:80]}...: too many directories within each other")
                    _header(output, {"p": path[:MAX_PATH], "t": "skipped"})
                elif stat.S_ISDIR(status.st_mode):
                    _header(output, {"p": path, "t": "d", "m": stat.S_IMODE(status.st_mode)})
                    pending.append(path)
                elif stat.S_ISLNK(status.st_mode):
                    _header(output, {"p": path, "t": "l", "l": os.readlink(name, dir_fd=directory)})
                elif stat.S_ISREG(status.st_mode):
                    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
                    file = os.open(name, flags, dir_fd=directory)
                    try:
                        _send_file(file, path, os.fstat(file), output)
                    finally:
                        os.close(file)
                elif skip_unsafe:
                    _header(output, {"p": path, "t": "skipped"})
                else:
                    raise TreeError(f"{path}: a device, socket or FIFO")


def _send_file(source: int, path: str, status: os.stat_result, output: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise TreeError(f"{path}: not a regular file")
    left = status.st_size
    _header(output, {"p": path, "t": "f", "m": stat.S_IMODE(status.st_mode), "s": left})
    while left:
        chunk = os.read(source, min(CHUNK, left))
        if not chunk:  # it shrank while being read
            chunk = bytes(min(CHUNK, left))
        _write(output, chunk)
        left -= len(chunk)


class Entries(Protocol):
    """Where a receiver takes its records from. Both methods raise :class:`TreeError` for anything malformed."""

    def header(self) -> dict[str, Any]:
        """The next record's header; the last one is of kind ``end``."""

    def read(self, size: int) -> bytes:
        """At most ``size`` of the bytes that follow a file's header; empty when the stream has ended."""


class _Records:
    """The records that :func:`send` writes, from a descriptor."""

    def __init__(self, source: int) -> None:
        self._source = source

    def header(self) -> dict[str, Any]:
        return _read_header(self._source)

    def read(self, size: int) -> bytes:
        return os.read(self._source, size)


def receive(
    source: int | Entries,
    parent: int,
    name: str,
    *,
    keep_links: bool,
    limit: int | None = None,
    skip_unsafe: bool = False,
) -> list[str]:
    """Make the tree arriving on ``source`` (a descriptor that :func:`send` writes to, or other records) as ``name`` in
    the directory open at ``parent``.

    ``keep_links``: make symbolic links as they are; otherwise one that leaves the tree is refused, or with
    ``skip_unsafe`` left out. Returns the paths left out, here or by the sender. At most ``limit`` bytes of files are
    written. An empty ``name`` merges a directory's content into ``parent`` itself.
    Raises ``OSError`` where this machine is short of something (a full disk), :class:`TreeError` otherwise.
    """
    entries = _Records(source) if isinstance(source, int) else source
    receiver = _Receiver(entries, keep_links, limit, skip_unsafe)
    try:
        receiver.run(parent, name)
    except OSError as error:
        if error.errno in SHORT:
            raise  # not the tree's fault
        raise TreeError(error.strerror or str(error)) from None
    except UnicodeEncodeError:
        raise TreeError("a name that no file can have") from None
    finally:
        receiver.close()
    return receiver.skipped


class _Receiver:
    def __init__(self, source: Entries, keep_links: bool, limit: int | None, skip_unsafe: bool) -> None:
        self.skipped: list[str] = []
        self._directories: _Directories | None = None
        self._kept = 0
        self._source = source
        self._keep_links = keep_links
        self._limit = limit
        self._left = limit
        self._skip_unsafe = skip_unsafe
        self._modes: list[tuple[str, int]] = []

    def close(self) -> None:
        if self._directories is not None:
            self._directories.close()

    def run(self, parent: int, name: str) -> None:
        for _ in range(MAX_ENTRIES):
            header = self._source.header()
            kind = header.get("t")
            if kind == "end":
                break
            parts = _parts(header.get("p"))
            if kind == "skipped" and self._skip_unsafe:
                self._skip(parts)
            elif parts and self._directories is not None:
                self._entry(self._directories, parts, header)
            elif not parts and self._directories is None and kind == "d":
                root = _make_directory(parent, name) if name else os.dup(parent)
                try:
                    self._directories = _Directories(root)
                    if name:
                        self._set_mode(root, parts, _mode(header))
                finally:
                    os.close(root)
            elif not parts and self._directories is None and kind == "f" and name:
                self._file(parent, name, header)
            elif not parts and kind == "skipped":
                raise TreeError("not a file or directory")
            else:
                raise TreeError("entry outside the tree")
        else:
            raise TreeError(f"more than {MAX_ENTRIES} entries")
        for path, mode in reversed(self._modes):
            assert self._directories is not None
            os.fchmod(self._directories.open(path), mode)

    def _entry(self, directories: _Directories, parts: list[str], header: dict[str, Any]) -> None:
        directory = directories.open("/".join(parts[:-1]))
        name, kind = parts[-1], header["t"]
        if kind == "d":
            made = _make_directory(directory, name)
            try:
                self._set_mode(made, parts, _mode(header))
            finally:
                os.close(made)
        elif kind == "l":
            self._link(directory, parts, header.get("l"))
        elif kind == "f":
            self._file(directory, name, header)
        elif kind == "h":
            earlier = _parts(header.get("l"))
            if not earlier:
                raise TreeError("malformed link")
            self._further_name(directory, name, earlier, directories.open("/".join(earlier[:-1])))
        elif kind == "skipped":
            raise TreeError(f"{'/'.join(parts)}: a device, socket or FIFO")
        else:
            raise TreeError("unknown kind of entry")

    def _set_mode(self, directory: int, parts: list[str], mode: int) -> None:
        """At once, but for a directory that could not be filled any more: then last."""
        if mode & stat.S_IRWXU == stat.S_IRWXU:
            os.fchmod(directory, mode)
        else:
            self._modes.append((self._keep(parts), mode))

    def _skip(self, parts: list[str]) -> None:
        self.skipped.append(self._keep(parts))

    def _keep(self, parts: list[str]) -> str:
        path = "/".join(parts)
        self._kept += len(path)
        if self._kept > MAX_KEPT:
            raise TreeError("too many names that cannot be made, or directories that nobody may enter")
        return path

    def _link(self, directory: int, parts: list[str], link: Any) -> None:
        if not isinstance(link, str) or not link or "\0" in link:
            raise TreeError("malformed link")
        if not self._keep_links and leaves(parts, link):
            if not self._skip_unsafe:
                raise TreeError(f"{'/'.join(parts)}: a link that leaves the tree ({link})")
            self._skip(parts)
            return
        _unlink(directory, parts[-1])
        os.symlink(link, parts[-1], dir_fd=directory)

    def _further_name(self, directory: int, name: str, earlier: list[str], there: int) -> None:
        """A copy of an earlier file of the tree: on the host nothing shares its content with anything."""
        original = os.open(earlier[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=there)
        try:
            status = os.fstat(original)
            if not stat.S_ISREG(status.st_mode):
                raise TreeError(f"{'/'.join(earlier)}: not a regular file")
            self._spend(status.st_size)
            _unlink(directory, name)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            target = os.open(name, flags, 0o600, dir_fd=directory)
            try:
                while chunk := os.read(original, CHUNK):
                    _write(target, chunk)
                os.fchmod(target, stat.S_IMODE(status.st_mode))
            finally:
                os.close(target)
        finally:
            os.close(original)

    def _spend(self, size: int) -> None:
        if self._left is not None:
            self._left -= size
            if self._left < 0:
                raise TreeError(f"more than {self._limit} bytes")

    def _file(self, directory: int, name: str, header: dict[str, Any]) -> None:
        size = header.get("s")
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise TreeError("malformed size")
        self._spend(size)
        _unlink(directory, name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        target = os.open(name, flags, 0o600, dir_fd=directory)
        try:
            while size:
                chunk = self._source.read(min(CHUNK, size))
                if not chunk:
                    raise Malformed("stream ended inside a file")
                _write(target, chunk)
                size -= len(chunk)
            os.fchmod(target, _mode(header))
        finally:
            os.close(target)


def leaves(parts: list[str], link: str) -> bool:
    """Whether a link at ``parts`` points, lexically, out of its tree."""
    if link.startswith("/"):
        return True
    depth = len(parts) - 1
    for part in link.split("/"):
        if part == "..":
            depth -= 1
        elif part not in ("", "."):
            depth += 1
        if depth < 0:
            return True
    return False


def copy(
    source: int, parent: int, name: str, *, keep_links: bool, limit: int | None = None, skip_unsafe: bool = False
) -> list[str]:
    """Copy between two places of this machine by the same rules: a sender thread and a receiver."""
    read, write = os.pipe()
    failures: list[Exception] = []

    def run() -> None:
        try:
            send(source, write, skip_unsafe=skip_unsafe)
        except BrokenPipeError:
            pass
        except (OSError, TreeError) as error:
            failures.append(error)
        finally:
            os.close(write)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        return receive(read, parent, name, keep_links=keep_links, limit=limit, skip_unsafe=skip_unsafe)
    except TreeError as error:
        raise failures[0] if failures else error from None
    finally:
        os.close(read)
        thread.join()


def _mode(header: dict[str, Any]) -> int:
    mode = header.get("m")
    if not isinstance(mode, int):
        raise TreeError("malformed mode")
    return mode & 0o777


def _parts(path: Any) -> list[str]:
    if not isinstance(path, str) or path.startswith("/") or "\0" in path:
        raise TreeError("malformed path")
    parts = path.split("/") if path else []
    if any(part in ("", ".", "..") for part in parts):
        raise TreeError(f"{path}: not a plain relative path")
    return parts


def _make_directory(parent: int, name: str) -> int:
    try:
        os.mkdir(name, 0o700, dir_fd=parent)
    except FileExistsError:
        if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            _unlink(parent, name)
            os.mkdir(name, 0o700, dir_fd=parent)
    return os.open(name, _DIRECTORY, dir_fd=parent)


def _unlink(directory: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        pass


class _Directories:
    """The directories of a tree by their paths, opened without following a link. The last ones stay open, since most
    of what follows lies in or beside them."""

    def __init__(self, root: int) -> None:
        self._root = os.dup(root)
        self._open: dict[str, int] = {}
        self._steps = 0

    def __enter__(self) -> _Directories:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, relative: str) -> int:
        """A descriptor, which stays this object's and good for the next few calls."""
        if not relative:
            return self._root
        within = f"{relative}/"
        path = max((known for known in self._open if within.startswith(f"{known}/")), key=len, default="")
        at = self._root
        if path:
            at = self._open[path] = self._open.pop(path)  # the one used last comes last
        for part in within[len(path) :].strip("/").split("/") if path != relative else ():
            self._steps += 1
            if self._steps > MAX_STEPS:
                raise TreeError("too many directories within each other")
            at = os.open(part, _DIRECTORY, dir_fd=at)
            path = f"{path}/{part}" if path else part
            self._open[path] = at
            if len(self._open) > _OPEN_DIRECTORIES:
                os.close(self._open.pop(next(iter(self._open))))
        return at

    def close(self) -> None:
        for descriptor in (self._root, *self._open.values()):
            os.close(descriptor)
        self._open.clear()


def _header(output: int, header: dict[str, Any]) -> None:
    data = json.dumps(header).encode()
    _write(output, struct.pack(">I", len(data)) + data)


def _read_header(source: int) -> dict[str, Any]:
    (length,) = struct.unpack(">I", _read_exactly(source, 4))
    if length > MAX_HEADER:
        raise TreeError("header too long")
    try:
        header = json.loads(_read_exactly(source, length))
    except (ValueError, RecursionError):
        raise TreeError("malformed header") from None
    if not isinstance(header, dict):
        raise TreeError("malformed header")
    return header


def _read_exactly(source: int, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        chunk = os.read(source, length - len(data))
        if not chunk:
            raise Malformed("stream ended early")
        data += chunk
    return bytes(data)


def _write(output: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(output, view) :]
