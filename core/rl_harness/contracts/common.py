"""What every kind of plugin has in common: an ``api`` number, options, preflight."""

from __future__ import annotations

import abc
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

#: The contract version this core accepts, for every kind. It goes up when a contract changes incompatibly.
API = 1


class Options(BaseModel):
    """Base of every plugin's options model. Unknown keys are errors; field descriptions are the user's help."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Plugin(abc.ABC):
    """Base of the contracts of all kinds.

    A subclass states ``api`` (the contract version it was written for), ``Options`` (its pydantic model, shown
    by ``rl-harness plugins show``) and is constructed with one instance of that model. Constructing is cheap
    and touches nothing outside the process. ``argument`` is the option that ``NAME:VALUE`` sets on the command
    line, as in ``--harness python:module:function``; None when the class takes none.
    """

    api: ClassVar[int]
    Options: ClassVar[type[Options]] = Options
    argument: ClassVar[str | None] = None

    def __init__(self, options: BaseModel) -> None:
        """``options`` is an instance of this class's ``Options``; subclasses narrow the annotation."""

    async def preflight(self) -> None:
        """Try the real thing, cheaply. Raises :class:`~rl_harness.errors.Unavailable` with the remedy."""
