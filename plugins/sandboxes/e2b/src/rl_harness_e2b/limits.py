"""Limits as the size of a machine, which at E2B is its template's."""

from __future__ import annotations

import math

from rl_harness.contracts.sandbox import Limits
from rl_harness.errors import Unsupported

_MIB = 1 << 20
_LEAST_MEMORY = 128


def resources(limits: Limits) -> tuple[int | None, int | None]:
    """Processors and MiB of memory of a machine with these limits. Raises Unsupported."""
    for limit in ("pids", "disk"):
        if getattr(limits, limit) is not None:
            raise Unsupported(f"E2B does not limit {limit}")
    cpus, memory = limits.cpus, limits.memory
    if cpus is not None and (cpus < 1 or cpus != int(cpus)):
        raise Unsupported(
            f"E2B gives whole processors, not {cpus:g}", remedy="write a whole number of cpus in the task"
        )
    # E2B makes machines of an even number of MiB.
    size = max(_LEAST_MEMORY, 2 * math.ceil(memory / _MIB / 2)) if memory is not None else None
    return int(cpus) if cpus is not None else None, size
