"""Snapshots on disk: one folder each, with a record and what its sandbox had written; who still needs which.

A snapshot is a chain of layers, its own and those of the snapshots its sandbox had started from. Frozen layers never
change, so any number of sandboxes and later snapshots stand on them. A deleted snapshot is only marked as long as
somebody does. Used by the host, by the reaper of another process, and by the helper after its host died.

No lock is needed: whoever starts from a snapshot writes a record first and then looks whether the snapshot is still
there; whoever deletes renames its record first and then reads those of all others.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from rl_harness.sandboxes.local import storage
from rl_harness.sandboxes.local import syscalls as sc

RECORD = "snapshot.json"
_DELETED = "deleted.json"  # what the record is called then: renaming works on a full disk too
#: Longer chains are merged into one layer when the next snapshot is made.
MAX_LAYERS = 8
MAKING, READY = "making", "ready"
_SYNCED = "synced"

_NAME = re.compile(rf"{storage.SNAPSHOT}[0-9a-f]{{16}}\Z")


def begin(
    state: int, owned: Mapping[str, Any], *, below: Sequence[str], base: Mapping[str, Any], uid: int | None
) -> str:
    """Make the folder of a snapshot that this process starts to fill; its id.

    ``owned``: what its record says of its owner, with ``labels`` and ``key``; and ``temporary``, if it is nobody's but
    this process's. ``below``: the layers under its own, newest first. ``base``: what they all lie on. ``uid``: who
    fills it, None for this user.
    """
    name = f"{storage.SNAPSHOT}{os.urandom(8).hex()}"
    record = {
        **owned,
        "state": MAKING,
        "layers": [name, *below],
        "base": dict(base),
        "boot": storage.boot_id(),
    }
    storage.make(state, name, RECORD, record)
    try:
        os.mkdir(f"{name}/fs", 0o700, dir_fd=state)
        if uid is not None:
            os.chown(f"{name}/fs", uid, uid, dir_fd=state)
    except BaseException:
        storage.remove_folder(state, name)
        raise
    return name


def finish(state: int, name: str, size: int) -> None:
    """The layer is whole."""
    record = _read(state, name)
    if record is None:
        raise FileNotFoundError(name)
    storage.write(state, f"{name}/{RECORD}", {**record, "state": READY, "size": size})


def sync(state: int, names: Collection[str]) -> None:
    """Have them on the disk. Until then a crash of the machine, but nothing less, takes them away."""
    sc.sync_file_system(state)
    for name in names:
        try:
            os.close(os.open(f"{name}/{_SYNCED}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=state))
        except FileNotFoundError:
            pass  # deleted meanwhile


def find(state: int, name: str) -> dict[str, Any] | None:
    """The record of a snapshot to start from; None when there is none."""
    record = _read(state, name) if _NAME.match(name) else None
    return record if record is not None and record.get("state") == READY and _durable(state, name, record) else None


def _durable(state: int, name: str, record: Mapping[str, Any]) -> bool:
    if record.get("boot") == storage.boot_id():
        return True
    try:
        os.stat(f"{name}/{_SYNCED}", dir_fd=state)
    except FileNotFoundError:
        return False
    return True


def listed(state: int) -> dict[str, dict[str, Any]]:
    """The record of every snapshot that is there for all."""
    found = ((name, find(state, name)) for name in _names(state))
    return {name: record for name, record in found if record is not None and not record.get("temporary")}


def delete(state: int, name: str) -> None:
    """Have it gone for everybody who looks from now on, and remove what nobody stands on."""
    if _NAME.match(name):
        try:
            os.rename(f"{name}/{RECORD}", f"{name}/{_DELETED}", src_dir_fd=state, dst_dir_fd=state)
        except FileNotFoundError:
            return
        collect(state)


def released(state: int, layers: Sequence[str]) -> None:
    """Somebody who stood on ``layers`` is gone."""
    collect(state, layers)


def collect(state: int, names: Sequence[str] | None = None) -> None:
    """Remove deleted snapshots, of these or of all, on which nobody stands."""
    for name in _names(state) if names is None else names:
        # First whether it is deleted, then who needs it: what came to stand on it meanwhile is seen.
        record = storage.read(state, f"{name}/{_DELETED}")
        if record is not None and not _needed(state, name):
            storage.remove_folder(state, name)


def _needed(state: int, layer: str) -> bool:
    """Whether a sandbox or a snapshot stands on a layer. Sandboxes are asked first: what is frozen of one that ends
    meanwhile is on record by then."""
    for name in storage.names(state):
        if name.startswith(storage.SANDBOX) and _stands(storage.read(state, f"{name}/{storage.RECORD}"), layer):
            return True
    return any(_stands(_read(state, name), layer) for name in _names(state))


def _stands(record: Mapping[str, Any] | None, layer: str) -> bool:
    return record is not None and layer in record.get("layers", ())


def remove_abandoned(state: int, labels: Mapping[str, str], alive: Callable[[Mapping[str, Any]], bool | None]) -> int:
    """Remove what nobody will ever finish or use, of dead owners: what is half-made or temporary, or may have been torn
    or damaged when the machine crashed.

    Of those with ``labels``; returns how many there were. Call it when the sandboxes of dead owners are gone.
    """
    count = 0
    for name, record in _records(state):
        useless = _unfinished(record) or not _durable(state, name, record)
        if useless and alive(record) is False and labels.items() <= record.get("labels", {}).items():
            delete(state, name)
            count += 1
    collect(state)
    for name in _names(state) if not labels else ():
        if _read(state, name) is None and storage.read(state, f"{name}/{_DELETED}") is None:  # damaged
            storage.remove_folder(state, name)
            count += 1
    return count


def remove_owned(state: int, owner: str) -> None:
    """Remove what the provider ``owner``, now gone, had not finished or kept to itself."""
    for name, record in _records(state):
        if record.get("owner") == owner and _unfinished(record):
            delete(state, name)


def _unfinished(record: Mapping[str, Any]) -> bool:
    return record.get("state") == MAKING or bool(record.get("temporary"))


def _names(state: int) -> list[str]:
    return [name for name in storage.names(state) if _NAME.match(name)]


def _records(state: int) -> list[tuple[str, dict[str, Any]]]:
    """Of every snapshot that is not deleted, whole or not."""
    return [(name, record) for name in _names(state) if (record := _read(state, name)) is not None]


def _read(state: int, name: str) -> dict[str, Any] | None:
    return storage.read(state, f"{name}/{RECORD}")
