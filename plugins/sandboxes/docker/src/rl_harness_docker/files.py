"""Reads a text file of a task: a pipe, a device or something far larger than anybody writes is an error at once."""

from __future__ import annotations

from pathlib import Path

from rl_harness.errors import TaskError

_MOST = 16 << 20


def read_text(file: Path) -> str:
    """Raises TaskError naming the file."""
    try:
        if file.exists() and not file.is_file():  # opening a pipe would wait for its writer
            raise ValueError("it is not a regular file")
        if file.stat().st_size > _MOST:
            raise ValueError(f"it is larger than {_MOST >> 20} MiB")
        return file.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise TaskError(f"{file}: cannot be read: {error}") from None
