"""Says what ran out where a system call failed for want of something, such as room on a disk, and the remedy."""

from __future__ import annotations

import errno
import os
from typing import NamedTuple

#: There is no room.
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
#: This machine or this process lacks something: whatever was being done, it is not to blame.
SHORT = NO_ROOM | {errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM}


class Shortage(NamedTuple):
    """``what`` ran out, and the ``remedy``."""

    what: str
    remedy: str


def shortage(number: int | None, folder: str | os.PathLike[str], elsewhere: str) -> Shortage | None:
    """What the error ``number`` says is short where ``folder`` is written to; None when it says something else.

    ``elsewhere``: how to have another folder, in words that follow "or".
    """
    where = os.fspath(folder)
    if number == errno.ENOSPC:
        what = f"no inode left (too many files) in {where}" if _no_inode(where) else f"no space left in {where}"
        return Shortage(what, f"free some there, also with rl-harness sandbox prune, or {elsewhere}")
    if number == errno.EDQUOT:
        return Shortage(
            f"the disk quota of this user is used up in {where}",
            f"free some there, also with rl-harness sandbox prune, or {elsewhere}",
        )
    if number == errno.EROFS:
        return Shortage(f"{where} is on a file system that is mounted read-only", elsewhere)
    if number == errno.EMFILE:
        return Shortage("this process has too many files open", "raise its limit (ulimit -n), or lower the concurrency")
    if number == errno.ENFILE:
        return Shortage(
            "this machine has too many files open", "raise the limit (sysctl fs.file-max), or lower the concurrency"
        )
    if number == errno.ENOMEM:
        return Shortage("memory ran out", "lower the concurrency, or free memory")
    return None


def _no_inode(folder: str) -> bool:
    try:
        status = os.statvfs(folder)
    except OSError:
        return False
    return bool(status.f_files) and status.f_favail == 0
