"""What sandboxes leave on disk: one folder each, with a record of its labels and owner, and its writable layers.

Used by the host, by the reaper of another process, and by the helper after its host died.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Mapping
from typing import Any

from rl_harness.sandboxes.local import cgroups

RECORD = "record.json"


def process_start(pid: int) -> str | None:
    """What tells this process from a later one of the same pid: boot id and start time. None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        if fields[0] in (b"Z", b"X"):
            return None
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}:{int(fields[19])}"
    except (OSError, IndexError):
        return None


def new_record(owner: str, labels: Mapping[str, str]) -> dict[str, Any]:
    """The record of a sandbox that this process makes for the provider ``owner``."""
    return {
        "owner": owner,
        "labels": dict(labels),
        "owner_pid": os.getpid(),
        "owner_start": process_start(os.getpid()),
        "created_at": time.time(),
        "cgroups": [],
    }


def write_record(state: int, name: str, record: dict[str, Any]) -> None:
    """Write a sandbox's record, whole or not at all."""
    temporary = f"{name}/.{RECORD}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600, dir_fd=state)
    with open(descriptor, "w") as file:
        json.dump(record, file)
    os.rename(temporary, f"{name}/{RECORD}", src_dir_fd=state, dst_dir_fd=state)


def read_records(state: int) -> dict[str, dict[str, Any]]:
    """The record of every sandbox folder; an unreadable one counts as a record without an owner."""
    records = {}
    for name in os.listdir(state):
        try:
            descriptor = os.open(f"{name}/{RECORD}", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=state)
            with open(descriptor) as file:
                record = json.load(file)
            if isinstance(record, dict):
                records[name] = record
        except NotADirectoryError:
            continue
        except FileNotFoundError:
            # Between the folder and its record lies an instant; much later the owner died there.
            try:
                created = os.stat(name, dir_fd=state).st_mtime
            except OSError:
                continue
            if time.time() - created > 60:
                records[name] = {"created_at": created}
        except (OSError, ValueError):
            continue
    return records


def remove_owned(state: int, owner: str) -> None:
    """Remove the folders and groups of every sandbox made by the provider ``owner``, whose inits are dead."""
    for name, record in read_records(state).items():
        if record.get("owner") == owner:
            remove(state, name, record.get("cgroups", []))


def remove(state: int, name: str, groups: list[str]) -> None:
    """Remove one sandbox's groups and folder; its processes are dead. Tolerates another doing the same."""
    cgroups.remove(groups)
    remove_tree(state, name)


def remove_tree(parent: int, name: str) -> None:
    """Remove a directory whatever is in it: any depth, any modes, no link followed, few descriptors.

    A subdirectory that is not empty is moved to the top first, so neither recursion nor path length is a limit.
    """
    try:
        top = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    except FileNotFoundError:
        return
    try:
        serial = 0
        while names := os.listdir(top):
            for entry in names:
                serial = _remove_entry(top, entry, serial)
    finally:
        os.close(top)
    try:
        os.rmdir(name, dir_fd=parent)
    except FileNotFoundError:
        pass


def _remove_entry(top: int, entry: str, serial: int) -> int:
    if not _unlink_or_open_up(top, entry):
        return serial
    directory = os.open(entry, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top)
    try:
        for inner in os.listdir(directory):
            if _unlink_or_open_up(directory, inner):
                serial += 1
                os.rename(inner, f".{os.getpid()}.{serial}", src_dir_fd=directory, dst_dir_fd=top)
    except FileNotFoundError:
        pass
    finally:
        os.close(directory)
    try:
        os.rmdir(entry, dir_fd=top)
    except FileNotFoundError:
        pass
    return serial


def _unlink_or_open_up(directory: int, name: str) -> bool:
    """Unlink a non-directory or an empty directory; make a full one writable and return True."""
    try:
        if not stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=directory)
            return False
        try:
            os.rmdir(name, dir_fd=directory)
            return False
        except OSError:
            os.chmod(name, 0o700, dir_fd=directory)
            return True
    except FileNotFoundError:
        return False
