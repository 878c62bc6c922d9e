"""The ``modal`` provider: what it can do, making sandboxes, finding and reaping them."""

from __future__ import annotations

import asyncio
import builtins
import importlib.util
import math
import os
import re
import secrets
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

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
from rl_harness.sandboxes.remote import owner_alive, owner_label, split_hosts

from rl_harness_modal import tags
from rl_harness_modal.index import IMAGE, SnapshotIndex

if TYPE_CHECKING:
    import modal

    from rl_harness_modal.sandbox import ModalSandbox
    from rl_harness_modal.service import Service

T = TypeVar("T")

#: Modal ends every sandbox after a day.
LONGEST_LIFETIME = 24 * 3600

_PYTHON = "3.12"
_PREFLIGHT_SECONDS = 15.0
_AT_ONCE = 16  # requests of one listing
_MIB = 1 << 20
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# The names of our own tags; a label's begins with "label.".
_OWNER, _CREATED, _WORKDIR, _SNAPSHOT, _LABEL = "owner", "created", "workdir", "snapshot", "label."


class ModalOptions(BaseOptions):
    app: str = Field("rl-harness", min_length=1, description="the app on Modal that the sandboxes belong to")
    environment: str | None = Field(None, description="the environment on Modal; its own default without it")
    image: str | None = Field(
        None, description="registry image for tasks that name none, instead of Debian with Python"
    )
    build_args: dict[str, str] = Field({}, description="build arguments of every Dockerfile")
    gpu: str | None = Field(None, description="GPU of every sandbox, such as 'H100' or 'A10G:2'")
    region: str | None = Field(None, description="region in which sandboxes run")
    patience: float = Field(120.0, gt=0, description="seconds for which a request is repeated while Modal is busy")
    snapshot_ttl: int | None = Field(
        30 * 24 * 3600, gt=0, description="seconds after which Modal drops a snapshot; null keeps it until deleted"
    )
    state_dir: Path | None = Field(None, description="where the list of snapshots is kept")


class ModalProvider(SandboxProvider):
    """Sandboxes of Modal's service, all in one app, told apart by tags."""

    api: ClassVar[int] = 1
    Options = ModalOptions

    def __init__(self, options: BaseModel) -> None:
        super().__init__(options)
        assert isinstance(options, ModalOptions)
        self._options = options
        self._index = SnapshotIndex(options.state_dir or _state_home(), options.snapshot_ttl)
        self._opening: asyncio.Task[Service] | None = None
        self._sandboxes: dict[str, ModalSandbox] = {}
        self._images: dict[str, asyncio.Task[str]] = {}
        self._later: set[asyncio.Task[object]] = set()
        self._closed = False

    @property
    def capabilities(self) -> SandboxCapabilities:
        return SandboxCapabilities(
            snapshot=SnapshotLevel.FILESYSTEM,
            fork=True,
            users=True,
            dockerfile=True,
            image=True,
            slow_exec=True,
            reconnect=True,
            network=frozenset(NetworkPolicy),
            limits=frozenset({"memory", "cpus"}),
            gpu=self._options.gpu is not None,
        )

    async def preflight(self) -> None:
        if importlib.util.find_spec("modal") is None:
            raise Unavailable("the modal sandbox needs Modal's SDK", remedy="pip install rl-harness-modal")
        try:
            async with asyncio.timeout(_PREFLIGHT_SECONDS):
                await self._service()
        except TimeoutError:
            if self._opening is not None:
                self._opening.cancel()
            raise Unavailable(
                f"Modal did not answer within {_PREFLIGHT_SECONDS:g} s",
                remedy="check the network, and status.modal.com",
            ) from None

    # ------------------------------------------------------------------------------------------------ connection

    async def _service(self) -> Service:
        """The connection, opened at the first use, and again after a failure to."""
        if self._closed:
            raise SandboxError("the sandbox provider is closed")
        opening = self._opening
        if opening is None or (opening.done() and (opening.cancelled() or opening.exception() is not None)):
            opening = self._opening = _observed(asyncio.create_task(self._open()))
        return await asyncio.shield(opening)

    async def _open(self) -> Service:
        from rl_harness_modal.service import Service  # the SDK takes half a second to import

        return await Service.open(self._options.app, self._options.environment, self._options.patience)

    # ---------------------------------------------------------------------------------------------------- making

    async def check(self, spec: SandboxSpec) -> None:
        self._arguments(spec)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        arguments = self._arguments(spec)
        service = await self._service()
        image = await self._image(service, spec)
        name = f"rl-harness-{secrets.token_hex(10)}"
        # Once asked for, it is made: a caller that gives up must not leave it behind, nor a failure what it made.
        making = asyncio.create_task(service.create(name, image, arguments))
        try:
            handle = await asyncio.shield(making)
        except asyncio.CancelledError:
            self._do_later(self._dispose(service, making, name))
            raise
        except SandboxError:
            self._do_later(service.discard(name))
            raise
        sandbox = self._sandbox(service, handle, spec.environment.workdir, spec)
        try:
            await sandbox.prepare()
            if spec.snapshot is None:
                await self._fill(sandbox, spec.environment)
        except BaseException as error:
            closing = self._do_later(sandbox.close())
            if not isinstance(error, asyncio.CancelledError):
                await asyncio.wait({closing})
            raise
        return sandbox

    def _sandbox(self, service: Service, handle: modal.Sandbox, workdir: str, spec: SandboxSpec | None) -> ModalSandbox:
        from rl_harness_modal.sandbox import ModalSandbox

        sandbox = ModalSandbox(
            service,
            handle,
            self._index,
            workdir=workdir,
            spec=spec,
            create=self.create,
            later=self._do_later,
            forget=lambda: self._sandboxes.pop(handle.object_id, None),
        )
        self._sandboxes[sandbox.id] = sandbox
        return sandbox

    def _arguments(self, spec: SandboxSpec) -> dict[str, Any]:
        """What the SDK is asked for. Raises Unsupported for what Modal does not have."""
        environment, limits = spec.environment, spec.limits
        if environment.compose is not None:
            raise Unsupported(
                f"{environment.compose}: Modal has no compose files",
                remedy="choose a sandbox that has them (rl-harness plugins list)",
            )
        if environment.dockerfile is not None and not environment.dockerfile.is_file():
            raise Unsupported(f"{environment.dockerfile}: there is no such Dockerfile")
        if not environment.workdir.startswith("/"):
            raise Unsupported(f"workdir {environment.workdir!r} is not absolute")
        if spec.mounts:
            raise Unsupported("a machine on Modal cannot show directories of this one")
        for limit in ("pids", "disk"):
            if getattr(limits, limit) is not None:
                raise Unsupported(f"Modal does not limit {limit}")
        if spec.snapshot is not None and not IMAGE.fullmatch(spec.snapshot):
            raise SandboxError(f"Modal has no snapshot {spec.snapshot!r}")
        if spec.lifetime > LONGEST_LIFETIME:
            raise Unsupported(
                f"a sandbox on Modal lives for 24 hours at most, and this one is to live for {spec.lifetime:g} s",
                remedy="give the agent and the verifier less time",
            )
        for variable in environment.env:
            if not _VARIABLE.fullmatch(variable):
                raise Unsupported(f"environment variable {variable!r}: Modal takes letters, digits and _ only")
        fields = {_OWNER: owner_label(), _CREATED: f"{time.time():.3f}", _WORKDIR: environment.workdir}
        if spec.snapshot is not None:
            fields[_SNAPSHOT] = spec.snapshot
        fields |= {_LABEL + name: value for name, value in spec.labels.items()}
        return {
            **self._network(spec),
            "tags": tags.encode(fields),
            "env": dict(environment.env),
            "timeout": max(1, math.ceil(spec.lifetime)),
            "idle_timeout": None,
            "cpu": (limits.cpus, limits.cpus) if limits.cpus is not None else None,
            "memory": (_mebibytes(limits.memory),) * 2 if limits.memory is not None else None,
            "gpu": self._options.gpu,
            "region": self._options.region,
        }

    def _network(self, spec: SandboxSpec) -> dict[str, Any]:
        if spec.network is NetworkPolicy.NONE:
            return {"block_network": True}
        if spec.network is NetworkPolicy.FULL:
            return {}
        ranges, domains = split_hosts(spec.network_allow, "Modal")
        return {"outbound_cidr_allowlist": ranges, "outbound_domain_allowlist": domains}

    async def _image(self, service: Service, spec: SandboxSpec) -> modal.Image:
        import modal

        image = spec.snapshot or await self._built(service, spec.environment)
        return modal.Image.from_id(image, client=service.client)

    async def _built(self, service: Service, environment: EnvironmentSpec) -> str:
        """The id of the environment's image. Modal builds one definition once; one request at a time asks it to."""
        key = repr((environment.dockerfile, environment.image if environment.dockerfile is None else None))
        building = self._images.get(key)
        if building is None or (building.done() and (building.cancelled() or building.exception() is not None)):
            definition = self._definition(environment)
            building = _observed(asyncio.create_task(service.image(definition, environment.build_timeout)))
            self._images[key] = building
        return await asyncio.shield(building)

    def _definition(self, environment: EnvironmentSpec) -> modal.Image:
        import modal

        if environment.dockerfile is not None:
            return modal.Image.from_dockerfile(
                environment.dockerfile,
                context_dir=environment.dockerfile.parent,
                build_args=dict(self._options.build_args),
            )
        tag = environment.image or self._options.image
        return modal.Image.from_registry(tag) if tag else modal.Image.debian_slim(_PYTHON)

    async def _fill(self, sandbox: Sandbox, environment: EnvironmentSpec) -> None:
        workspace = environment.directory / "workspace" if environment.directory else None
        if workspace is not None and workspace.is_dir():
            try:
                await sandbox.upload(workspace, environment.workdir)
            except UnsafeFiles as error:  # nobody's doing: no agent has been here yet
                raise SandboxError(f"{workspace} cannot be copied into the sandbox: {error.message}") from None

    async def _dispose(self, service: Service, making: asyncio.Task[modal.Sandbox], name: str) -> None:
        """End a sandbox that nobody waits for any more, once it is there."""
        try:
            await making
        except SandboxError:
            pass
        await service.discard(name)

    def _do_later(self, operation: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
        """In the background, and awaited by :meth:`close`."""
        task = asyncio.create_task(operation)
        self._later.add(task)
        task.add_done_callback(self._later.discard)
        return task

    # --------------------------------------------------------------------------------------------------- finding

    async def list(self, labels: Mapping[str, str] | None = None) -> builtins.list[SandboxInfo]:
        return [info for info, _ in await self._found(labels)]

    async def _found(self, labels: Mapping[str, str] | None) -> builtins.list[tuple[SandboxInfo, modal.Sandbox]]:
        import modal

        service = await self._service()
        wanted = tags.encode({_LABEL + name: value for name, value in (labels or {}).items()})

        async def handles() -> builtins.list[modal.Sandbox]:
            listing = modal.Sandbox.list.aio(app_id=service.app.app_id, tags=wanted, client=service.client)
            return [handle async for handle in listing]

        found = await service.call("list the sandboxes", handles)
        at_once = asyncio.Semaphore(_AT_ONCE)

        async def look(handle: modal.Sandbox) -> tuple[SandboxInfo, modal.Sandbox] | None:
            from rl_harness_modal.service import Gone

            async with at_once:
                try:
                    known = await service.call("read a sandbox's tags", handle.get_tags.aio)
                except Gone:
                    return None
            info = _info(handle.object_id, tags.decode(known))
            return (info, handle) if info is not None else None

        return [item for item in await asyncio.gather(*map(look, found)) if item is not None]

    async def reap(self, labels: Mapping[str, str] | None = None, *, force: bool = False) -> int:
        dead = [
            self._sandboxes.get(info.id) or self._sandbox(await self._service(), handle, "/", None)
            for info, handle in await self._found(labels)
            if force or info.owner_alive is False
        ]
        for outcome in await asyncio.gather(*(sandbox.close() for sandbox in dead), return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
        return len(dead)

    async def connect(self, sandbox: str) -> Sandbox:
        import modal

        service = await self._service()
        if sandbox in self._sandboxes:
            return self._sandboxes[sandbox]
        handle = await service.call(
            f"find sandbox {sandbox}", lambda: modal.Sandbox.from_id.aio(sandbox, client=service.client)
        )
        fields = tags.decode(await service.call(f"read the tags of sandbox {sandbox}", handle.get_tags.aio))
        found = self._sandbox(service, handle, fields.get(_WORKDIR, "/"), None)
        if not await found.alive():
            self._sandboxes.pop(sandbox, None)
            raise SandboxError(f"sandbox {sandbox} has ended")
        await found.prepare()
        return found

    # ------------------------------------------------------------------------------------------------- snapshots

    async def fingerprint(self, spec: SandboxSpec) -> Mapping[str, str]:
        """The id of the image on Modal: one id is one content, whatever became of the tag it was built from."""
        self._arguments(spec)
        return {"image": await self._built(await self._service(), spec.environment)}

    async def snapshots(self, labels: Mapping[str, str] | None = None) -> builtins.list[SnapshotInfo]:
        from rl_harness_modal.service import Gone

        service = await self._service()
        at_once = asyncio.Semaphore(_AT_ONCE)

        async def there(info: SnapshotInfo) -> bool:
            async with at_once:
                try:
                    await service.find_image(info.id)
                except Gone:
                    self._index.remove(info.id)  # Modal dropped it at the end of its time
                    return False
            return True

        known = self._index.find(labels or {})
        kept = await asyncio.gather(*map(there, known))
        return [info for info, is_there in zip(known, kept, strict=True) if is_there]

    async def delete_snapshot(self, snapshot: str) -> None:
        if IMAGE.fullmatch(snapshot):
            await (await self._service()).delete_image(snapshot)
            self._index.remove(snapshot)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for image in self._images.values():
            image.cancel()
        # What is left to do in the background may wait for a sandbox's end, or make one that has to end.
        closing = [asyncio.create_task(sandbox.close()) for sandbox in builtins.list(self._sandboxes.values())]
        while self._later:
            await asyncio.wait(self._later)
        closing += [asyncio.create_task(sandbox.close()) for sandbox in builtins.list(self._sandboxes.values())]
        outcomes = await asyncio.gather(*closing, return_exceptions=True)
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait({self._opening})
            if not self._opening.cancelled() and self._opening.exception() is None:
                await self._opening.result().close()
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome


def _observed(task: asyncio.Task[T]) -> asyncio.Task[T]:
    """A task whose failure nobody has to wait for: whoever needs the result meets it."""
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


def _state_home() -> Path:
    home = Path(os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser())
    return home / "rl-harness" / "modal-snapshots"


def _mebibytes(size: int) -> int:
    return max(1, math.ceil(size / _MIB))


def _info(sandbox: str, fields: Mapping[str, str]) -> SandboxInfo | None:
    """What the tags say of a sandbox; None if they are not ours."""
    if _OWNER not in fields:
        return None
    try:
        created = float(fields.get(_CREATED, ""))
    except ValueError:
        created = 0.0
    labels = {name.removeprefix(_LABEL): value for name, value in fields.items() if name.startswith(_LABEL)}
    return SandboxInfo(
        id=sandbox,
        provider="modal",
        labels=labels,
        created_at=created,
        owner_alive=owner_alive(fields[_OWNER]),
        snapshot=fields.get(_SNAPSHOT),
    )
