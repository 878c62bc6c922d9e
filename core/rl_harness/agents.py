"""``@rl_harness.agent`` marks the functions of a package that are agents, so that they are found by name.

The mark is an attribute: the process in which an agent runs looks for it without importing rl-harness.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

MARK = "__rl_harness_agent__"

_Agent = TypeVar("_Agent", bound=Callable[..., Any])


@overload
def agent(function: _Agent, /) -> _Agent: ...
@overload
def agent(function: None = None, /, *, name: str) -> Callable[[_Agent], _Agent]: ...
def agent(function: _Agent | None = None, /, *, name: str | None = None) -> _Agent | Callable[[_Agent], _Agent]:
    """Mark a function as an agent, under its own name or ``name``; it stays the function that it was.

    ``--harness python:package`` then finds it wherever in the package it is defined, and ``python:package:name`` where
    there are several. ``--harness langchain:package`` does the same for a function that makes a graph.
    """

    def mark(marked: _Agent) -> _Agent:
        chosen = marked.__name__ if name is None else name
        if not chosen.isidentifier():
            raise ValueError(f"{chosen!r} cannot be the name of an agent: letters, digits and underscores only")
        setattr(marked, MARK, chosen)
        return marked

    return mark if function is None else mark(function)
