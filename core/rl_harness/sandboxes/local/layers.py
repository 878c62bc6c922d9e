"""Freezes what a sandbox has written: copies its writable overlay layers, from inside, while it goes on.

Runs in a worker, which has the rights of the sandbox's root over its files and no others. Whatever overlayfs says in
a layer (removed, replaced) is said in the copy. Set-user-id bits, devices and sockets are left out: the first two mean
nothing in a sandbox, and the copy lies where the host can see it.
"""

from __future__ import annotations

import errno
import os
import stat

from rl_harness.sandboxes.local import storage
from rl_harness.sandboxes.local import syscalls as sc
from rl_harness.sandboxes.local.mounts import Root

MAX_PATH = 4000
MAX_LEVELS = 200

_OPAQUE = "user.overlay.opaque"
#: What overlayfs notes for itself about where an entry of an upper layer came from.
_NOTES = ("user.overlay.origin", "user.overlay.impure", "user.overlay.nlink", "user.overlay.uuid")
_CHUNK = 1 << 30
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | _FLAGS


class TooDeep(Exception):
    """A path that is longer than anybody needs, or nests deeper."""


def freeze(root: Root, target: int, merge: bool) -> int:
    """Copy the writable layers of ``root`` into the directory open at ``target``; bytes of files that it holds.

    With ``merge`` the snapshots that the sandbox started from are copied first, so that the result stands without
    them.
    """
    total = 0
    for layer in root.layers:
        os.mkdir(layer.name, 0o700, dir_fd=target)
        into = os.open(layer.name, _DIRECTORY, dir_fd=target)
        try:
            below = layer.lowers[: layer.frozen] if merge else []
            for source in (*reversed(below), layer.upper):
                total += _Copier(source, into).run()
        finally:
            os.close(into)
    return total


class _Copier:
    """Lays one layer over what is at the target already."""

    def __init__(self, source: int, target: int) -> None:
        self._source = source
        self._target = target
        self._total = 0
        self._links: dict[int, str] = {}  # of files with several names: inode and the first path in the target
        self._directories: list[tuple[str, os.stat_result]] = []

    def run(self) -> int:
        """Copy all; bytes of files."""
        pending = [""]
        while pending:
            relative = pending.pop()
            source = self._open(self._source, relative, missing=True)
            if source < 0:
                continue  # removed meanwhile
            target = self._open(self._target, relative)
            self._directories.append((relative, os.fstat(source)))
            try:
                for name in os.listdir(source):
                    path = f"{relative}/{name}" if relative else name
                    if len(path) > MAX_PATH or path.count("/") >= MAX_LEVELS:
                        raise TooDeep(f"{path[:80]}...: too many directories within each other")
                    if self._entry(source, target, name, path):
                        pending.append(path)
            finally:
                os.close(source)
                os.close(target)
        for relative, status in reversed(self._directories):  # last, as filling a directory changes its times
            directory = self._open(self._target, relative)
            try:
                _set_owner_and_mode(directory, status)
                os.utime(directory, ns=(status.st_atime_ns, status.st_mtime_ns))
            finally:
                os.close(directory)
        return self._total

    def _open(self, base: int, relative: str, *, missing: bool = False) -> int:
        try:
            return sc.open_beneath_root(relative or ".", _DIRECTORY, directory=base)
        except OSError as error:
            if missing and error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return -1
            raise

    def _entry(self, source: int, target: int, name: str, path: str) -> bool:
        """Copy one entry; whether it is a directory, whose content is still to be copied."""
        try:
            status = os.stat(name, dir_fd=source, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                self._directory(source, target, name)
                return True
            self._replace(target, name)
            if stat.S_ISREG(status.st_mode):
                self._file(source, target, name, path)
            elif stat.S_ISLNK(status.st_mode):
                os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
                self._describe(target, name, status)
            elif stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:  # says: removed
                os.mknod(name, stat.S_IFCHR, 0, dir_fd=target)
            elif stat.S_ISFIFO(status.st_mode):
                os.mkfifo(name, 0o600, dir_fd=target)
                os.chmod(name, stat.S_IMODE(status.st_mode), dir_fd=target)
                self._describe(target, name, status)
        except FileNotFoundError:
            pass  # removed meanwhile
        return False

    def _replace(self, target: int, name: str) -> None:
        """Make room for what replaces an entry of an older layer."""
        try:
            os.unlink(name, dir_fd=target)
        except FileNotFoundError:
            pass
        except IsADirectoryError:
            storage.remove_tree(target, name)

    def _directory(self, source: int, target: int, name: str) -> None:
        inside = os.open(name, _DIRECTORY, dir_fd=source)
        try:
            attributes = _attributes(inside)
            try:
                before = os.stat(name, dir_fd=target, follow_symlinks=False)
            except FileNotFoundError:
                pass
            else:
                # Over anything but a directory, and where it says so, it hides what older layers have below.
                if not stat.S_ISDIR(before.st_mode):
                    attributes[_OPAQUE] = b"y"
                if _OPAQUE in attributes:
                    self._replace(target, name)
            try:
                os.mkdir(name, 0o700, dir_fd=target)
            except FileExistsError:
                pass
            made = os.open(name, _DIRECTORY, dir_fd=target)
            try:
                _set_attributes(made, attributes)
            finally:
                os.close(made)
        finally:
            os.close(inside)

    def _file(self, source: int, target: int, name: str, path: str) -> None:
        reading = os.open(name, os.O_RDONLY | os.O_NONBLOCK | _FLAGS, dir_fd=source)
        try:
            status = os.fstat(reading)
            if not stat.S_ISREG(status.st_mode):
                return  # replaced meanwhile
            if status.st_nlink > 1:
                first = self._links.setdefault(status.st_ino, path)
                if first != path:
                    os.link(first, name, src_dir_fd=self._target, dst_dir_fd=target, follow_symlinks=False)
                    return
            writing = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600, dir_fd=target)
            try:
                self._total += _copy(reading, writing, status.st_size)
                _set_attributes(writing, _attributes(reading))
                _set_owner_and_mode(writing, status)
                os.utime(writing, ns=(status.st_atime_ns, status.st_mtime_ns))
            finally:
                os.close(writing)
        finally:
            os.close(reading)

    def _describe(self, target: int, name: str, status: os.stat_result) -> None:
        os.chown(name, status.st_uid, status.st_gid, dir_fd=target, follow_symlinks=False)
        times = (status.st_atime_ns, status.st_mtime_ns)
        os.utime(name, ns=times, dir_fd=target, follow_symlinks=False)


def _copy(source: int, target: int, size: int) -> int:
    """Copy what is data; holes stay holes. Bytes copied."""
    copied = at = 0
    while at < size:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
            end = os.lseek(source, at, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:  # no more data
                break
            raise
        os.lseek(source, at, os.SEEK_SET)
        os.lseek(target, at, os.SEEK_SET)
        while at < end:
            count = _transfer(source, target, end - at)
            if not count:
                break  # it shrank meanwhile
            at += count
            copied += count
        else:
            continue
        break
    os.ftruncate(target, size)
    return copied


def _transfer(source: int, target: int, count: int) -> int:
    """Some of the next ``count`` bytes, shared with the source where the file system can."""
    try:
        return os.copy_file_range(source, target, min(count, _CHUNK))
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    return os.sendfile(target, source, None, min(count, _CHUNK))


def _attributes(descriptor: int) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    try:
        names = os.listxattr(descriptor)
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            return found
        raise
    for name in names:
        if name.startswith(("user.", "system.posix_acl_")) and name not in _NOTES:
            found[name] = os.getxattr(descriptor, name)
    return found


def _set_attributes(descriptor: int, attributes: dict[str, bytes]) -> None:
    for name, value in attributes.items():
        os.setxattr(descriptor, name, value)


def _set_owner_and_mode(descriptor: int, status: os.stat_result) -> None:
    os.fchown(descriptor, status.st_uid, status.st_gid)
    mode = stat.S_IMODE(status.st_mode)
    os.fchmod(descriptor, mode if stat.S_ISDIR(status.st_mode) else mode & ~(stat.S_ISUID | stat.S_ISGID))
