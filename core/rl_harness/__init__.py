"""rl-harness: measure an agent on your own repeated work, then train the model behind it.

Importing this package is cheap; names are resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rl_harness.agents import agent
    from rl_harness.errors import RlHarnessError
    from rl_harness.hookspecs import Extension, hookimpl

__all__ = ["Extension", "RlHarnessError", "__version__", "agent", "hookimpl"]

_HOMES = {
    "Extension": "hookspecs",
    "RlHarnessError": "errors",
    "agent": "agents",
    "hookimpl": "hookspecs",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'rl_harness' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"rl_harness.{home}"), name)
