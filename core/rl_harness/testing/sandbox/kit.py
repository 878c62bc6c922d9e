"""What a check is, and what it is given."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rl_harness.contracts.sandbox import (
    EnvironmentSpec,
    ExecResult,
    NetworkPolicy,
    Sandbox,
    SandboxCapabilities,
    SandboxProvider,
    SandboxSpec,
    SnapshotLevel,
)

WORKDIR = "/app"
#: A bound for what must come true: it only ends a check that fails.
SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class Rig:
    """What the author of a provider gives the kit beside the provider. Each part allows further checks.

    ``options``: what the provider was made with. The kit then makes another one, here and in a process that it kills.
    ``base`` is an image with a shell, for a Dockerfile to build on.
    ``crash`` ends the machine of a sandbox as a power cut would, behind the provider's back.
    ``reachable`` and ``unlisted``: TCP servers, (host, port), that accept a connection from a sandbox with a full
    network, at two different addresses. ``allow``: the entry of an allow-list that admits ``reachable`` and not
    ``unlisted``; None for its host. ``disk`` gives the machines made next disks of so many bytes (None: as usual).
    """

    options: BaseModel | None = None
    base: str | None = None
    crash: Callable[[Sandbox], Awaitable[None]] | None = None
    reachable: tuple[str, int] | None = None
    unlisted: tuple[str, int] | None = None
    allow: str | None = None
    disk: Callable[[int | None], Awaitable[None]] | None = None


NO_RIG = Rig()


class Context:
    """What a check works with: the provider, a folder on the host, and sandboxes that are closed afterwards."""

    def __init__(self, provider: SandboxProvider, folder: Path, rig: Rig, stack: AsyncExitStack) -> None:
        self.provider = provider
        self.folder = folder
        self.rig = rig
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
        """A new sandbox, closed when the check has ended."""
        return self.keep(await self.provider.create(self.spec(**fields)))

    async def disposable(self, **fields: Any) -> Sandbox:
        """A new sandbox whose system may be damaged: it has shown that its root is not this machine's. A provider that
        claims isolation and has none would else take the machine's own programs with it."""
        sandbox = await self.sandbox(**fields)
        with tempfile.NamedTemporaryFile(prefix="rl-harness-kit-") as marker:
            seen = await sandbox.exec(["ls", marker.name])
        assert seen.exit_code, "the sandbox sees the files of this machine, which its capabilities deny"
        return sandbox

    def keep(self, sandbox: Sandbox) -> Sandbox:
        """Have a sandbox closed when the check has ended."""
        self._stack.push_async_callback(sandbox.close)
        return sandbox

    async def snapshot(self, sandbox: Sandbox, **fields: Any) -> str:
        """A new snapshot with this check's labels, deleted when the check has ended."""
        snapshot = await sandbox.snapshot(**{"labels": self.labels, **fields})
        self._stack.push_async_callback(self.provider.delete_snapshot, snapshot)
        return snapshot

    async def another_provider(self) -> SandboxProvider:
        """A second instance with the same options, closed when the check has ended."""
        assert self.rig.options is not None
        provider = type(self.provider)(self.rig.options)
        self._stack.push_async_callback(provider.close)
        return provider

    async def none_left(self) -> bool:
        """Whether no sandbox and no snapshot with this check's labels is on record."""
        return not await self.provider.list(self.labels) and not await self.provider.snapshots(self.labels)


Body = Callable[[Context], Awaitable[None]]
Reason = Callable[[SandboxCapabilities, Rig], str | None]


class Check:
    """One rule of the contract, by the name of the function that tests it."""

    def __init__(self, body: Body, reasons: tuple[Reason, ...]) -> None:
        self.name = body.__name__
        self._reasons = reasons
        self._body = body

    def __str__(self) -> str:
        return self.name

    def inapplicable(self, capabilities: SandboxCapabilities, rig: Rig = NO_RIG) -> str | None:
        """Why this rule does not concern a provider of these capabilities, or cannot be tested with this rig."""
        return next((found for reason in self._reasons if (found := reason(capabilities, rig))), None)

    async def run(self, provider: SandboxProvider, folder: Path, rig: Rig = NO_RIG) -> None:
        """Raises AssertionError when the provider breaks the rule. ``folder`` is an empty folder of the host."""
        async with AsyncExitStack() as stack:
            await self._body(Context(provider, folder, rig, stack))


class Checks(list[Check]):
    """Collects the checks of one module, in order."""

    def check(self, body: Body) -> Body:
        """A check that every provider must pass."""
        self.append(Check(body, ()))
        return body

    def check_if(self, *reasons: Reason) -> Callable[[Body], Body]:
        """A check for providers whose capabilities give none of the ``reasons`` against it."""

        def register(body: Body) -> Body:
            self.append(Check(body, reasons))
            return body

        return register


def without(name: str) -> Reason:
    """The reason that a provider lacks the capability flag ``name``."""
    return lambda capabilities, _: None if getattr(capabilities, name) else f"no capability {name}"


def without_limit(name: str) -> Reason:
    return lambda capabilities, _: None if name in capabilities.limits else f"does not limit {name}"


def without_network(policy: NetworkPolicy) -> Reason:
    return lambda capabilities, _: None if policy in capabilities.network else f"no network policy {policy.value}"


def without_snapshots(capabilities: SandboxCapabilities, _: Rig) -> str | None:
    return "no snapshots" if capabilities.snapshot is SnapshotLevel.NONE else None


def has_network(policy: NetworkPolicy) -> Reason:
    return lambda capabilities, _: f"has the policy {policy.value} itself" if policy in capabilities.network else None


def not_isolated(capabilities: SandboxCapabilities, _: Rig) -> str | None:
    return None if capabilities.isolated else "not isolated"


def not_given(*names: str) -> Reason:
    """The reason that the author of the provider gave the kit no such parts of a :class:`Rig`."""

    def reason(_: SandboxCapabilities, rig: Rig) -> str | None:
        missing = [name for name in names if getattr(rig, name) is None]
        return f"the kit was given no {' and no '.join(missing)} (rl_harness.testing.sandbox.Rig)" if missing else None

    return reason


def equal(actual: object, wanted: object, what: str = "value") -> None:
    assert actual == wanted, f"{what} is {actual!r}, wanted {wanted!r}"


def succeeded(result: ExecResult) -> bytes:
    """The stdout of a command that must have succeeded."""
    assert result.ok, f"the command failed: {result!r}"
    return result.stdout


async def refused(
    operation: Awaitable[object], error: type[Exception] | tuple[type[Exception], ...], what: str
) -> None:
    try:
        await operation
    except error:
        return
    raise AssertionError(f"not refused: {what}")


async def until(condition: Callable[[], Awaitable[bool]], what: str, seconds: float | None = None) -> None:
    """Wait for something that must come true soon; the bound only ends a failing check."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + (seconds or SECONDS)
    while not await condition():
        assert loop.time() < deadline, f"never came true: {what}"
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def within(what: str, seconds: float | None = None) -> AsyncIterator[None]:
    """Fail with ``what`` did not happen, instead of waiting for ever."""
    try:
        async with asyncio.timeout(seconds or SECONDS):
            yield
    except TimeoutError:
        raise AssertionError(f"not within {seconds or SECONDS:g} s: {what}") from None


async def cancelled_midway(start: Callable[[], Awaitable[object]], after: float) -> object:
    """Start something, cancel it ``after`` seconds; its result when it was faster, else None."""
    running = asyncio.ensure_future(start())
    await asyncio.sleep(after)
    running.cancel()
    await asyncio.wait([running])
    return None if running.cancelled() else running.result()


def counter(name: str) -> str:
    """A shell loop that goes on for ever, shows it by appending to a file, and says which process it is: its number,
    and its start, since numbers come again."""
    who = 'sh -c "echo \\$PPID; cut -d\\  -f22 /proc/\\$PPID/stat 2>/dev/null"'
    return f"{who} > {name}.pid; while :; do echo >> {name}; sleep 0.05; done"


async def runs(sandbox: Sandbox, name: str) -> bool:
    """Whether the process of :func:`counter` is there and alive, and not another one of the same number, which comes
    easily where few were ever started."""
    script = (
        f"pid=; start=; {{ read -r pid; read -r start; }} 2>/dev/null < {name}.pid;"
        '[ -n "$pid" ] && kill -0 "$pid" 2>/dev/null && ! grep -qs "^State:[[:space:]]*[ZX]" "/proc/$pid/status"'
        ' && [ "$(cut -d" " -f22 "/proc/$pid/stat" 2>/dev/null)" = "$start" ]'
    )
    return (await sandbox.exec(script)).exit_code == 0


async def size(sandbox: Sandbox, name: str) -> int:
    """The size of a file in the working directory; 0 when there is none."""
    return int(succeeded(await sandbox.exec(f"if [ -e {name} ]; then wc -c < {name}; else echo 0; fi")))
