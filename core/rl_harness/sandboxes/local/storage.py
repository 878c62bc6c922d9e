"""What sandboxes leave on disk: one folder each, with a record of its labels and owner, and its writable layers.

Used by the host, by the reaper of another process, and by the helper after its host died.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import stat
from collections.abc import Mapping
from typing import Any

from rl_harness.sandboxes.local import cgroups

RECORD = "record.json"
INIT = "init.json"
UID_BASE = 1_900_000_000  # as root: to whom the files of root inside belong
# What the names of folders begin with.
SANDBOX = "local-"
SNAPSHOT = "snapshot-"
_PASSING = "passing-"  # being made or removed; a namespace of processes and the one that is at it follow
_RECURSION = 40


def names(state: int) -> list[str]:
    """What is in a folder that several threads, or a process and those forked off it, have the same descriptor of:
    ``os.listdir`` of that would read on from where another of them is, and leave out the rest."""
    own = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=state)
    try:
        return os.listdir(own)
    finally:
        os.close(own)


def process_start(pid: int) -> str | None:
    """What tells this process from a later one of the same pid: boot id and start time. None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else f"{boot_id()}:{int(fields[19])}"


@functools.cache
def boot_id() -> str:
    """What tells this boot of the machine from others."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def make(state: int, name: str, record: str, content: Mapping[str, Any]) -> None:
    """Make a folder with its record: both or none."""
    passing = _passing()
    os.mkdir(passing, 0o711, dir_fd=state)
    try:
        write(state, f"{passing}/{record}", content)
        os.rename(passing, name, src_dir_fd=state, dst_dir_fd=state)
    except BaseException:
        remove_tree(state, passing)
        raise


def write(state: int, path: str, content: Mapping[str, Any]) -> None:
    """Write a file, new or in the place of another, whole or not at all."""
    temporary = f"{path}.{os.urandom(4).hex()}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=state)
    try:
        os.write(descriptor, json.dumps(content).encode())
    finally:
        os.close(descriptor)
    os.rename(temporary, path, src_dir_fd=state, dst_dir_fd=state)


def _passing() -> str:
    return f"{_PASSING}{_namespace()}-{os.getpid()}-{_ticks(os.getpid())}-{os.urandom(8).hex()}"


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _ticks(pid: int) -> str:
    return (process_start(pid) or "").rpartition(":")[2]


def sweep(state: int) -> None:
    """Remove folders that a process was making or removing when it died."""
    for name in names(state):
        if name.startswith(_PASSING):
            namespace, pid, started = name.split("-")[1:4]
            if namespace == str(_namespace()) and _ticks(int(pid)) != started:
                remove_tree(state, name)


def read_records(state: int) -> dict[str, dict[str, Any]]:
    """The record of every sandbox folder, with what is known of its init. One that cannot be read names no owner."""
    records = {}
    for name in names(state):
        if name.startswith(SANDBOX):
            record = read(state, f"{name}/{RECORD}")
            if record is not None or _exists(state, name):
                records[name] = (record or {}) | (read(state, f"{name}/{INIT}") or {})
    return records


def _exists(state: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=state)
    except FileNotFoundError:
        return False
    return True


def read(state: int, path: str) -> dict[str, Any] | None:
    """A record; None when there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=state)
        with open(descriptor) as file:
            content = json.load(file)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # any other error says nothing about the record
        return None
    return content if isinstance(content, dict) else None


_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_owned(state: int, owner: str) -> None:
    """Remove the folders and groups of every sandbox made by the provider ``owner``, whose inits are dead."""
    for name, record in read_records(state).items():
        if record.get("owner") == owner:
            remove(state, name, record.get("cgroups", []))
    sweep(state)


def remove(state: int, name: str, groups: list[str]) -> None:
    """Remove one sandbox's groups and folder; its processes are dead. Tolerates another doing the same."""
    cgroups.remove(groups)
    remove_folder(state, name)


def remove_folder(state: int, name: str) -> None:
    """Remove a folder, with its record at once and with the rest by and by; :func:`sweep` ends what is cut off."""
    passing = _passing()
    try:
        os.rename(name, passing, src_dir_fd=state, dst_dir_fd=state)
    except FileNotFoundError:
        return
    remove_tree(state, passing)


def remove_tree(parent: int, name: str) -> None:
    """Remove a directory whatever is in it: any depth, any modes, no link followed, few descriptors."""
    try:
        top = os.open(name, _DIRECTORY, dir_fd=parent)
    except FileNotFoundError:
        return
    try:
        remover = _Remover(top)
        while not _removed(name, parent):  # what is dying may add to it meanwhile
            for entry in os.listdir(top):
                remover.remove(top, entry, _RECURSION)
    finally:
        os.close(top)


class _Remover:
    def __init__(self, top: int) -> None:
        self._top = top
        self._moved = 0

    def remove(self, directory: int, name: str, depth: int) -> None:
        """Remove an entry; a directory too deep for recursion is moved to the top, where its turn comes again."""
        try:
            if not stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=directory)
                return
            try:
                os.rmdir(name, dir_fd=directory)
                return
            except OSError:
                os.chmod(name, 0o700, dir_fd=directory)
            if depth == 0:
                self._moved += 1
                os.rename(name, f".{os.getpid()}.{self._moved}", src_dir_fd=directory, dst_dir_fd=self._top)
                return
            inner = os.open(name, _DIRECTORY, dir_fd=directory)
        except FileNotFoundError:
            return
        try:
            for entry in os.listdir(inner):
                self.remove(inner, entry, depth - 1)
        finally:
            os.close(inner)
        _removed(name, directory)  # or its turn comes again


def _removed(name: str, directory: int) -> bool:
    """Remove an empty directory; whether it is gone."""
    try:
        os.rmdir(name, dir_fd=directory)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        return False
    return True
