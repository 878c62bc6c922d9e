"""The run directory: database, configuration, lock, checkpoints, resume.

Names are resolved on first use, so that reading the configuration model does not import numpy or SQLite.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_harness.runs.checkpoints import Checkpoints
    from rl_harness.runs.directory import Run, open_run
    from rl_harness.runs.info import RunInfo, find_runs, read_info
    from rl_harness.runs.store import RunStore, StoredEvent, TrainedSample

__all__ = [
    "Checkpoints",
    "Run",
    "RunInfo",
    "RunStore",
    "StoredEvent",
    "TrainedSample",
    "find_runs",
    "open_run",
    "read_info",
]

_HOMES = {
    "Checkpoints": "checkpoints",
    "Run": "directory",
    "open_run": "directory",
    "RunInfo": "info",
    "find_runs": "info",
    "read_info": "info",
    "RunStore": "store",
    "StoredEvent": "store",
    "TrainedSample": "store",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'rl_harness.runs' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"rl_harness.runs.{home}"), name)
