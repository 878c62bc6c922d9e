"""Digests of directories: names, modes, symlink targets, contents; never times or the order of a listing."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from rl_harness.errors import TaskError

#: Left behind by tools that only look at a directory; never part of a task.
IGNORED = frozenset({"__pycache__", ".DS_Store"})


def digest_directory(directory: Path, *, modes: bool = False) -> str:
    """SHA-256 in hex. Equal exactly when the directories would give an agent and a verifier the same task.

    With ``modes`` every permission bit counts, of directories too, and every file, as where the tree itself is copied
    into a sandbox; without, only whether a file is executable, and nothing that tools leave behind.
    """
    total = hashlib.sha256()
    for name, entry in sorted(_walk(str(directory), "", frozenset() if modes else IGNORED)):
        info = os.lstat(entry)
        permissions = f" {stat.S_IMODE(info.st_mode):o}" if modes else ""
        if stat.S_ISDIR(info.st_mode):
            kind, content = "directory" + permissions, b""
        elif stat.S_ISLNK(info.st_mode):
            kind, content = "link", os.fsencode(os.readlink(entry))  # noqa: PTH115 - bytes of the link, unresolved
        elif stat.S_ISREG(info.st_mode):
            kind = permissions.strip() or ("exec" if info.st_mode & 0o111 else "file")
            with open(entry, "rb") as file:  # noqa: PTH123 - a plain string path, in a hot loop
                content = file.read()
        else:
            raise TaskError(f"{entry}: a task holds files, directories and links only")
        total.update(f"{kind}\0{name}\0{len(content)}\0".encode("utf-8", "surrogateescape"))
        total.update(content)
    return total.hexdigest()


def _walk(root: str, prefix: str, ignored: frozenset[str]) -> Iterator[tuple[str, str]]:
    with os.scandir(root) as entries:
        for entry in entries:
            if entry.name in ignored:
                continue
            name = prefix + entry.name
            if entry.is_dir(follow_symlinks=False):
                yield name, entry.path
                yield from _walk(entry.path, name + "/", ignored)
            else:
                yield name, entry.path
