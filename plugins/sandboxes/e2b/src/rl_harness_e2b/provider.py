"""The ``e2b`` provider: what it can do, making sandboxes, finding and reaping them, their snapshots."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import functools
import importlib.util
import re
import secrets
import time
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, Field
from rl_harness.contracts.common import Options as BaseOptions
from rl_harness.contracts.sandbox import (
    EnvironmentSpec,
    NetworkPolicy,
    Sandbox,
    SandboxCapabilities,
    SandboxInfo,
    SandboxProvider,
    SandboxSpec,
    SnapshotInfo,
    SnapshotLevel,
)
from rl_harness.errors import SandboxError, Unavailable, UnsafeFiles, Unsupported
from rl_harness.sandboxes.remote import owner_alive, owner_label

from rl_harness_e2b import records
from rl_harness_e2b.limits import resources
from rl_harness_e2b.network import network_options

if TYPE_CHECKING:
    from e2b import AsyncSandbox
    from e2b import SandboxInfo as Listed

    from rl_harness_e2b.sandbox import E2BSandbox
    from rl_harness_e2b.service import Service
    from rl_harness_e2b.templates import Template

_PREFLIGHT_SECONDS = 15.0
_CHECKPOINT_SECONDS = 900.0
_FORKS_AT_ONCE = 20  # the SDK asks for no more in one request
_STALE_SECONDS = 3600.0  # a record is of no snapshot if E2B does not have it by then
_SNAPSHOT = re.compile(r"[a-z0-9][a-z0-9_.-]*(/[a-z0-9_.-]+)?(:[a-z0-9_.-]+)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# Keys of a sandbox's metadata; a label's begins with "label.".
_OWNER, _WORKDIR, _FAMILY, _SNAPSHOT_OF, _LABEL = (
    "rl-harness.owner",
    "rl-harness.workdir",
    "rl-harness.family",
    "rl-harness.snapshot",
    "label.",
)


class E2BOptions(BaseOptions):
    template: str = Field("base", min_length=1, description="template at E2B for tasks that name no image")
    build_args: dict[str, str] = Field({}, description="defaults for the ARGs of every Dockerfile")
    longest_timeout: int = Field(
        3600,
        ge=60,
        description="seconds for which E2B is asked to keep a sandbox at a time; asked again up to the lifetime",
    )
    on_timeout: Literal["kill", "pause"] = Field(
        "kill", description="what E2B does with a sandbox whose time is over; paused ones cost storage until reaped"
    )
    patience: float = Field(120.0, gt=0, description="seconds for which a request is repeated while E2B is busy")
    state_dir: Path | None = Field(None, description="where labels of snapshots and the like are kept")


class E2BProvider(SandboxProvider):
    """Sandboxes of one team at E2B, told apart by their metadata."""

    api: ClassVar[int] = 1
    Options = E2BOptions

    def __init__(self, options: BaseModel) -> None:
        super().__init__(options)
        assert isinstance(options, E2BOptions)
        self._options = options
        self._records = records.Records(options.state_dir or records.state_home())
        self._opening: asyncio.Task[Service] | None = None
        self._sandboxes: dict[str, E2BSandbox] = {}
        self._builds: dict[str, asyncio.Task[str]] = {}
        self._forking: dict[str, asyncio.Lock] = {}
        self._later: set[asyncio.Task[object]] = set()
        self._closed = False

    @property
    def capabilities(self) -> SandboxCapabilities:
        return SandboxCapabilities(
            snapshot=SnapshotLevel.FILESYSTEM,
            fork=True,
            pause=True,
            users=True,
            dockerfile=True,
            image=True,
            slow_exec=True,
            reconnect=True,
            network=frozenset(NetworkPolicy),
            limits=frozenset({"memory", "cpus"}),
        )

    async def preflight(self) -> None:
        if importlib.util.find_spec("e2b") is None:
            raise Unavailable("the e2b sandbox needs E2B's SDK", remedy="pip install rl-harness-e2b")
        await self._opened()

    # ------------------------------------------------------------------------------------------------- connection

    async def _opened(self) -> Service:
        """The connection, opened at the first use, and again after a failure to."""
        if self._closed:
            raise SandboxError("the sandbox provider is closed")
        opening = self._opening
        if opening is None or (opening.done() and (opening.cancelled() or opening.exception() is not None)):
            opening = self._opening = asyncio.create_task(self._open())
        return await asyncio.shield(opening)

    async def _open(self) -> Service:
        from rl_harness_e2b.service import Service  # the SDK takes a while to import

        return await Service.open(self._options.patience, _PREFLIGHT_SECONDS)

    @property
    def service(self) -> Service:
        assert self._opening is not None
        return self._opening.result()

    # ----------------------------------------------------------------------------------------------------- making

    async def check(self, spec: SandboxSpec) -> None:
        self._arguments(spec)
        if spec.snapshot is None:
            await self._definition(spec)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        arguments = self._arguments(spec)
        service = await self._opened()
        template = await self._template(service, spec)
        system = self._frozen_system(spec.snapshot) if spec.snapshot is not None else []
        family = secrets.token_hex(10)
        metadata = {**self._metadata(spec), _FAMILY: family}
        # Once asked for, it is made: a caller that gives up must not leave it behind.
        making = asyncio.create_task(self._make(service, template, family, {**arguments, "metadata": metadata}))
        try:
            handle = await asyncio.shield(making)
        except asyncio.CancelledError:
            self.do_later(self._dispose(making))
            raise
        try:
            sandbox = self._sandbox(handle, spec.environment.workdir, spec, family)
        except Exception as error:  # what E2B says of it makes no sense
            await self._kill_strays(service, family)
            raise SandboxError(f"E2B: create a sandbox: {type(error).__name__}: {error}") from error
        try:
            await sandbox.prepare(system)
            self._records.keep_system(sandbox.id, sandbox.system)
            await self._check_resources(service, sandbox, spec)
            if spec.snapshot is None:
                await self._fill(sandbox, spec.environment)
        except BaseException as error:
            closing = self.do_later(sandbox.close())
            if not isinstance(error, asyncio.CancelledError):
                await asyncio.wait({closing})
            raise
        return sandbox

    async def _make(self, service: Service, template: str, family: str, arguments: dict[str, Any]) -> AsyncSandbox:
        """One sandbox, however often E2B is asked: an answer that got lost is asked for again by its key."""
        from e2b import AsyncSandbox

        async def attempt(options: dict[str, Any]) -> AsyncSandbox:
            return await AsyncSandbox.create(template, idempotency_key=family, **arguments, **options)

        try:
            return await service.call("create a sandbox", attempt)
        except Exception:
            await self._kill_strays(service, family)
            raise

    async def _kill_strays(self, service: Service, family: str) -> None:
        """End what E2B made of a request whose answer never came."""
        try:
            for found in await self._listed(service, {_FAMILY: family}):
                if found.sandbox_id not in self._sandboxes:
                    await _end(service, found.sandbox_id)
        except SandboxError:
            return  # it lives until the time that it was given

    def _sandbox(self, handle: AsyncSandbox, workdir: str, spec: SandboxSpec | None, family: str) -> E2BSandbox:
        from rl_harness_e2b.sandbox import E2BSandbox

        sandbox = E2BSandbox(
            self, handle, workdir=workdir, spec=spec, family=family, longest=self._options.longest_timeout
        )
        self._sandboxes[sandbox.id] = sandbox
        return sandbox

    def forget(self, sandbox: E2BSandbox) -> None:
        self._sandboxes.pop(sandbox.id, None)
        self._records.forget_system(sandbox.id)
        if sandbox.spec is not None and sandbox.spec.snapshot is not None and not self._closed:
            self._do_doomed(sandbox.spec.snapshot)

    def _arguments(self, spec: SandboxSpec) -> dict[str, Any]:
        """What the SDK is asked for. Raises Unsupported for what E2B does not have."""
        environment = spec.environment
        if environment.compose is not None:
            raise Unsupported(
                f"{environment.compose}: E2B has no compose files",
                remedy="choose a sandbox that has them (rl-harness plugins list)",
            )
        if environment.dockerfile is not None and not environment.dockerfile.is_file():
            raise Unsupported(f"{environment.dockerfile}: there is no such Dockerfile")
        if not environment.workdir.startswith("/"):
            raise Unsupported(f"workdir {environment.workdir!r} is not absolute")
        if spec.mounts:
            raise Unsupported("a machine on E2B cannot show directories of this one")
        for variable in environment.env:
            if not _VARIABLE.fullmatch(variable):
                raise Unsupported(f"environment variable {variable!r}: E2B takes letters, digits and _ only")
        if spec.snapshot is not None and not _SNAPSHOT.fullmatch(spec.snapshot):
            raise SandboxError(f"E2B has no snapshot {spec.snapshot!r}")
        resources(spec.limits)
        return {
            **network_options(spec),
            "timeout": min(max(1, -int(-spec.lifetime // 1)), self._options.longest_timeout),
            # Never woken by whoever happens to knock.
            "lifecycle": {"on_timeout": self._options.on_timeout, "auto_resume": False},
        }

    def _metadata(self, spec: SandboxSpec) -> dict[str, str]:
        fields = {
            _OWNER: owner_label(),
            _WORKDIR: spec.environment.workdir,
        }
        if spec.snapshot is not None:
            fields[_SNAPSHOT_OF] = spec.snapshot
        return {**fields, **_labels(spec.labels)}

    async def _template(self, service: Service, spec: SandboxSpec) -> str:
        """What to start from, built where it needs to be; a build is asked for once at a time."""
        if spec.snapshot is not None:
            return spec.snapshot
        template = await self._definition(spec)
        await self._built(service, template, spec.environment.build_timeout)
        return template.name

    async def _definition(self, spec: SandboxSpec) -> Template:
        from rl_harness_e2b.templates import template_of

        options = self._options
        return await asyncio.to_thread(template_of, spec.environment, spec.limits, options.template, options.build_args)

    async def _built(self, service: Service, template: Template, timeout: float) -> str:
        """The id of the template's build."""
        if template.recipe is None:
            return template.name
        building = self._builds.get(template.name)
        if building is None or (building.done() and (building.cancelled() or building.exception() is not None)):
            building = asyncio.create_task(self._build(service, template, timeout))
            self._builds[template.name] = building
        return await asyncio.shield(building)

    async def _build(self, service: Service, template: Template, timeout: float) -> str:
        from rl_harness_e2b import templates

        if found := await templates.find(service, template):
            return found
        try:
            async with asyncio.timeout(timeout):
                return await templates.build(service, template, timeout)
        except TimeoutError:
            raise SandboxError(f"E2B: the template was not built within {timeout:g} s") from None

    async def _check_resources(self, service: Service, sandbox: E2BSandbox, spec: SandboxSpec) -> None:
        """A snapshot's machine is as large as the one that it was made of."""
        from e2b import AsyncSandbox

        cpus, memory = resources(spec.limits)
        if spec.snapshot is None or (cpus is None and memory is None):
            return
        info = await service.call("ask about a sandbox", lambda options: AsyncSandbox.get_info(sandbox.id, **options))
        for name, wanted, given in (("cpus", cpus, info.cpu_count), ("MiB of memory", memory, info.memory_mb)):
            if wanted is not None and given != wanted:
                raise Unsupported(f"the snapshot {spec.snapshot} is of a machine with {given} {name}, not {wanted}")

    async def _fill(self, sandbox: Sandbox, environment: EnvironmentSpec) -> None:
        workspace = environment.directory / "workspace" if environment.directory else None
        if workspace is not None and workspace.is_dir():
            try:
                await sandbox.upload(workspace, environment.workdir)
            except UnsafeFiles as error:  # nobody's doing: no agent has been here yet
                raise SandboxError(f"{workspace} cannot be copied into the sandbox: {error.message}") from None

    async def _dispose(self, making: asyncio.Task[AsyncSandbox]) -> None:
        """End a sandbox that nobody waits for any more, once it is there."""
        try:
            handle = await making
        except SandboxError:
            return
        await self._sandbox(handle, "/", None, "").close()

    def do_later(self, operation: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
        """In the background, and awaited by :meth:`close`."""
        task = asyncio.create_task(operation)
        self._later.add(task)
        task.add_done_callback(self._done_later)
        return task

    def _done_later(self, task: asyncio.Task[object]) -> None:
        self._later.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved: whatever was not ended lives until the time that it was given

    # ------------------------------------------------------------------------------------------------------ forks

    async def fork(self, parent: E2BSandbox, count: int, system: Sequence[str]) -> builtins.list[E2BSandbox]:
        """Forks of a sandbox that stands still. One at a time for those that descend from one request, so that what
        got lost can be told from what another fork is about to be given."""
        async with self._forking.setdefault(parent.family, asyncio.Lock()):
            return await self._fork(parent, count, system)

    async def _fork(self, parent: E2BSandbox, count: int, system: Sequence[str]) -> builtins.list[E2BSandbox]:
        from e2b import AsyncSandbox

        from rl_harness_e2b.service import failure

        service = self.service
        forks: builtins.list[E2BSandbox] = []
        failures: builtins.list[SandboxError] = []
        try:
            for start in range(0, count, _FORKS_AT_ONCE):
                some = min(_FORKS_AT_ONCE, count - start)
                made = await service.call(
                    f"fork sandbox {parent.id}",
                    functools.partial(_asked_forks, parent.id, some, parent.fresh()),
                    once=True,
                    timeout=_CHECKPOINT_SECONDS,
                )
                for one in made:
                    if isinstance(one, AsyncSandbox):
                        forks.append(self._sandbox(one, parent.workdir, parent.spec, parent.family))
                        forks[-1].env.update(parent.env)
                    else:
                        failures.append(failure(f"fork sandbox {parent.id}", one))
            if failures:
                raise failures[0]
            if len(forks) != count:
                raise SandboxError(f"E2B: fork sandbox {parent.id}: {len(forks)} forks in place of {count}")
            await asyncio.gather(*(fork.prepare(system) for fork in forks))
            for fork in forks:
                self._records.keep_system(fork.id, fork.system)
        except BaseException:
            await asyncio.gather(*(fork.close() for fork in forks), return_exceptions=True)
            await self._kill_strays(service, parent.family)
            raise
        return forks

    async def dispose_forks(self, forking: asyncio.Task[builtins.list[E2BSandbox]]) -> None:
        try:
            forks = await forking
        except SandboxError:
            return
        await asyncio.gather(*(fork.close() for fork in forks), return_exceptions=True)

    # ---------------------------------------------------------------------------------------------------- finding

    async def _listed(self, service: Service, metadata: Mapping[str, str]) -> builtins.list[Listed]:
        from e2b import AsyncSandbox, SandboxQuery

        async def pages(options: dict[str, Any]) -> builtins.list[Listed]:
            paginator = AsyncSandbox.list(query=SandboxQuery(metadata=dict(metadata)), limit=100)
            found: builtins.list[Listed] = []
            while paginator.has_next:
                found += await paginator.next_items(**options)
            return found

        return await service.call("list the sandboxes", pages)

    async def list(self, labels: Mapping[str, str] | None = None) -> builtins.list[SandboxInfo]:
        found = await self._listed(await self._opened(), _labels(labels or {}))
        return [info for info in map(_info, found) if info and (labels or {}).items() <= info.labels.items()]

    async def reap(self, labels: Mapping[str, str] | None = None, *, force: bool = False) -> int:
        service = await self._opened()

        async def end(sandbox: str) -> None:
            if sandbox in self._sandboxes:
                await self._sandboxes[sandbox].close()
            else:
                await _end(service, sandbox)
                self._records.forget_system(sandbox)

        dead = [info.id for info in await self.list(labels) if force or info.owner_alive is False]
        await asyncio.gather(*map(end, dead))
        await self.snapshots(labels)  # deletes what could not be before
        if noted := self._records.sandboxes():  # of some, their time was over
            there = {found.sandbox_id for found in await self._listed(service, {})}
            for sandbox in {*noted} - there - {*self._sandboxes}:
                self._records.forget_system(sandbox)
        return len(dead)

    async def connect(self, sandbox: str) -> Sandbox:
        from e2b import AsyncSandbox

        service = await self._opened()
        if sandbox in self._sandboxes:
            return self._sandboxes[sandbox]
        info = await service.call(f"find sandbox {sandbox}", lambda options: AsyncSandbox.get_info(sandbox, **options))
        metadata = info.metadata or {}
        handle = await service.call(
            f"connect to sandbox {sandbox}",
            lambda options: AsyncSandbox.connect(sandbox, timeout=self._options.longest_timeout, **options),
        )
        found = self._sandbox(handle, metadata.get(_WORKDIR, "/"), None, metadata.get(_FAMILY, ""))
        await found.prepare(self._records.system(sandbox), kill=False)
        return found

    # -------------------------------------------------------------------------------------------------- snapshots

    async def fingerprint(self, spec: SandboxSpec) -> Mapping[str, str]:
        """The build of the template at E2B: one build is one content, whatever became of the tag of its image, on a
        machine of one size, which is that of every machine that starts from a snapshot of it."""
        self._arguments(spec)
        template = await self._definition(spec)
        service = await self._opened()
        build = await self._built(service, template, spec.environment.build_timeout)
        return {"template": template.name, "build": build}

    async def freeze(self, sandbox: str, key: str, labels: Mapping[str, str], system: builtins.list[str]) -> str:
        """A snapshot of a sandbox that stands still."""
        name = records.new_name(key)
        self._records.new(name, key, labels, system)
        try:
            return await self._freeze(sandbox, name)
        except SandboxError:
            self._records.remove(name)
            raise

    async def _freeze(self, sandbox: str, name: str) -> str:
        """Files only where E2B can; with the memory otherwise, whose processes end where a sandbox starts from it."""
        from e2b import AsyncSandbox, SandboxException

        async def attempt(options: dict[str, Any]) -> str:
            try:
                made = await AsyncSandbox.create_snapshot(sandbox, name=name, mode="filesystem", **options)
            except SandboxException as error:
                if error.status_code not in (400, 409):
                    raise
                made = await AsyncSandbox.create_snapshot(sandbox, name=name, **options)
            return made.snapshot_id

        return await self.service.call(f"freeze sandbox {sandbox}", attempt, timeout=_CHECKPOINT_SECONDS)

    async def thaw(self, freezing: asyncio.Task[str]) -> None:
        """Delete a snapshot that nobody waits for any more."""
        with contextlib.suppress(SandboxError):
            snapshot = await freezing
            await self._delete(snapshot, records.own_name(snapshot))

    def _frozen_system(self, snapshot: str) -> builtins.list[str]:
        """The processes that E2B itself had in the machine of a snapshot."""
        record = self._records.read(records.own_name(snapshot) or "")
        if record.doomed:
            raise SandboxError(f"the snapshot {snapshot} was deleted")
        return record.system

    async def snapshots(self, labels: Mapping[str, str] | None = None) -> builtins.list[SnapshotInfo]:
        from e2b import AsyncSandbox

        service = await self._opened()

        async def pages(options: dict[str, Any]) -> builtins.list[str]:
            paginator = AsyncSandbox.list_snapshots(limit=100)
            found: builtins.list[str] = []
            while paginator.has_next:
                found += [str(item.snapshot_id) for item in await paginator.next_items(**options)]
            return found

        asked = time.time()
        there = {
            name: one for one in await service.call("list the snapshots", pages) if (name := records.own_name(one))
        }
        for name in self._records.names():
            if name not in there and self._records.read(name).created_at < asked - _STALE_SECONDS:
                self._records.remove(name)  # deleted by somebody else, or never made
        found = []
        for name, snapshot in there.items():
            record = self._records.read(name)
            if record.doomed:
                self.do_later(self._retry(snapshot, name))
            elif (labels or {}).items() <= record.labels.items():
                found.append(
                    SnapshotInfo(
                        id=snapshot, provider="e2b", key=record.key, labels=record.labels, created_at=record.created_at
                    )
                )
        return found

    async def delete_snapshot(self, snapshot: str) -> None:
        await self._opened()
        if _SNAPSHOT.fullmatch(snapshot):
            await self._delete(snapshot, records.own_name(snapshot))

    async def _delete(self, snapshot: str, name: str | None) -> None:
        """Delete a snapshot; one that sandboxes use, as soon as none does, and nobody sees it from now on."""
        from e2b import AsyncSandbox, SandboxException

        async def attempt(options: dict[str, Any]) -> bool:
            try:
                await AsyncSandbox.delete_snapshot(snapshot, **options)
            except SandboxException as error:
                if error.status_code == 400 and "using it" in str(error):
                    return False
                raise
            return True

        deleted = await self.service.call(f"delete the snapshot {snapshot}", attempt)
        if name is None:
            if not deleted:
                raise SandboxError(f"E2B: the snapshot {snapshot} is in use, and was not made by rl-harness")
        elif deleted:
            self._records.remove(name)
        else:
            self._records.doom(name)

    def _do_doomed(self, snapshot: str) -> None:
        name = records.own_name(snapshot)
        if name is not None and self._records.read(name).doomed:
            self.do_later(self._retry(snapshot, name))

    async def _retry(self, snapshot: str, name: str) -> None:
        try:
            await self._delete(snapshot, name)
        except SandboxError:
            return  # tried again whenever snapshots are listed

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for build in self._builds.values():
            build.cancel()
        while self._later:
            await asyncio.wait(self._later)
        closing = [sandbox.close() for sandbox in builtins.list(self._sandboxes.values())]
        outcomes = await asyncio.gather(*closing, return_exceptions=True)
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait({self._opening})
            if not self._opening.cancelled() and self._opening.exception() is None:
                await self._opening.result().close()
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome


async def _end(service: Service, sandbox: str) -> None:
    from e2b import AsyncSandbox

    await service.call(f"end sandbox {sandbox}", lambda options: AsyncSandbox.kill(sandbox, **options))


async def _asked_forks(
    parent: str, count: int, timeout: int, options: dict[str, Any]
) -> builtins.list[AsyncSandbox | Exception]:
    from e2b import AsyncSandbox

    return [*await AsyncSandbox.fork(parent, timeout=timeout, count=count, **options)]


def _labels(labels: Mapping[str, str]) -> dict[str, str]:
    return {_LABEL + name: value for name, value in labels.items()}


def _info(found: Listed) -> SandboxInfo | None:
    """What E2B says of a sandbox; None if it is not ours."""
    metadata = found.metadata
    if not isinstance(metadata, dict) or _OWNER not in metadata:
        return None
    return SandboxInfo(
        id=found.sandbox_id,
        provider="e2b",
        labels={name.removeprefix(_LABEL): value for name, value in metadata.items() if name.startswith(_LABEL)},
        created_at=found.started_at.timestamp(),
        owner_alive=owner_alive(metadata[_OWNER]),
        snapshot=metadata.get(_SNAPSHOT_OF),
    )
