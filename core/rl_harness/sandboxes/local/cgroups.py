"""Control groups, where this process may make them: memory and cpus of a whole sandbox.

Both layouts are served: one directory a controller (v1), or one for all (v2). Groups are made below this process's
own where that is allowed, so that whatever bounds it bounds them too.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping

PERIOD = 100_000
_REMOVE_TRIES = 100
CONTROLLERS = ("memory", "cpu")


def parents(mount: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> dict[str, str]:
    """For each controller usable here, the directory in which groups can be made. Empty for an ordinary user."""
    try:
        with open(own) as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return {}
    found: dict[str, str] = {}
    for _, names, path in lines:
        if not names:
            found.update(_unified_parent(mount, path))
        for controller in CONTROLLERS:
            directory = f"{mount}/{controller}{path.rstrip('/')}"
            if controller in names.split(",") and _writable(directory):
                found[controller] = directory
    return found


def _unified_parent(mount: str, path: str) -> dict[str, str]:
    """In a v2 hierarchy, the nearest group from ``path`` upwards whose children can have most of the controllers.

    A group with processes of its own, as ours is, cannot hand controllers down, so this is commonly its parent.
    """
    best: list[str] = []
    where = ""
    while True:
        directory = f"{mount}{path.rstrip('/')}"
        if _writable(directory):
            with open(f"{directory}/cgroup.subtree_control") as file:
                handed_down = file.read().split()
            usable = [controller for controller in CONTROLLERS if controller in handed_down]
            if len(usable) > len(best):
                best, where = usable, directory
        if path in ("", "/"):
            return dict.fromkeys(best, where)
        path = os.path.dirname(path)


def _writable(directory: str) -> bool:
    return os.access(f"{directory}/cgroup.procs", os.W_OK) and os.access(directory, os.W_OK)


def paths(name: str, limits: Mapping[str, float]) -> list[str]:
    """The directories that :func:`create` will make."""
    where = parents() if limits else {}
    return sorted({f"{where[_controller(limit)]}/{name}" for limit in limits})


def create(name: str, limits: Mapping[str, float]) -> None:
    """Make the groups for ``limits`` (of memory in bytes, cpus). Raises OSError when a limit cannot be set."""
    where = parents() if limits else {}
    for limit, value in limits.items():
        directory = f"{where[_controller(limit)]}/{name}"
        os.makedirs(directory, exist_ok=True)
        _limit(directory, limit, value)


def _controller(limit: str) -> str:
    return "cpu" if limit == "cpus" else limit


def _limit(directory: str, controller: str, value: float) -> None:
    if controller == "memory":
        if os.path.exists(f"{directory}/memory.max"):
            _write(f"{directory}/memory.max", int(value))
            _write_if_there(f"{directory}/memory.swap.max", 0)
        else:
            _write(f"{directory}/memory.limit_in_bytes", int(value))
            _write_if_there(f"{directory}/memory.memsw.limit_in_bytes", int(value))
    elif os.path.exists(f"{directory}/cpu.max"):
        _write(f"{directory}/cpu.max", f"{int(value * PERIOD)} {PERIOD}")
    else:
        _write(f"{directory}/cpu.cfs_period_us", PERIOD)
        _write(f"{directory}/cpu.cfs_quota_us", int(value * PERIOD))


def join(directories: list[str]) -> None:
    """Move this process into the groups."""
    for directory in directories:
        _write(f"{directory}/cgroup.procs", 0)


def remove(directories: list[str]) -> None:
    """Remove groups; their processes must be dead."""
    for directory in directories:
        for _ in range(_REMOVE_TRIES):
            try:
                os.rmdir(directory)
            except FileNotFoundError:
                break
            except OSError as error:
                if error.errno != errno.EBUSY:
                    break
                time.sleep(0.01)  # the last process is dead but not yet taken off the group
            else:
                break


def _write(path: str, value: int | str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, str(value).encode())
    finally:
        os.close(descriptor)


def _write_if_there(path: str, value: int) -> None:
    try:
        _write(path, value)
    except OSError:
        pass  # no swap accounting in this kernel
