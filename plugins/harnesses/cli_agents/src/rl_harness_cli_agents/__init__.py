"""Command-line agents as harnesses. Public, for packages that add agents of their own: what ``__all__`` names."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_harness_cli_agents.agent import CliAgent, CliAgentOptions, Seat
    from rl_harness_cli_agents.packages import Npm, Package, Pip, Unpackaged
    from rl_harness_cli_agents.pi_models import PI_KEY_VARIABLE, pi_provider

__all__ = [
    "PI_KEY_VARIABLE",
    "CliAgent",
    "CliAgentOptions",
    "Npm",
    "Package",
    "Pip",
    "Seat",
    "Unpackaged",
    "pi_provider",
]

_HOMES = {
    **dict.fromkeys(("CliAgent", "CliAgentOptions", "Seat"), "agent"),
    **dict.fromkeys(("Npm", "Package", "Pip", "Unpackaged"), "packages"),
    **dict.fromkeys(("PI_KEY_VARIABLE", "pi_provider"), "pi_models"),
}


def __getattr__(name: str) -> Any:
    """Imported at the first use: this package is imported wherever plugins are looked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
