"""Folders of this user's at places where others can write too, such as the temporary directory.

Their names can be foreseen, so anybody may have put something there first: a link, which would have us write into what
it leads to, or a folder whose owner can change everything in it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

_WRITE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def private_folder(path: Path) -> Path:
    """The folder itself, made if it is missing; its parent must be there. Raises OSError unless it is a directory, no
    link to one, that belongs to this user; nobody else may write there when this returns."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "is no directory of its own", str(path))
    if status.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "belongs to another user", str(path))
    if status.st_mode & _WRITE_BY_OTHERS:
        path.chmod(stat.S_IMODE(status.st_mode) & ~_WRITE_BY_OTHERS)
    return path
