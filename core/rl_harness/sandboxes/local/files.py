"""Files of a sandbox, handled by a worker forked from its init, which is inside and sees nothing of the host.

No path with a symbolic link in it is followed, save the links of the root itself (``/bin``, ``/lib``, ...), so what
the agent linked cannot redirect a read or a write. Trees travel as records; see ``rl_harness.sandboxes.trees``.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator

from rl_harness.sandboxes import trees
from rl_harness.sandboxes.local import syscalls as sc
from rl_harness.sandboxes.local.mounts import Root
from rl_harness.shortages import NO_ROOM

MAX_CHANGES = 200_000


class Refused(Exception):
    """A path that is not what it must be; ``kind`` tells the host which error to raise."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


def resolve(path: str, links: dict[str, str]) -> str:
    """``path`` made absolute, with a leading link of the root replaced by what it points to."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise Refused("refused", f"{path}: contains '..'")
    if parts and parts[0] in links:
        parts[:1] = [part for part in links[parts[0]].split("/") if part]
    return "/" + "/".join(parts)


def open_checked(path: str, flags: int, mode: int = 0) -> int:
    """Open without following any link; errors become :class:`Refused`."""
    try:
        return sc.open_beneath_root(path, flags, mode)
    except OSError as error:
        raise translate(path, error) from None


def translate(path: str, error: OSError) -> Refused:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return Refused("missing", f"{path}: no such file")
    if error.errno == errno.ELOOP:
        return Refused("refused", f"{path}: goes through a symbolic link")
    return Refused("full" if error.errno in NO_ROOM else "refused", f"{path}: {error.strerror}")


def read(path: str, output: int, limit: int | None) -> None:
    """Copy the regular file ``path`` to the descriptor ``output``."""
    source = open_checked(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        status = os.fstat(source)
        if not stat.S_ISREG(status.st_mode):
            raise Refused("refused", f"{path}: not a regular file")
        if limit is not None and status.st_size > limit:
            raise Refused("refused", f"{path}: {status.st_size} bytes, more than the limit of {limit}")
        while chunk := os.read(source, 1 << 20):
            write_all(output, chunk)
    finally:
        os.close(source)


def make_parents(path: str) -> None:
    """Create the directories above ``path``, none of them through a link."""
    parts = path.strip("/").split("/")[:-1]
    at = ""
    for part in parts:
        at += f"/{part}"
        try:
            os.close(sc.open_beneath_root(at, os.O_PATH | os.O_DIRECTORY))
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise translate(at, error) from None
            os.mkdir(at, 0o755)


def write(path: str, source: int, mode: int) -> None:
    """Write the file ``path`` from the descriptor ``source``, replacing whatever non-directory is there.

    The old entry is unlinked, never written through, so a link, a FIFO or a hard link of the agent's is harmless.
    """
    make_parents(path)
    parent, name = os.path.split(path)
    directory = open_checked(parent, os.O_PATH | os.O_DIRECTORY)
    try:
        try:
            os.unlink(name, dir_fd=directory)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise translate(path, error) from None
        target = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode, dir_fd=directory)
    finally:
        os.close(directory)
    try:
        os.fchmod(target, mode)
        while chunk := os.read(source, 1 << 20):
            write_all(target, chunk)
    finally:
        os.close(target)  # a program that is open for writing cannot be run


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def pack(path: str, output: int, skip_unsafe: bool) -> None:
    """Send the file or tree ``path`` as records."""
    source = open_checked(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        trees.send(source, output, skip_unsafe=skip_unsafe)
    except trees.TreeError as error:
        raise Refused("refused", f"{path}: {error}") from None
    finally:
        os.close(source)


def unpack(path: str, source: int) -> None:
    """Receive a file or tree that becomes ``path``, merging directories and replacing files."""
    if path != "/":
        make_parents(path)
    parent = open_checked(os.path.dirname(path) or "/", os.O_PATH | os.O_DIRECTORY)
    try:
        trees.receive(source, parent, os.path.basename(path), keep_links=True)
    except trees.TreeError as error:
        raise Refused("refused", f"{path}: {error}") from None
    finally:
        os.close(parent)


def changes(root: Root, output: int) -> None:
    """Send the absolute paths that differ from the start, NUL-terminated, by walking the writable layers."""
    count = 0
    for layer in root.layers:
        for path in _changed(layer.upper, layer.lowers, f"/{layer.target}" if layer.target else ""):
            count += 1
            if count > MAX_CHANGES:
                raise Refused("refused", f"more than {MAX_CHANGES} changed files")
            write_all(output, path.encode("utf-8", "surrogateescape") + b"\0")


def _changed(upper: int, lowers: list[int], prefix: str) -> Iterator[str]:
    pending = [("", prefix)]
    while pending:
        relative, shown = pending.pop()
        directory = _open_in(upper, relative or ".")
        if directory is None:
            continue
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    inner = f"{relative}/{entry.name}" if relative else entry.name
                    path = f"{shown}/{entry.name}"
                    if not entry.is_dir(follow_symlinks=False):
                        yield path
                        continue
                    status = entry.stat(follow_symlinks=False)
                    if not _same_directory(status, lowers, inner) or _opaque(directory, entry.name):
                        yield path
                    pending.append((inner, path))
        finally:
            os.close(directory)


def _open_in(base: int, relative: str) -> int | None:
    try:
        return sc.open_beneath_root(relative, os.O_RDONLY | os.O_DIRECTORY, directory=base)
    except OSError:
        return None


def _same_directory(status: os.stat_result, lowers: list[int], relative: str) -> bool:
    """Whether what was at ``relative`` before is a directory with the same owner and mode."""
    for lower in lowers:
        try:
            found = os.stat(relative, dir_fd=lower, follow_symlinks=False)
        except OSError:
            if _hides(lower, relative):
                return False
            continue
        return (found.st_mode, found.st_uid, found.st_gid) == (status.st_mode, status.st_uid, status.st_gid)
    return False


def _hides(lower: int, relative: str) -> bool:
    """Whether a layer that has nothing at ``relative`` hides what older ones have there: a parent was removed in it or
    replaced."""
    parts = relative.split("/")
    for count in range(1, len(parts)):
        parent = "/".join(parts[:count])
        try:
            status = os.stat(parent, dir_fd=lower, follow_symlinks=False)
        except OSError:
            return False
        if not stat.S_ISDIR(status.st_mode) or _opaque(lower, parent):
            return True
    return False


def _opaque(directory: int, name: str) -> bool:
    try:
        return os.getxattr(f"/proc/self/fd/{directory}/{name}", "user.overlay.opaque", follow_symlinks=False) == b"y"
    except OSError:
        return False
