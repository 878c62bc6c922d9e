"""The event loop of a run."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

#: Objects made beyond those freed before the collector looks at the new ones, then how often it looks further.
#: A gateway's requests leave few cycles behind; the interpreter's own 700 has it look for them in each.
_COLLECT = (10_000, 20, 20)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` to its end as :func:`asyncio.run` does, on uvloop where this system has it."""
    gc.freeze()  # what was imported so far stays
    gc.set_threshold(*_COLLECT)
    with asyncio.Runner(loop_factory=_new_loop()) as runner:
        return runner.run(main)


def _new_loop() -> Any:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
