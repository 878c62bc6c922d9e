"""LangChain agents and LangGraph graphs as a harness; its tools act in the sandbox of the attempt.

Runs under the agent's interpreter too, which need not have rl-harness: names are resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_harness_langchain.tools import read_file, sandbox_tools, shell, write_file

__all__ = ["read_file", "sandbox_tools", "shell", "write_file"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.tools"), name)
