"""Small files written whole or not at all, and what a failed write or read means to the user."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path

from rl_harness.errors import RunError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SAVED = "everything reported finished is saved: free some space and run the same command again to continue"


def write_whole(path: Path, data: bytes) -> None:
    """Replace ``path`` in one step: a reader, or a crash, sees the old content or the new, never a part."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def explain(path: Path, error: OSError | sqlite3.Error) -> RunError:
    """The :class:`RunError` for a failure to read or write below ``path``; raise it ``from`` the original."""
    if isinstance(error, OSError):
        where = error.filename or path
        if error.errno in _FULL:
            return RunError(f"{where}: no space left ({error.strerror})", remedy=_SAVED)
        return RunError(f"{where}: {error.strerror or error}")
    name = getattr(error, "sqlite_errorname", "") or ""
    if name == "SQLITE_FULL":
        return RunError(f"{path}: no space left (the database or its disk is full)", remedy=_SAVED)
    if name.startswith("SQLITE_IOERR"):
        return RunError(
            f"{path}: the database could not be read or written ({error})",
            remedy=f"look at the disk, its free space and quota; {_SAVED}",
        )
    if name in ("SQLITE_CORRUPT", "SQLITE_NOTADB") or name.startswith("SQLITE_CORRUPT_"):
        return RunError(f"{path}: damaged, or not a database ({error})", remedy="start a new run with --fresh")
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
        return RunError(f"{path}: cannot be opened or written ({error})", remedy="check the directory's permissions")
    if name.startswith("SQLITE_BUSY"):
        return RunError(f"{path}: another process keeps the database locked", remedy="end that process and try again")
    return RunError(f"{path}: {error}")
