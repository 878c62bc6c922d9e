"""Reads a text file that a user named or wrote: a pipe, a device or a file without end is an error at once."""

from __future__ import annotations

import os
import stat
from pathlib import Path

#: Far beyond what anybody writes by hand.
MOST = 16 * 1024**2


def read_text(path: Path) -> str:
    """The UTF-8 text of a regular file of at most 16 MiB. Raises ``OSError`` or ``ValueError``, saying why."""
    # Without O_NONBLOCK, opening a pipe waits for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)  # which opening a directory as a file would do without saying what it was
        raise ValueError("it is a directory" if stat.S_ISDIR(kind) else "it is not a regular file")
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(MOST + 1)
    if len(data) > MOST:
        raise ValueError(f"it is larger than {MOST // 1024**2} MiB")
    return data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
