"""How many threads a worker computes with, and how they wait: set before torch is imported, checked once after.

With OpenMP's defaults two threads sometimes land on one core, and the waiting one spins there for milliseconds: a
decode step then takes forty times as long. Threads that always sleep are slower than one thread, since a step has
hundreds of tiny parallel regions. So each thread is bound to a core and spins some 50 µs before it sleeps, and a
worker that measures no gain from several threads uses one.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

_log = logging.getLogger(__name__)

_WAITING = {"OMP_PROC_BIND": "spread", "OMP_PLACES": "cores", "GOMP_SPINCOUNT": "20000"}


def physical_cores() -> int:
    """Cores this process may use, hyper-threads not counted, at most the control group's cpu quota."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    siblings = set()
    for cpu in os.sched_getaffinity(0):
        try:
            siblings.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:
            siblings.add(str(cpu))
    return max(1, min(len(siblings), _quota() or len(siblings)))


def _quota() -> int | None:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return None


def environment(threads: int | None) -> dict[str, str]:
    """Environment for a worker that computes with ``threads`` threads (None: the user's setting, or all cores).

    A user who set one of the binding variables keeps his own settings of all of them.
    """
    given = os.environ.get("OMP_NUM_THREADS", "")
    number = threads or (int(given) if given.isdigit() and int(given) else physical_cores())
    wanted = {"OMP_NUM_THREADS": str(number), "MKL_NUM_THREADS": str(number), "TOKENIZERS_PARALLELISM": "false"}
    if number > 1 and not any(name in os.environ for name in _WAITING):
        wanted |= _WAITING
    return wanted


def settle(*, check: bool = True) -> int:
    """Set torch's threads to ``OMP_NUM_THREADS``, or with ``check`` to one when that many are not faster; returns the
    number.

    The measured work resembles one decode step: small matrix products, so that waking threads counts.
    """
    import torch

    wanted = int(os.environ.get("OMP_NUM_THREADS", "0")) or torch.get_num_threads()
    torch.set_num_threads(wanted)
    if wanted == 1 or not check:
        return wanted
    many = _measure()
    torch.set_num_threads(1)
    one = _measure()
    if one <= many:
        _log.warning("%d threads are not faster than one here (%.1f ms, %.1f ms): using one", wanted, many, one)
        return 1
    torch.set_num_threads(wanted)
    return wanted


def _measure() -> float:
    """Milliseconds of the fastest of a few rounds."""
    import torch

    x, w = torch.ones(16, 576), torch.ones(1536, 576)
    best = float("inf")
    with torch.inference_mode():
        torch.nn.functional.linear(x, w)
        for _ in range(8):
            start = time.perf_counter()
            for _ in range(30):
                torch.nn.functional.linear(x, w)
            best = min(best, time.perf_counter() - start)
    return best * 1e3
