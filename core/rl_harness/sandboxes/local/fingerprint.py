"""Tells one state of the root file system of local sandboxes from another, without reading all of it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from rl_harness.sandboxes.local.mounts import ETC_FROM_HOST, SYSTEM_DIRECTORIES

#: Installing, upgrading and removing show in the directories down to here: new names, and files put in place of others.
_DEPTH = 4
_PACKAGES = (
    "var/lib/dpkg/status",
    "lib/apk/db/installed",
    "var/lib/rpm",
    "usr/lib/sysimage/rpm",
    "var/lib/pacman/local",
)


def fingerprint(root: Path | None) -> str:
    """A digest of a given root file system, by name, size, time and mode of every entry; without one, of this
    machine's system directories, by their upper directories, and of its package data bases."""
    digest = hashlib.sha256()
    for line in _of_given(root) if root is not None else _of_machine():
        digest.update(f"{line}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _of_given(root: Path) -> Iterator[str]:
    yield str(root)
    yield from _below(str(root), depth=None)


def _of_machine() -> Iterator[str]:
    for name in SYSTEM_DIRECTORIES:
        path = f"/{name}"
        if os.path.islink(path):
            yield f"{path} -> {os.readlink(path)}"
        elif os.path.isdir(path):
            yield from _below(path, depth=_DEPTH)
    for name in ETC_FROM_HOST:
        yield from _entry(f"/etc/{name}")
        if os.path.isdir(f"/etc/{name}"):
            yield from _below(f"/etc/{name}", depth=None)
    for name in _PACKAGES:
        yield from _entry(f"/{name}")


def _below(top: str, *, depth: int | None) -> Iterator[str]:
    """The directories below ``top`` down to ``depth``; with no such bound, every entry."""
    pending = [(top, 1)]
    while pending:
        path, level = pending.pop()
        yield from _entry(path)
        try:
            with os.scandir(path) as entries:
                inside = sorted(entries, key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in inside:
            if not entry.is_dir(follow_symlinks=False):
                if depth is None:
                    yield from _entry(entry.path)
            elif entry.name != "__pycache__" and (depth is None or level < depth):
                pending.append((entry.path, level + 1))


def _entry(path: str) -> Iterator[str]:
    try:
        status = os.lstat(path)
    except OSError:
        return
    yield f"{path} {status.st_mode:o} {status.st_size} {status.st_mtime_ns}"
