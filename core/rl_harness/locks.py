"""A lock that lives exactly as long as the process that holds it.

It is ``flock`` on a file, so the kernel drops it at any death, kill -9 included, and a process id that another
program got meanwhile is never mistaken for a live run. Forked children give up their share of it at once: they
must not keep a run alive that has died.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
import weakref
from pathlib import Path

_held: weakref.WeakSet[Lock] = weakref.WeakSet()


def _drop_in_child() -> None:
    for lock in list(_held):
        lock.abandon()


os.register_at_fork(after_in_child=_drop_in_child)


class Lock:
    """An exclusive lock on ``path``, taken by :meth:`acquire` and given up by :meth:`release` or death."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None

    def acquire(self, *, patience: float) -> bool:
        """Try for ``patience`` seconds. Momentary holders (somebody listing runs) are waited out."""
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    os.close(fd)
                    return False
                time.sleep(0.02)
        self._fd = fd
        _held.add(self)
        return True

    def sign(self) -> None:
        """Write who holds it, for error messages only."""
        assert self._fd is not None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)

    def abandon(self) -> None:
        """Close without unlocking: what a forked child does with its copy."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def release(self) -> None:
        if self._fd is not None:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            self.abandon()


def is_held(path: Path) -> bool:
    """Whether some process holds the lock at ``path`` now."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def holder(path: Path) -> str:
    """``pid N`` (with the host's name if it is another machine), or ``another process`` if it did not say."""
    try:
        said = json.loads(path.read_bytes())
        pid, host = int(said["pid"]), str(said["host"])
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
    return f"pid {pid}" if host == socket.gethostname() else f"pid {pid} on {host}"
