"""A file or directory tree as a stream of records, between the host and a sandbox, trusted by neither.

A record is a 4-byte length, a JSON header ``{"p": path, "t": "f"|"d"|"l"|"end", "m": mode, "s": size, "l": link}``,
then for a file its ``s`` bytes. Paths are relative to the tree's root, which is "". The receiver makes every entry
through directory descriptors, never through a link, and refuses ``..``, absolute paths and special files.
"""

from __future__ import annotations

import json
import os
import stat
import struct
from typing import Any

MAX_HEADER = 20_000
MAX_ENTRIES = 1_000_000
CHUNK = 1 << 20

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class TreeError(Exception):
    """The tree holds something that is refused, or the stream is not a tree."""


def send(source: int, output: int) -> None:
    """Send the file or directory open at ``source`` to the descriptor ``output``."""
    status = os.fstat(source)
    if stat.S_ISREG(status.st_mode):
        _send_file(source, "", status, output)
    elif stat.S_ISDIR(status.st_mode):
        _header(output, {"p": "", "t": "d", "m": stat.S_IMODE(status.st_mode)})
        _send_directory(source, output)
    else:
        raise TreeError("not a file or directory")
    _header(output, {"p": "", "t": "end"})


def _send_directory(source: int, output: int) -> None:
    pending = [""]
    while pending:
        relative = pending.pop()
        directory = _walk(source, relative)
        try:
            for name in sorted(os.listdir(directory)):
                path = f"{relative}/{name}" if relative else name
                status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
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
                else:
                    raise TreeError(f"{path}: a device, socket or FIFO")
        finally:
            os.close(directory)


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


def receive(source: int, parent: int, name: str, *, keep_links: bool) -> int:
    """Make the tree arriving on ``source`` as ``name`` in the directory open at ``parent``; returns its entries.

    ``keep_links``: make symbolic links as they are; otherwise one that leaves the tree is refused.
    An empty ``name`` merges a directory's content into ``parent`` itself.
    """
    entries = 0
    modes: list[tuple[str, int]] = []
    root = -1
    try:
        while True:
            header = _read_header(source)
            kind, path = header.get("t"), header.get("p")
            if kind == "end":
                break
            entries += 1
            if entries > MAX_ENTRIES:
                raise TreeError(f"more than {MAX_ENTRIES} entries")
            parts = _parts(path)
            if not parts and root < 0 and kind == "d":
                root = _make_directory(parent, name) if name else os.dup(parent)
                modes.append(("", _mode(header)))
            elif not parts and root < 0 and kind == "f" and name:
                _receive_file(source, parent, name, header)
            elif parts and root >= 0:
                _receive_entry(source, root, parts, header, modes, keep_links)
            else:
                raise TreeError("entry outside the tree")
        for path, mode in reversed(modes):
            if path or name:
                directory = _walk(root, path)
                try:
                    os.fchmod(directory, mode)
                finally:
                    os.close(directory)
    except OSError as error:
        raise TreeError(error.strerror or str(error)) from None
    finally:
        if root >= 0:
            os.close(root)
    return entries


def _receive_entry(
    source: int,
    root: int,
    parts: list[str],
    header: dict[str, Any],
    modes: list[tuple[str, int]],
    keep_links: bool,
) -> None:
    directory = _walk(root, "/".join(parts[:-1]))
    try:
        name, kind = parts[-1], header["t"]
        if kind == "d":
            os.close(_make_directory(directory, name))
            modes.append(("/".join(parts), _mode(header)))
        elif kind == "l":
            link = header.get("l")
            if not isinstance(link, str):
                raise TreeError("malformed link")
            if not keep_links and leaves(parts, link):
                raise TreeError(f"{'/'.join(parts)}: a link that leaves the tree ({link})")
            _unlink(directory, name)
            os.symlink(link, name, dir_fd=directory)
        elif kind == "f":
            _receive_file(source, directory, name, header)
        else:
            raise TreeError("unknown kind of entry")
    finally:
        os.close(directory)


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


def _receive_file(source: int, directory: int, name: str, header: dict[str, Any]) -> None:
    size = header.get("s")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise TreeError("malformed size")
    _unlink(directory, name)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    target = os.open(name, flags, 0o600, dir_fd=directory)
    try:
        while size:
            chunk = os.read(source, min(CHUNK, size))
            if not chunk:
                raise TreeError("stream ended inside a file")
            _write(target, chunk)
            size -= len(chunk)
        os.fchmod(target, _mode(header))
    finally:
        os.close(target)


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


def _walk(root: int, relative: str) -> int:
    """A descriptor of the directory ``relative`` to ``root``, following no link."""
    at = os.dup(root) if not relative else root
    for part in relative.split("/") if relative else ():
        following = os.open(part, _DIRECTORY, dir_fd=at)
        if at != root:
            os.close(at)
        at = following
    return at


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
            raise TreeError("stream ended early")
        data += chunk
    return bytes(data)


def _write(output: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(output, view) :]
