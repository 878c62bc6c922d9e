"""How the limits of a spec are enforced on this machine.

``pids``: by RLIMIT_NPROC, which counts in the sandbox's own user namespace (Linux 5.14).
``memory``: of the whole sandbox by a control group; otherwise of each process, by RLIMIT_AS (address space, so
programs that reserve much of it, such as Java or Node.js, need the limit raised). ``cpus``: by a control group, or
refused. ``disk``: changed files then live in a tmpfs of that size, at most half of this machine's memory.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import NamedTuple

from rl_harness.contracts.sandbox import Limits
from rl_harness.errors import Unsupported
from rl_harness.sandboxes.local import cgroups

#: Memory of ours, init and workers, beside the agent's.
MEMORY_HEADROOM = 16 << 20


class Plan(NamedTuple):
    """What the helper is asked to enforce: ``groups`` by control groups, the rest by rlimits and tmpfs."""

    processes: int
    address_space: int | None
    disk: int | None
    groups: dict[str, float]


def enforceable() -> frozenset[str]:
    """The limits that can be enforced here."""
    limits = {"pids", "memory", "disk"}
    return frozenset(limits | {"cpus"} if "cpu" in cgroups.parents() else limits)


def plan(limits: Limits, *, processes: int, in_memory: bool) -> Plan:
    """How to enforce ``limits``; ``processes`` is the ceiling where they set none. Raises Unsupported."""
    available: Collection[str] = cgroups.parents()
    if limits.cpus is not None and "cpu" not in available:
        raise Unsupported(
            "the local sandbox cannot limit cpus here: it may not make control groups",
            remedy="run as root or in a delegated control group, or remove the limit on cpus from the task",
        )
    processes = limits.pids if limits.pids is not None else processes
    disk = min(limits.disk, _half_of_memory()) if limits.disk is not None else None
    if disk is None and in_memory:
        disk = _half_of_memory()
    groups: dict[str, float] = {}
    if limits.memory is not None and "memory" in available:
        # Files of a tmpfs count as memory of the group and cannot be reclaimed: without room of their own, an agent
        # could fill it and have init itself killed for memory.
        groups["memory"] = limits.memory + MEMORY_HEADROOM + (disk or 0)
    if limits.cpus is not None:
        groups["cpus"] = limits.cpus
    address_space = limits.memory if "memory" not in groups else None
    return Plan(processes=processes, address_space=address_space, disk=disk, groups=groups)


def _half_of_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
