"""The ``docker`` provider: what the engine can do, creating, listing, snapshots, reaping."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec
from pydantic import BaseModel
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

from rl_harness_docker import containers
from rl_harness_docker.engine import OLDEST_API, Engine, EngineError, find_address
from rl_harness_docker.images import Images
from rl_harness_docker.networks import Networks
from rl_harness_docker.options import DockerOptions
from rl_harness_docker.sandbox import DockerSandbox, remove_container
from rl_harness_docker.watch import Watch

SNAPSHOTS, FORKS = "rl-harness-snapshot", "rl-harness-fork"


class DockerProvider(SandboxProvider):
    """Containers of one engine."""

    api: ClassVar[int] = 1
    Options = DockerOptions
    argument: ClassVar[str | None] = "image"

    def __init__(self, options: BaseModel) -> None:
        super().__init__(options)
        assert isinstance(options, DockerOptions)
        self._options = options
        self._owner = owner_label()
        self._disk = False
        self._engine_: Engine | None = None
        self._sandboxes: dict[str, DockerSandbox] = {}
        self._closed = False

    @property
    def _engine(self) -> Engine:
        if self._engine_ is None:
            engine = self._engine_ = Engine(find_address(self._options.host))
            self._watch = Watch(engine, f"{containers.OWNER}={self._owner}")
            self._images = Images(engine, self._options, self._owner)
            self._networks = Networks(engine, self._owner)
        return self._engine_

    @property
    def capabilities(self) -> SandboxCapabilities:
        whole = not self._options.read_only  # what lies on volumes is in no snapshot and no list of changes
        return SandboxCapabilities(
            snapshot=SnapshotLevel.FILESYSTEM if whole else SnapshotLevel.NONE,
            fork=whole,
            pause=True,
            changes=whole,
            users=True,
            dockerfile=True,
            image=True,
            slow_exec=True,
            network=frozenset({NetworkPolicy.NONE, NetworkPolicy.FULL}),
            limits=frozenset({"memory", "pids", "cpus"} | ({"disk"} if self._disk else set())),
        )

    # -------------------------------------------------------------------------------------------------- beforehand

    async def preflight(self) -> None:
        engine = self._engine
        try:
            version = await engine.request("GET", "/version")
            info = await engine.request("GET", "/info")
        except EngineError as error:
            raise Unavailable(error.message, remedy=error.remedy) from None
        api = tuple(int(part) for part in version["ApiVersion"].split("."))
        if api < OLDEST_API:
            raise Unavailable(
                f"the engine at {engine.address} speaks API {version['ApiVersion']}; {OLDEST_API[0]}.{OLDEST_API[1]} "
                "(Docker 20.10) is the oldest that will do",
                remedy="install a newer Docker engine",
            )
        if info.get("OSType") != "linux":
            raise Unavailable(f"the engine at {engine.address} runs {info.get('OSType')} containers, not linux")
        self._disk = await self._limits_disk(info)
        await self._images.found(self._options.image)

    async def _limits_disk(self, info: Mapping[str, Any]) -> bool:
        """Whether the engine can bound a container's disk, which depends on its file system; tried, not guessed."""
        if info.get("Driver") not in ("overlay2", "btrfs", "zfs", "devicemapper"):
            return False
        image = await self._images.found(self._options.image)
        body = {"Image": image["Id"], "Cmd": ["true"], "HostConfig": {"StorageOpt": {"size": str(1 << 30)}}}
        try:
            made = await self._engine.request("POST", "/containers/create", body=body)
        except EngineError:
            return False
        await remove_container(self._engine, made["Id"])
        return True

    def _refuse(self, spec: SandboxSpec) -> None:
        if self._closed:
            raise SandboxError("the sandbox provider is closed")
        capabilities = self.capabilities
        if spec.environment.compose is not None:
            raise Unsupported(f"{spec.environment.compose}: this version starts no compose files")
        if spec.network not in capabilities.network or spec.network_allow:
            raise Unsupported(
                f"the docker sandbox does not offer the network policy {spec.network.value}",
                remedy="write network_mode = 'no-network' or 'public' in the task",
            )
        for name in ("memory", "pids", "cpus", "disk"):
            if getattr(spec.limits, name) is not None and name not in capabilities.limits:
                raise Unsupported(
                    f"the docker engine cannot limit {name} here",
                    remedy="an engine whose data lies on xfs mounted with pquota can" if name == "disk" else None,
                )
        if not spec.environment.workdir.startswith("/"):
            raise Unsupported(f"workdir {spec.environment.workdir!r} is not absolute")

    async def fingerprint(self, environment: EnvironmentSpec) -> Mapping[str, str]:
        found = {"platform": self._options.platform or ""}
        engine = self._engine
        del engine
        if environment.dockerfile is not None:
            bases = await self._images.bases(environment.dockerfile, self._options.build_args)
            found |= {f"base {name}": digest for name, digest in bases.items()}
            found |= {f"build argument {name}": value for name, value in self._options.build_args.items()}
        else:
            found["image"] = (await self._images.ready(environment))["Id"]
        if self._options.user:
            found["user"] = self._options.user
        return found

    # ---------------------------------------------------------------------------------------------------- creating

    async def create(self, spec: SandboxSpec) -> Sandbox:
        self._refuse(spec)
        return await self._undisturbed(spec)

    async def _undisturbed(self, spec: SandboxSpec) -> DockerSandbox:
        """Create, and when that is cancelled, wait until what the engine has begun can be undone."""
        task = asyncio.ensure_future(self._create(spec))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            with contextlib.suppress(BaseException):
                await (await task).close()
            raise

    async def _create(self, spec: SandboxSpec) -> DockerSandbox:
        engine = self._engine
        image = await self._image(spec)
        await self._networks.ready(spec.network)
        name = f"rl-harness-{secrets.token_hex(8)}"
        labels = containers.labels("sandbox", self._owner, spec.labels)
        if spec.snapshot is not None:
            labels[containers.SNAPSHOT_OF] = spec.snapshot
        body = containers.main_container(spec, image["Id"], self._options, labels)
        params: dict[str, str | int | bool] = {"name": name}
        if self._options.platform:
            params["platform"] = self._options.platform
        try:
            made = await engine.request("POST", "/containers/create", params=params, body=body)
        except EngineError as error:
            if error.status == 404:
                self._images.forget()
            raise
        sandbox = DockerSandbox(
            name,
            made["Id"],
            engine,
            self._watch,
            workdir=spec.environment.workdir,
            env=spec.environment.env,
            user=self._options.user or image["Config"].get("User") or "0",
            lifetime=spec.lifetime,
            writable=containers.writable(spec) if self._options.read_only else (),
            remove=lambda: self._forget(name, spec),
            snapshot=self._snapshot if self.capabilities.fork else None,
            fork=(lambda sandbox, count: self._fork(sandbox, count, spec)) if self.capabilities.fork else None,
        )
        self._sandboxes[name] = sandbox
        try:
            await self._networks.attach(made["Id"], spec.network)
            await sandbox.started()
            if spec.snapshot is None:
                await self._fill(sandbox, spec.environment)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def _image(self, spec: SandboxSpec) -> dict[str, Any]:
        self._engine  # noqa: B018 -- made at its first use
        if spec.snapshot is None:
            return await self._images.ready(spec.environment)
        try:
            return dict(await self._engine.request("GET", f"/images/{spec.snapshot}/json"))
        except EngineError as error:
            if error.status == 404:
                raise SandboxError(f"snapshot {spec.snapshot} is no longer there") from None
            raise

    async def _fill(self, sandbox: DockerSandbox, environment: EnvironmentSpec) -> None:
        workspace = environment.directory / "workspace" if environment.directory else None
        if workspace is not None and workspace.is_dir():
            try:
                await sandbox.upload(workspace, environment.workdir)
            except UnsafeFiles as error:  # nobody's doing: no agent has been here yet
                raise SandboxError(f"{workspace} cannot be copied into the sandbox: {error.message}") from None

    async def _forget(self, name: str, spec: SandboxSpec) -> None:
        self._sandboxes.pop(name, None)
        if spec.snapshot is not None and spec.snapshot.startswith(f"{FORKS}:"):
            await self._remove_image(spec.snapshot)

    # --------------------------------------------------------------------------------------------------- snapshots

    async def _snapshot(self, sandbox: DockerSandbox, key: str, labels: Mapping[str, str]) -> str:
        return await self._commit(sandbox, SNAPSHOTS, key, labels)

    async def _commit(self, sandbox: DockerSandbox, repository: str, key: str, labels: Mapping[str, str]) -> str:
        await self._refuse_volumes(sandbox)
        tag = secrets.token_hex(12)
        kind = "snapshot" if repository == SNAPSHOTS else "fork"
        body = {"Labels": {**containers.labels(kind, self._owner, labels), containers.KEY: key}}
        params = {"container": sandbox.container, "repo": repository, "tag": tag}
        task = asyncio.ensure_future(self._engine.request("POST", "/commit", params=params, body=body, timeout=None))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            with contextlib.suppress(BaseException):
                await task
                await self._remove_image(f"{repository}:{tag}")
            raise
        return f"{repository}:{tag}"

    async def _refuse_volumes(self, sandbox: DockerSandbox) -> None:
        state = await self._engine.request("GET", f"/containers/{sandbox.container}/json")
        volumes = sorted(state["Config"].get("Volumes") or {})
        if volumes:
            raise Unsupported(
                f"the image keeps {', '.join(volumes)} on volumes, which no snapshot holds",
                remedy="remove VOLUME from its Dockerfile",
            )

    async def _fork(self, sandbox: DockerSandbox, count: int, spec: SandboxSpec) -> builtins.list[Sandbox]:
        image = await self._commit(sandbox, FORKS, "", {})
        each = msgspec.structs.replace(spec, snapshot=image)
        tasks = [asyncio.ensure_future(self._undisturbed(each)) for _ in range(count)]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, DockerSandbox):
                    await result.close()
            await self._remove_image(image)
            raise

    async def snapshots(self, labels: Mapping[str, str] | None = None) -> builtins.list[SnapshotInfo]:
        found = []
        for image in await self._labelled("/images/json", "snapshot"):
            name = next((tag for tag in image.get("RepoTags") or () if tag.startswith(f"{SNAPSHOTS}:")), None)
            given = containers.given_labels(image["Labels"])
            if name is None or not (labels or {}).items() <= given.items():
                continue
            history = await self._engine.request("GET", f"/images/{name}/history")
            found.append(
                SnapshotInfo(
                    id=name,
                    provider="docker",
                    key=image["Labels"].get(containers.KEY, ""),
                    labels=given,
                    created_at=float(image["Created"]),
                    size=history[0]["Size"] if history else None,
                )
            )
        return found

    async def delete_snapshot(self, snapshot: str) -> None:
        if not snapshot.startswith(f"{SNAPSHOTS}:"):
            raise SandboxError(f"{snapshot} is no snapshot of the docker sandbox")
        await self._remove_image(snapshot)

    async def _remove_image(self, name: str) -> None:
        """Remove a tag and, once no container or other image needs it, what it names."""
        try:
            await self._engine.request("DELETE", f"/images/{name}", params={"force": 1})
        except EngineError as error:
            if error.status not in (404, 409):
                raise

    # ------------------------------------------------------------------------------------------- listing, reaping

    async def list(self, labels: Mapping[str, str] | None = None) -> builtins.list[SandboxInfo]:
        return [
            SandboxInfo(
                id=found["Names"][0].lstrip("/") if found.get("Names") else found["Id"],
                provider="docker",
                labels=containers.given_labels(found["Labels"]),
                created_at=float(found["Created"]),
                owner_alive=owner_alive(found["Labels"].get(containers.OWNER, "")),
                snapshot=found["Labels"].get(containers.SNAPSHOT_OF),
            )
            for found in await self._containers("sandbox", labels)
        ]

    async def _containers(self, kind: str, labels: Mapping[str, str] | None) -> Sequence[dict[str, Any]]:
        wanted = (labels or {}).items()
        found = await self._labelled("/containers/json", kind, all=1)
        return [each for each in found if wanted <= containers.given_labels(each["Labels"]).items()]

    async def _labelled(self, path: str, kind: str, **more: int) -> Sequence[dict[str, Any]]:
        filters = json.dumps({"label": [f"{containers.KIND}={kind}"]})
        return list(await self._engine.request("GET", path, params={"filters": filters, **more}) or ())

    async def reap(self, labels: Mapping[str, str] | None = None, *, force: bool = False) -> int:
        count = 0
        for found in await self._containers("sandbox", labels):
            if force or owner_alive(found["Labels"].get(containers.OWNER, "")) is False:
                await remove_container(self._engine, found["Id"])
                count += 1
        for image in await self._labelled("/images/json", "fork"):
            if owner_alive(image["Labels"].get(containers.OWNER, "")) is False:
                for tag in image.get("RepoTags") or ():
                    await self._remove_image(tag)
        return count

    async def close(self) -> None:
        self._closed = True
        if self._engine_ is None:
            return
        await asyncio.gather(*(sandbox.close() for sandbox in builtins.list(self._sandboxes.values())))
        await self._watch.close()
        await self._networks.close()
        await self._engine_.close()
