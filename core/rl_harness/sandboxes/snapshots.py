"""Prepares environments once and starts sandboxes from the result: a snapshot found by what it is made of.

Stands between whoever needs sandboxes and a provider. Where the provider has no snapshots, set-up steps run in every
sandbox. A failed preparation fails everybody who waits for it alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from rl_harness.contracts.sandbox import (
    EnvironmentSpec,
    NetworkPolicy,
    Sandbox,
    SandboxCapabilities,
    SandboxProvider,
    SandboxSpec,
    SnapshotLevel,
)
from rl_harness.errors import RlHarnessError, SandboxError, TaskError, Unsupported
from rl_harness.sandboxes.allowlist import EVERY_PUBLIC_HOST, AllowListProvider
from rl_harness.sandboxes.environments import environment_key, has_image, pays
from rl_harness.sandboxes.flights import Flights, finished
from rl_harness.sandboxes.setup import run_setup
from rl_harness.sandboxes.usage import Usage

_log = logging.getLogger(__name__)

#: Seconds between looks at whether another process has ended the same build.
_LOOK = 0.1
#: Seconds for which a provider's list of snapshots is believed: many environments are looked up at once.
_FRESH = 5.0
#: Seconds that starting, killing and freezing may take beside the steps themselves.
_GRACE = 300.0

#: Labels of a snapshot: which environment it was made for, to be read by people.
ENVIRONMENT = "environment"


class Counts(msgspec.Struct, kw_only=True):
    """What a run paid for preparation: snapshots ``built`` (and ``build_seconds`` in all), ``found`` made already,
    and sandboxes ``started`` from one."""

    built: int = 0
    found: int = 0
    started: int = 0
    build_seconds: float = 0.0


class _Failure(msgspec.Struct):
    error: RlHarnessError
    times: int = 1


class Snapshots:
    """A :class:`~rl_harness.contracts.SandboxSource` that prepares before it creates.

    ``identity`` names the provider and its version, and is part of every key. ``state`` is the folder for locks and
    last uses. A key whose preparation failed is tried again by whoever asks next, ``retries`` times at most in the life
    of this object. ``labels`` go onto the sandboxes in which set-up runs. ``enabled`` False runs set-up in every
    sandbox. ``note`` is told, once each, what makes a run slower than it need be.
    """

    def __init__(
        self,
        provider: SandboxProvider,
        *,
        identity: str,
        state: Path,
        labels: Mapping[str, str] | None = None,
        retries: int = 2,
        enabled: bool = True,
        note: Callable[[str], None] = _log.info,
    ) -> None:
        self.provider = provider
        self.counts = Counts()
        self._identity = identity
        self._usage = Usage(state)
        self._labels = dict(labels or {})
        self._retries = retries
        self._enabled = enabled and provider.capabilities.snapshot is not SnapshotLevel.NONE
        self._why_not = "snapshots are switched off" if not enabled else "this sandbox has no snapshots"
        self._note = note
        self._said = False
        self._keys: dict[bytes, str] = {}
        self._fingerprints: dict[str, Mapping[str, str]] = {}
        self._pays: dict[bytes, bool] = {}
        self._known: dict[str, str] = {}
        self._made: set[str] = set()
        self._listed: dict[str, str] = {}
        self._listed_at = -math.inf
        self._failures: dict[str, _Failure] = {}
        self._builds: Flights[str] = Flights()
        self._fetches: Flights[list[Sandbox]] = Flights()
        self._fetched: set[str] = set()

    @property
    def capabilities(self) -> SandboxCapabilities:
        return self.provider.capabilities

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """A sandbox of the prepared environment. Raises like :meth:`~rl_harness.contracts.SandboxProvider.create`."""
        prepared = await self.prepared(spec)
        if prepared.snapshot is None:
            return await self._start(prepared)
        try:
            sandbox = await self.provider.create(prepared)
        except SandboxError:
            if await self._exists(prepared.snapshot):
                raise
            self._forget(prepared.snapshot)  # pruned since it was found
            prepared = await self.prepared(spec)
            sandbox = await self.provider.create(prepared)
        self.counts.started += 1
        self._usage.used(prepared.snapshot or "")
        return sandbox

    async def prepared(self, spec: SandboxSpec) -> SandboxSpec:
        """``spec`` with the snapshot to start from, found or made now; as it is where no snapshot pays."""
        if not self._enabled or spec.snapshot is not None or not await self._worth(spec.environment):
            return spec
        key = await self._key(spec)
        snapshot = self._known.get(key)
        if snapshot is None:
            snapshot = await self._builds.join(key, lambda: self._find_or_build(key, spec))
        return msgspec.structs.replace(spec, snapshot=snapshot)

    async def build(self, spec: SandboxSpec) -> Literal["built", "found", "ready", "plain"]:
        """Prepare ahead of any run. Returns ``"built"``, ``"found"`` (it was there) or ``"plain"`` (nothing to do).

        An image is pulled or built by starting a sandbox of it once, which is ``"ready"``: it may have been there.
        """
        prepared = await self.prepared(spec)
        if prepared.snapshot is not None:
            return "built" if prepared.snapshot in self._made else "found"
        if not has_image(spec.environment):
            return "plain"
        await (await self._start(spec)).close()
        return "ready"

    async def close(self) -> None:
        """Stop preparing, and write down the last uses. The provider stays open."""
        await self._builds.close()
        await self._fetches.close()
        await asyncio.to_thread(self._usage.flush)

    # -- plain starts ------------------------------------------------------------------------------------------

    async def _start(self, spec: SandboxSpec) -> Sandbox:
        """A sandbox that starts from no snapshot of ours, with its set-up run in it."""
        setup = spec.environment.setup if spec.snapshot is None else ()
        # What set-up takes must not be missing from the lifetime that the episode was promised.
        lifetime = spec.lifetime + sum(step.timeout for step in setup)
        sandbox = await self._plain(msgspec.structs.replace(spec, lifetime=lifetime))
        if setup:
            if not self._said:
                self._said = True
                self._note(f"set-up runs anew in every sandbox: {self._why_not}")
            try:
                await run_setup(sandbox, setup, users=self.capabilities.users)
            except BaseException:
                await finished(sandbox.close())
                raise
        return sandbox

    async def _plain(self, spec: SandboxSpec) -> Sandbox:
        """The first sandbox of an image goes ahead alone, so that it is pulled or built once and not by everybody."""
        if spec.snapshot is not None or not has_image(spec.environment):
            return await self.provider.create(spec)
        key = await self._key(spec)
        if key not in self._fetched:
            first = await self._fetches.join(key, lambda: self._fetch(key, spec))
            if first:  # one sandbox came of it, and whoever wakes up first has it
                return first.pop()
        return await self.provider.create(spec)

    async def _fetch(self, key: str, spec: SandboxSpec) -> list[Sandbox]:
        self._raise_failure(key)
        with self._failing(key):
            common = {name: value for name, value in spec.labels.items() if name in self._labels}
            sandbox = await self.provider.create(msgspec.structs.replace(spec, labels=common))
        self._fetched.add(key)
        return [sandbox]

    # -- snapshots ---------------------------------------------------------------------------------------------

    async def _find_or_build(self, key: str, spec: SandboxSpec) -> str:
        self._raise_failure(key)
        if found := await self._find(key):
            return found
        lock = self._usage.lock(key)
        try:
            while not lock.acquire(patience=0):  # noqa: ASYNC110 -- another process sets no event here
                await asyncio.sleep(_LOOK)
        except OSError as error:
            raise SandboxError(f"an environment cannot be prepared: {error}") from None
        try:
            # Whoever held the lock a moment ago may have made it.
            return await self._find(key, now=True) or await self._build(key, spec)
        finally:
            lock.release()

    async def _find(self, key: str, *, now: bool = False) -> str | None:
        """The snapshot on record under ``key``; unless asked for ``now``, by a list that may be a moment old."""
        if now or time.monotonic() - self._listed_at > _FRESH:
            infos = await self.provider.snapshots()
            self._listed, self._listed_at = {info.key: info.id for info in infos if info.key}, time.monotonic()
        found = self._listed.get(key)
        if found is not None:
            self.counts.found += 1
            self._known[key] = found
        return found

    async def _build(self, key: str, spec: SandboxSpec) -> str:
        started = time.perf_counter()
        environment = spec.environment
        await self._still(key, spec)
        with self._failing(key):
            sandbox = await self.provider.create(self._setup_spec(spec))
            try:
                await run_setup(sandbox, environment.setup, users=self.capabilities.users)
                await self._still(key, spec)
                snapshot = await _frozen(sandbox, key, environment)
            finally:
                await finished(sandbox.close())
        seconds = time.perf_counter() - started
        self._known[key] = snapshot
        self._made.add(snapshot)
        self._usage.built(snapshot, seconds)
        self.counts.built += 1
        self.counts.build_seconds += seconds
        return snapshot

    def _setup_spec(self, spec: SandboxSpec) -> SandboxSpec:
        """Set-up is the task author's code, not the agent's: like the building of an image, it has a network."""
        steps = spec.environment.setup
        if steps and NetworkPolicy.FULL in self.capabilities.network:
            spec = msgspec.structs.replace(spec, network=NetworkPolicy.FULL, network_allow=())
        elif steps and isinstance(self.provider, AllowListProvider) and self.provider.proxied:
            # As much of it as a proxy gives; and the same for every task, whatever its own list: they share the result.
            spec = msgspec.structs.replace(spec, network=NetworkPolicy.ALLOW_LIST, network_allow=EVERY_PUBLIC_HOST)
        return msgspec.structs.replace(
            spec,
            labels={**self._labels, "role": "setup"},
            mounts=(),  # what is frozen must not come from them
            lifetime=sum(step.timeout for step in steps) + spec.environment.build_timeout + _GRACE,
        )

    async def _exists(self, snapshot: str) -> bool:
        return any(info.id == snapshot for info in await self.provider.snapshots())

    def _forget(self, snapshot: str) -> None:
        self._known = {key: known for key, known in self._known.items() if known != snapshot}
        self._listed_at = -math.inf

    def _raise_failure(self, key: str) -> None:
        failure = self._failures.get(key)
        if failure is not None and failure.times > self._retries:
            raise failure.error.with_traceback(None)

    @contextlib.contextmanager
    def _failing(self, key: str) -> Any:
        try:
            yield
        except (SandboxError, TaskError, Unsupported) as error:
            failure = self._failures.setdefault(key, _Failure(error, 0))
            failure.error, failure.times = error, failure.times + 1
            raise
        self._failures.pop(key, None)

    # -- what an environment is --------------------------------------------------------------------------------

    async def _worth(self, environment: EnvironmentSpec) -> bool:
        content = _encoded(environment)
        if content not in self._pays:
            self._pays[content] = await asyncio.to_thread(pays, environment)
        return self._pays[content]

    async def _key(self, spec: SandboxSpec) -> str:
        """Read once a run: a task that changes while it runs is another run's business."""
        wanted = machine(spec)
        content = _encoded(wanted)
        if content not in self._keys:
            fingerprint = await self.provider.fingerprint(wanted)
            key = await asyncio.to_thread(environment_key, spec.environment, self._identity, fingerprint)
            self._keys[content], self._fingerprints[key] = key, fingerprint
        return self._keys[content]

    async def _still(self, key: str, spec: SandboxSpec) -> None:
        """Raises ``TaskError`` when the environment's files are no longer those that the key was taken of: what is made
        of them must not be found under it. The next attempt takes the key anew."""
        fingerprint = self._fingerprints[key]
        if await asyncio.to_thread(environment_key, spec.environment, self._identity, fingerprint) != key:
            self._keys.pop(_encoded(machine(spec)), None)
            where = spec.environment.directory or name_of(spec.environment)
            raise TaskError(f"{where}: its files changed while the environment was being prepared")


async def _frozen(sandbox: Sandbox, key: str, environment: EnvironmentSpec) -> str:
    """The prepared environment's snapshot. What cannot be one is an error that says whose environment that is."""
    try:
        return await sandbox.snapshot(key=key, labels={ENVIRONMENT: name_of(environment)})
    except Unsupported as error:
        where = environment.compose or environment.dockerfile or environment.directory or name_of(environment)
        steps = ", ".join(step.name for step in environment.setup)
        what = f" after {steps}" if steps else ""
        message = f"{where}: the environment cannot be kept as a snapshot{what}: {error.message}"
        raise Unsupported(message, remedy=error.remedy) from None


def name_of(environment: EnvironmentSpec) -> str:
    """What people call an environment: its task, or its image."""
    if environment.directory is not None:
        return environment.directory.parent.name
    return environment.image or "empty"


def machine(spec: SandboxSpec) -> SandboxSpec:
    """Of a spec, what a prepared environment may be made for: not what differs from episode to episode."""
    return SandboxSpec(environment=spec.environment, limits=spec.limits)


def _encoded(what: EnvironmentSpec | SandboxSpec) -> bytes:
    return msgspec.json.encode(what, order="deterministic", enc_hook=str)
