"""Snapshots on disk: one folder each, with a record and what its sandbox had written; who still needs which.

A snapshot is a chain of layers, its own and those of the snapshots its sandbox had started from. Frozen layers never
change, so any number of sandboxes and later snapshots stand on them. A deleted snapshot is only marked as long as
somebody does. Used by the host, by the reaper of another process, and by the helper after its host died.

No lock is needed: whoever starts from a snapshot writes a record first and then looks whether the snapshot is still
there; whoever deletes marks it first and then reads the records.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rl_harness.sandboxes.local import storage
from rl_harness.sandboxes.local import syscalls as sc

RECORD = "snapshot.json"
#: Longer chains are merged into one layer when the next snapshot is made.
MAX_LAYERS = 8
MAKING, READY, DELETED = "making", "ready", "deleted"
_SYNCED = "synced"

_NAME = re.compile(rf"{storage.SNAPSHOT}[0-9a-f]{{16}}\Z")


def begin(
    state: int,
    owner: str,
    *,
    key: str,
    labels: Mapping[str, str],
    temporary: bool,
    below: Sequence[str],
    base: Mapping[str, Any],
    uid: int | None,
) -> str:
    """Make the folder of a snapshot that this process starts to fill for the provider ``owner``; its id.

    ``below``: the layers under its own, newest first. ``base``: what they all lie on. ``temporary``: it is nobody's
    but this process's. ``uid``: who fills it, None for this user.
    """
    name = f"{storage.SNAPSHOT}{os.urandom(8).hex()}"
    record = {
        **storage.new_record(owner, labels),
        "state": MAKING,
        "key": key,
        "temporary": temporary,
        "layers": [name, *below],
        "base": dict(base),
        "boot": storage.boot_id(),
    }
    os.mkdir(name, 0o711, dir_fd=state)
    try:
        storage.write(state, f"{name}/{RECORD}", record)
        os.mkdir(f"{name}/fs", 0o700, dir_fd=state)
        if uid is not None:
            os.chown(f"{name}/fs", uid, uid, dir_fd=state)
    except BaseException:
        storage.remove_tree(state, name)
        raise
    return name


def finish(state: int, name: str, size: int) -> None:
    """The layer is whole."""
    _update(state, name, {"state": READY, "size": size})


def sync(state: int, name: str) -> None:
    """Have it on the disk. Until then a crash of the machine, but nothing less, takes it away."""
    sc.sync_file_system(state)
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
    records = ((name, find(state, name)) for name in os.listdir(state))
    return {name: record for name, record in records if record is not None and not record.get("temporary")}


def everything(state: int) -> dict[str, dict[str, Any]]:
    """The record of every snapshot, whole or not."""
    names = [name for name in os.listdir(state) if _NAME.match(name)]
    return {name: record for name in names if (record := _read(state, name)) is not None}


def delete(state: int, name: str) -> None:
    """Have it gone for everybody who looks from now on, and remove what nobody stands on."""
    if _NAME.match(name) and _read(state, name) is not None:
        try:
            _update(state, name, {"state": DELETED})
        except FileNotFoundError:
            return  # another did the same
        collect(state)


def released(state: int, layers: Sequence[str]) -> None:
    """Somebody who stood on ``layers`` is gone."""
    if any((record := _read(state, name)) is not None and record.get("state") == DELETED for name in layers):
        collect(state)


def collect(state: int) -> None:
    """Remove deleted snapshots on which nobody stands."""
    # In this order, so that what comes to stand on a layer meanwhile is seen: see the module's own words.
    gone = [name for name, record in everything(state).items() if record.get("state") == DELETED]
    if not gone:
        return
    needed = {layer for record in storage.read_records(state).values() for layer in record.get("layers", ())}
    for record in everything(state).values():
        if record.get("state") != DELETED:
            needed.update(record.get("layers", ()))
    for name in gone:
        if name not in needed:
            remove(state, name)


def remove_abandoned(state: int, labels: Mapping[str, str]) -> int:
    """Remove what nobody will ever finish or use: half-made and temporary snapshots whose owner is dead, those that a
    crash of the machine may have torn, folders without a record, what a removal left that was cut off.

    Of those with ``labels``; returns how many there were. Call it when the sandboxes of dead owners are gone.
    """
    count = 0
    for name, record in everything(state).items():
        torn = record.get("state") == READY and not _durable(state, name, record)
        abandoned = torn or (_unfinished(record) and not storage.alive(record))
        if abandoned and labels.items() <= record.get("labels", {}).items():
            delete(state, name)
            count += 1
    for name in [name for name in os.listdir(state) if _NAME.match(name)]:
        if not labels and storage.forgotten(state, name, RECORD):
            remove(state, name)
            count += 1
    collect(state)
    return count


def remove_owned(state: int, owner: str) -> None:
    """Remove what the provider ``owner``, now gone, had not finished or kept to itself."""
    for name, record in everything(state).items():
        if record.get("owner") == owner and _unfinished(record):
            delete(state, name)


def _unfinished(record: Mapping[str, Any]) -> bool:
    return record.get("state") == MAKING or bool(record.get("temporary") and record.get("state") == READY)


def remove(state: int, name: str) -> None:
    """Remove the files of a snapshot, its record last. Tolerates another doing the same."""
    storage.remove_tree(state, f"{name}/fs")
    storage.remove_tree(state, name)


def _update(state: int, name: str, changes: Mapping[str, Any]) -> None:
    record = _read(state, name)
    if record is None:
        raise FileNotFoundError(name)
    storage.write(state, f"{name}/{RECORD}", {**record, **changes})


def _read(state: int, name: str) -> dict[str, Any] | None:
    return storage.read(state, f"{name}/{RECORD}")
