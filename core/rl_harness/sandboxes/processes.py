"""Processes of this machine, portably: who is alive, who descends from whom, how one ended.

Linux answers from ``/proc``; elsewhere ``ps`` is asked.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

_PASSES = 50


def exit_code(returncode: int) -> int:
    """The contract's exit code for a ``subprocess`` return code: 128+N for signal N."""
    return 128 - returncode if returncode < 0 else returncode


def process_start(pid: int) -> str | None:
    """What tells this process from a later one of the same pid; None when there is none."""
    if _has_proc():
        try:
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            return None
        if fields[0] in (b"Z", b"X"):
            return None
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}:{int(fields[19])}"
    found = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def kill_tree(root: int) -> None:
    """Kill ``root``, the session it leads, and every descendant that can be found, until none is left."""
    for _ in range(_PASSES):
        victims = _descendants(root)
        for pid in victims:
            _kill(pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(root, signal.SIGKILL)
        if not victims:
            break
    _kill(root)


def kill_marked(variable: str, value: str) -> None:
    """Kill every process of this user that was started with ``variable=value`` in its environment (with /proc)."""
    needle = f"{variable}={value}".encode()
    for _ in range(_PASSES):
        victims = [pid for pid in _pids() if needle in _environment(pid)]
        for pid in victims:
            _kill(pid)
        if not victims:
            return


def _has_proc() -> bool:
    return Path("/proc/self/stat").exists()


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")] if _has_proc() else []


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _descendants(root: int) -> list[int]:
    """Living descendants of ``root``; itself not included."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    pending = [root]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found


def _parents() -> list[tuple[int, int]]:
    if _has_proc():
        found = []
        for pid in _pids():
            with contextlib.suppress(OSError, IndexError):
                state, parent = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:2]
                if state not in (b"Z", b"X"):
                    found.append((pid, int(parent)))
        return found
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=False)
    rows = (line.split() for line in listing.stdout.splitlines())
    return [(int(row[0]), int(row[1])) for row in rows if len(row) > 2 and not row[2].startswith("Z")]


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
