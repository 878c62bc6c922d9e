"""The process that made a sandbox, as one label, and whether it still lives."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import uuid
from pathlib import Path

from rl_harness.sandboxes.processes import process_start

_FORM = re.compile(r"([0-9a-f]{16})-(\d+)-([0-9a-f]{16})")


def owner_label() -> str:
    """This process in letters, digits and dashes: which machine, which process, and which of that number."""
    return f"{_machine()}-{os.getpid()}-{_start(os.getpid())}"


def owner_alive(label: str) -> bool | None:
    """Whether the process that :func:`owner_label` named is alive; None if it cannot be told from here.

    That is so on another machine, in another container, and for a label that is not one.
    """
    found = _FORM.fullmatch(label)
    if found is None or found[1] != _machine():
        return None
    return _start(int(found[2])) == found[3]


def _start(pid: int) -> str:
    start = process_start(pid)
    return _digest(start) if start is not None else ""


@functools.cache
def _machine() -> str:
    """Where process numbers mean the same: one machine and, on Linux, one namespace of processes. A restart of the
    machine is told by the start of the process."""
    try:
        machine = Path("/etc/machine-id").read_text("utf-8").strip()
    except OSError:
        machine = ""
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = ""
    return _digest(f"{machine or uuid.getnode()} {platform.node()} {namespace}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
