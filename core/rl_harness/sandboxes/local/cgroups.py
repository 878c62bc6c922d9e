"""Control groups, where this process may make them: memory, processes and cpus of a whole sandbox.

Both layouts are served: one directory a controller (v1), or one for all (v2). Sandboxes are placed below this
process's own group, so whatever bounds it bounds them too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

PERIOD = 100_000
_MOUNT = "/sys/fs/cgroup"
CONTROLLERS = ("memory", "pids", "cpu")


def parents() -> dict[str, str]:
    """For each controller usable here, the directory in which groups can be made. Empty for an ordinary user."""
    try:
        with open("/proc/self/cgroup") as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return {}
    found = {}
    for _, names, path in lines:
        for controller in CONTROLLERS:
            if controller in names.split(","):
                directory = f"{_MOUNT}/{controller}{path.rstrip('/')}"
            elif not names and controller in _delegated(directory := f"{_MOUNT}{path.rstrip('/')}"):
                pass
            else:
                continue
            if os.access(f"{directory}/cgroup.procs", os.W_OK) and os.access(directory, os.W_OK):
                found[controller] = directory
    return found


def _delegated(directory: str) -> list[str]:
    """Controllers that children of a v2 group have."""
    try:
        with open(f"{directory}/cgroup.subtree_control") as file:
            return file.read().split()
    except OSError:
        return []


def create(name: str, limits: Mapping[str, float]) -> list[str]:
    """Make the groups for ``limits`` (of memory in bytes, pids, cpus) and return their directories.

    Raises OSError, having removed what it made, when a limit cannot be set.
    """
    made: list[str] = []
    where = parents()
    try:
        for controller, value in limits.items():
            directory = f"{where['cpu' if controller == 'cpus' else controller]}/{name}"
            if directory not in made:
                os.mkdir(directory)
                made.append(directory)
            _limit(directory, controller, value)
    except (OSError, KeyError):
        remove(made)
        raise
    return made


def _limit(directory: str, controller: str, value: float) -> None:
    if controller == "pids":
        _write(f"{directory}/pids.max", int(value))
    elif controller == "memory":
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
        try:
            os.rmdir(directory)
        except OSError:
            pass


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
