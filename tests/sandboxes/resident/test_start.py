"""A helper that cannot be started: whoever waits for it hears why, whatever the provider raises."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import pytest
from rl_harness.contracts.sandbox import Process, Sandbox
from rl_harness.errors import SandboxError
from rl_harness.sandboxes.resident import HelperUnavailable, Resident, agents_view

MISTAKES = [OSError(errno.EMFILE, "Too many open files"), ValueError("mine"), KeyError("pid"), RecursionError("deep")]


def broken(error: Exception, *methods: str) -> Any:
    class Broken(Sandbox):
        id = "broken"

        async def alive(self) -> bool:
            return True

    async def fail(*_: object, **__: object) -> Process:
        raise error

    for method in methods:
        setattr(Broken, method, fail)
    Broken.__abstractmethods__ = frozenset()
    return Broken()


@pytest.mark.parametrize("error", MISTAKES, ids=repr)
async def test_whoever_waits_hears_why(error: Exception) -> None:
    async with asyncio.timeout(60):
        with pytest.raises(HelperUnavailable, match=type(error).__name__):
            await Resident.start(broken(error, "spawn"))
        with pytest.raises(SandboxError):
            async with agents_view(broken(error, "spawn", "alive"), commands=True, target=lambda: None):  # type: ignore[arg-type, return-value]
                pass
