"""What a check is, and what it is given."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from rl_harness.contracts.sandbox import (
    EnvironmentSpec,
    ExecResult,
    NetworkPolicy,
    Sandbox,
    SandboxCapabilities,
    SandboxProvider,
    SandboxSpec,
)

WORKDIR = "/app"


class Context:
    """What a check works with: the provider, a folder on the host, and sandboxes that are closed afterwards."""

    def __init__(self, provider: SandboxProvider, folder: Path, stack: AsyncExitStack) -> None:
        self.provider = provider
        self.folder = folder
        self.labels = {"run": f"conformance-{secrets.token_hex(4)}"}
        self._stack = stack

    def spec(self, *, environment: EnvironmentSpec | None = None, **fields: Any) -> SandboxSpec:
        """A spec that this provider accepts: the strictest network it has, this check's labels."""
        policies = self.provider.capabilities.network
        network = next(policy for policy in NetworkPolicy if policy in policies)
        return SandboxSpec(
            environment=environment or EnvironmentSpec(workdir=WORKDIR),
            **{"labels": self.labels, "network": network, **fields},
        )

    async def sandbox(self, **fields: Any) -> Sandbox:
        sandbox = await self.provider.create(self.spec(**fields))
        self._stack.push_async_callback(sandbox.close)
        return sandbox


Body = Callable[[Context], Awaitable[None]]
Reason = Callable[[SandboxCapabilities], str | None]


class Check:
    """One rule of the contract, by the name of the function that tests it."""

    def __init__(self, body: Body, reason: Reason) -> None:
        self.name = body.__name__
        self.inapplicable = reason
        self._body = body

    def __str__(self) -> str:
        return self.name

    async def run(self, provider: SandboxProvider, folder: Path) -> None:
        """Raises AssertionError when the provider breaks the rule. ``folder`` is an empty folder of the host."""
        async with AsyncExitStack() as stack:
            await self._body(Context(provider, folder, stack))


class Checks(list[Check]):
    """Collects the checks of one module, in order."""

    def check(self, body: Body) -> Body:
        """A check that every provider must pass."""
        self.append(Check(body, lambda _: None))
        return body

    def check_if(self, reason: Reason) -> Callable[[Body], Body]:
        """A check for providers whose capabilities give no ``reason`` against it."""

        def register(body: Body) -> Body:
            self.append(Check(body, reason))
            return body

        return register


def without(name: str) -> Reason:
    """The reason that a provider lacks the capability flag ``name``."""
    return lambda capabilities: None if getattr(capabilities, name) else f"no capability {name}"


def without_limit(name: str) -> Reason:
    return lambda capabilities: None if name in capabilities.limits else f"does not limit {name}"


def equal(actual: object, wanted: object, what: str = "value") -> None:
    assert actual == wanted, f"{what} is {actual!r}, wanted {wanted!r}"


def succeeded(result: ExecResult) -> bytes:
    """The stdout of a command that must have succeeded."""
    assert result.ok, f"the command failed: {result!r}"
    return result.stdout


async def until(condition: Callable[[], Awaitable[bool]], what: str, seconds: float = 20.0) -> None:
    """Wait for something that must come true soon; the bound only ends a failing check."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not await condition():
        assert loop.time() < deadline, f"never came true: {what}"
        await asyncio.sleep(0.01)


async def counts_up(sandbox: Sandbox, name: str) -> bool:
    """Whether a process that appends to ``name`` in the working directory is still at it."""
    before = await _size(sandbox, name)
    for _ in range(20):
        await asyncio.sleep(0.02)
        if await _size(sandbox, name) != before:
            return True
    return False


async def _size(sandbox: Sandbox, name: str) -> int:
    try:
        return len(await sandbox.read_file(f"{WORKDIR}/{name}"))
    except FileNotFoundError:
        return -1


def counter(name: str) -> str:
    """A shell loop that shows it is alive by appending to a file."""
    return f"while :; do echo >> {name}; sleep 0.01; done"
