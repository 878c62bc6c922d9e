"""The ``docker`` provider: what the engine can do, creating, forking, listing, reaping."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from pydantic import BaseModel
from rl_harness.contracts.sandbox import (
    BuildInfo,
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
from rl_harness.errors import SandboxError, TaskError, Unavailable, UnsafeFiles, Unsupported
from rl_harness.sandboxes.remote import owner_alive, owner_label

from rl_harness_docker import containers
from rl_harness_docker.builds import Builds
from rl_harness_docker.compose import MAIN, Project, Service, read_compose
from rl_harness_docker.dockerfile import base_images, check_image
from rl_harness_docker.engine import OLDEST_API, Engine, EngineError, api_version
from rl_harness_docker.images import Images, context_of, ignored
from rl_harness_docker.networks import Networks
from rl_harness_docker.options import DockerOptions
from rl_harness_docker.sandbox import DockerSandbox, remove_container, remove_or_warn
from rl_harness_docker.services import Services, reap_parts
from rl_harness_docker.snapshots import REPOSITORY, Snapshots
from rl_harness_docker.watch import Watch

_log = logging.getLogger(__name__)

#: No byte code is written, because what an agent's runs leave beside the system's modules would look like tampering.
_BASE_ENV = {"PYTHONDONTWRITEBYTECODE": "1"}

#: How long tidying up images may take: while the engine is stuck with any container, whoever's, it removes no image.
_SWEEP = 5.0

#: How long the first command of all in an image may take, in seconds.
_FIRST_COMMAND = 60.0

#: Drivers whose engine may know how to bound what a container writes.
_BOUNDED = ("btrfs", "zfs", "devicemapper")


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
        self._sandboxes: dict[str, DockerSandbox] = {}
        self._engine = Engine(options.host)
        self._watch = Watch(self._engine, f"{containers.OWNER}={self._owner}")
        self._images = Images(self._engine, options, self._owner)
        self._builds = Builds(self._engine)
        self._networks = Networks(self._engine, self._owner)
        self._snapshots = Snapshots(self._engine, self._owner)
        self._proven: set[tuple[str, str]] = set()
        self._sandboxes_made = 0
        self._closed = False

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
            compose=True,
            builds=True,
            slow_exec=True,
            network=frozenset({NetworkPolicy.NONE, NetworkPolicy.FULL}),
            limits=frozenset({"memory", "pids", "cpus"} | ({"disk"} if self._disk else set())),
        )

    # -------------------------------------------------------------------------------------------------- beforehand

    async def preflight(self) -> None:
        engine = self._engine
        try:
            version = await engine.request("GET", "/version", versioned=False)
            _check_version(engine.address, version)
            info = await engine.request("GET", "/info")
        except EngineError as error:
            raise Unavailable(error.message, remedy=error.remedy) from None
        _check_podman(engine.address, version)
        if info.get("OSType") != "linux":
            raise Unavailable(f"the engine at {engine.address} runs {info.get('OSType')} containers, not linux")
        runtime = self._options.runtime
        if runtime is not None and runtime not in info.get("Runtimes", {}):
            known = ", ".join(sorted(info.get("Runtimes", {})))
            raise Unavailable(f"sandbox.runtime: the engine has no runtime {runtime!r}; it has {known}")
        below = dict(info.get("DriverStatus") or ()).get("Backing Filesystem")
        bounded = info.get("Driver") in _BOUNDED or (info.get("Driver") == "overlay2" and below == "xfs")
        self._disk = bounded and await self._limits_disk()

    async def _limits_disk(self) -> bool:
        """Whether the engine bounds what a container writes, which depends on the file system below it: tried with an
        image it has, for want of a way to ask."""
        images = await self._engine.request("GET", "/images/json")
        if not images:
            return False
        body = {"Image": images[0]["Id"], "Cmd": ["true"], "HostConfig": {"StorageOpt": {"size": str(1 << 30)}}}
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
        if spec.network not in capabilities.network or spec.network_allow:
            raise Unsupported(
                f"the docker sandbox does not offer the network policy {spec.network.value}",
                remedy="write network_mode = 'no-network' or 'public' in the task",
            )
        for name in ("memory", "pids", "cpus", "disk"):
            if getattr(spec.limits, name) is not None and name not in capabilities.limits:
                raise Unsupported(
                    f"the engine at {self._engine.address} cannot limit {name}",
                    remedy="an engine whose data lies on xfs mounted with pquota can" if name == "disk" else None,
                )
        if not spec.environment.workdir.startswith("/"):
            raise Unsupported(f"workdir {spec.environment.workdir!r} is not absolute")
        if spec.mounts:
            raise Unsupported("the docker sandbox shows no directories of this machine")

    async def check(self, spec: SandboxSpec) -> None:
        self._refuse(spec)
        await asyncio.to_thread(self._check_files, spec.environment)

    def _check_files(self, environment: EnvironmentSpec) -> None:
        project = _project(environment)
        for service in project.services if project is not None else (Service(name=MAIN),):
            dockerfile, arguments = self._dockerfile(service, environment)
            if dockerfile is not None:
                base_images(dockerfile, arguments)
                ignored(service.build.context if service.build else context_of(dockerfile, environment))
            elif service.image is not None:
                check_image(service.image, f"{environment.compose}: services.{service.name}.image")
            else:
                check_image(environment.image or self._options.image, "the environment's image")

    async def fingerprint(self, spec: SandboxSpec) -> Mapping[str, str]:
        environment = spec.environment
        found = {"platform": self._options.platform or "", "user": self._options.user or ""}
        found |= {f"build argument {name}": value for name, value in self._options.build_args.items()}
        project = _project(environment)
        for service in project.services if project is not None else (Service(name=MAIN),):
            made_of = await self._made_of(service, environment)
            found |= {f"{service.name}: {name}": content for name, content in made_of.items()}
        return found

    async def _made_of(self, service: Service, environment: EnvironmentSpec) -> Mapping[str, str]:
        """The images that a service's own is, or is built from, by their names: what they hold, not what they are
        called."""
        dockerfile, arguments = self._dockerfile(service, environment)
        if dockerfile is not None:
            return await self._images.bases(dockerfile, arguments)
        name = service.image or environment.image or self._options.image
        return {name: (await self._images.found(name))["Id"]}

    def _dockerfile(self, service: Service, environment: EnvironmentSpec) -> tuple[Path | None, Mapping[str, str]]:
        """What a service's image is built from, if it is, and with which arguments."""
        if service.build is not None:
            return service.build.dockerfile, service.build.args
        own = service.name != MAIN or service.image is not None
        return None if own else environment.dockerfile, self._options.build_args

    # ---------------------------------------------------------------------------------------------------- creating

    async def create(self, spec: SandboxSpec) -> Sandbox:
        self._refuse(spec)
        try:
            return await self._undisturbed(spec)
        except EngineError as error:
            if error.status != 404:
                raise
        # An image or network that was there has been removed by somebody else meanwhile.
        self._images.forget()
        self._networks.forget()
        return await self._undisturbed(spec)

    async def _undisturbed(self, spec: SandboxSpec) -> DockerSandbox:
        """Create, and when that is cancelled, wait until what the engine has begun can be undone."""
        project = _project(spec.environment)
        images = await self._images_of(spec, project)
        task = asyncio.ensure_future(self._create(spec, project, images))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                await (await task).close()
            raise

    async def _images_of(self, spec: SandboxSpec, project: Project | None) -> dict[str, dict[str, Any]]:
        """By service, the agent's as ``main``."""
        if spec.snapshot is not None:
            return await self._snapshots.images(spec.snapshot)
        environment, timeout = spec.environment, spec.environment.build_timeout
        images = {}
        for service in project.services if project is not None else ():
            if service.build is not None:
                build = service.build
                images[service.name] = await self._images.built(
                    build.context, build.dockerfile, build.args, timeout, build.target
                )
            elif service.image is not None:
                images[service.name] = await self._images.found(service.image)
        if MAIN not in images:
            images[MAIN] = await self._images.ready(environment)
        return images

    async def _create(
        self, spec: SandboxSpec, project: Project | None, images: Mapping[str, Mapping[str, Any]]
    ) -> DockerSandbox:
        name = containers.new_name()
        main = project.main if project is not None else Service(name=MAIN)
        services = None
        if project is not None:
            services = Services(self._engine, self._options, self._owner, name, project, spec.labels)
        await self._networks.ready(spec.network)
        sandbox: DockerSandbox | None = None
        try:
            if services is not None:
                await services.make_networks(spec.network)
            container = await self._create_container(name, spec, main, images[MAIN]["Id"], services)
            sandbox = self._sandbox(name, container, spec, main, images[MAIN], services)
            await self._networks.attach(container, spec.network)
            if services is not None:
                await services.join_others(container, main)
                await services.start(images, spec.environment.build_timeout)
            await sandbox.started()
            if spec.snapshot is None and (images[MAIN]["Id"], sandbox.user) not in self._proven:
                await self._prove(sandbox, images[MAIN]["Id"], _origin(spec.environment, main, self._options))
            await sandbox.make_workdir()
            if spec.snapshot is None:
                await self._fill(sandbox, spec.environment)
        except BaseException:
            if sandbox is not None:
                await sandbox.close()
            elif services is not None:
                await services.close()
            raise
        return sandbox

    async def _create_container(
        self, name: str, spec: SandboxSpec, main: Service, image: str, services: Services | None
    ) -> str:
        labels = containers.labels("sandbox", self._owner, spec.labels)
        if spec.snapshot is not None:
            labels[containers.SNAPSHOT_OF] = spec.snapshot
        body = containers.main_container(spec, image, self._options, labels)
        if services is not None:
            body["NetworkingConfig"] = services.first_network(main)
            body["HostConfig"]["NetworkMode"] = services.network(main.networks[0])
            body["Hostname"] = main.hostname or main.name
        params: dict[str, str | int | bool] = {"name": name}
        if self._options.platform:
            params["platform"] = self._options.platform
        made = await self._engine.request("POST", "/containers/create", params=params, body=body)
        return str(made["Id"])

    def _sandbox(
        self,
        name: str,
        container: str,
        spec: SandboxSpec,
        main: Service,
        image: Mapping[str, Any],
        services: Services | None,
    ) -> DockerSandbox:
        async def remove() -> None:
            if services is not None:
                await services.close()
            self._sandboxes.pop(name, None)
            if spec.snapshot is not None and spec.snapshot.startswith(f"{REPOSITORY['fork']}:"):
                await self._snapshots.remove(spec.snapshot, unused=True)

        def parts() -> dict[str, str]:
            return {MAIN: container, **(services.containers if services is not None else {})}

        async def snapshot(key: str, labels: Mapping[str, str]) -> str:
            return await self._snapshots.commit(parts(), "snapshot", key=key, labels=labels)

        async def fork(count: int) -> builtins.list[Sandbox]:
            return await self._fork(await self._snapshots.commit(parts(), "fork"), count, spec)

        whole = self.capabilities.fork
        env = {**_BASE_ENV, **main.environment, **spec.environment.env}
        sandbox = DockerSandbox(
            name,
            container,
            self._engine,
            self._watch,
            workdir=spec.environment.workdir,
            env=env if services is None else {**env, **services.bypass(env)},
            user=self._options.user or main.user or image["Config"].get("User") or "0",
            lifetime=spec.lifetime,
            writable=containers.writable(spec) if self._options.read_only else (),
            remove=remove,
            snapshot=snapshot if whole else None,
            fork=fork if whole else None,
        )
        self._sandboxes[name] = sandbox
        self._sandboxes_made += 1
        return sandbox

    async def _prove(self, sandbox: DockerSandbox, image: str, origin: str) -> None:
        """Run a command in the first sandbox of an image, whose author is to blame when none runs: later, in a sandbox
        that an agent has been in, it would be the agent."""
        try:
            result = await sandbox.exec("exit 0", cwd="/", timeout=_FIRST_COMMAND)
        except UnsafeFiles:
            result = None
        if result is not None and result.ok:
            self._proven.add((image, sandbox.user))
            return
        state = (await self._engine.request("GET", f"/containers/{sandbox.container}/json"))["State"]
        if result is None or not state["Running"]:
            reason = "its containers end as soon as they are started"
        elif result.timed_out:
            reason = f"the first one did not end within {_FIRST_COMMAND:g} s"
        else:
            said = (result.stderr or result.stdout).decode("utf-8", "replace").strip()[-500:]
            reason = f"as user {sandbox.user}: {said or f'exit code {result.exit_code}'}"
        raise SandboxError(
            f"{origin}: no command runs in this image: {reason}",
            remedy="an image needs /bin/sh, the architecture of the engine's machine, and the user it names",
        )

    async def _fill(self, sandbox: DockerSandbox, environment: EnvironmentSpec) -> None:
        workspace = environment.directory / "workspace" if environment.directory else None
        if workspace is not None and workspace.is_dir():
            try:
                await sandbox.upload(workspace, environment.workdir)
            except UnsafeFiles as error:  # nobody's doing: no agent has been here yet
                raise SandboxError(f"{workspace} cannot be copied into the sandbox: {error.message}") from None

    async def _fork(self, image: str, count: int, spec: SandboxSpec) -> builtins.list[Sandbox]:
        """The image goes with the last of them."""
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
            await self._snapshots.remove(image)
            raise

    # ------------------------------------------------------------------------------------------- listing, reaping

    async def snapshots(self, labels: Mapping[str, str] | None = None) -> builtins.list[SnapshotInfo]:
        return await self._snapshots.list(labels)

    async def delete_snapshot(self, snapshot: str) -> None:
        await self._snapshots.remove(snapshot)

    async def builds(self) -> builtins.list[BuildInfo]:
        return await self._builds.list()

    async def delete_build(self, build: str) -> bool:
        return await self._builds.remove(build)

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
            for found in await self._listed(labels)
        ]

    async def _listed(self, labels: Mapping[str, str] | None) -> Sequence[dict[str, Any]]:
        filters = json.dumps({"label": [f"{containers.KIND}=sandbox"]})
        found = await self._engine.request("GET", "/containers/json", params={"filters": filters, "all": 1})
        wanted = (labels or {}).items()
        return [each for each in found if wanted <= containers.given_labels(each["Labels"]).items()]

    async def reap(self, labels: Mapping[str, str] | None = None, *, force: bool = False) -> int:
        wanted = (labels or {}).items()

        def dead(found: Mapping[str, str]) -> bool:
            return owner_alive(found.get(containers.OWNER, "")) is False

        def doomed(found: Mapping[str, str]) -> bool:
            return (force or dead(found)) and wanted <= containers.given_labels(found).items()

        doomed_sandboxes = [found for found in await self._listed(labels) if doomed(found["Labels"])]
        removed = await asyncio.gather(
            *(remove_or_warn(self._engine, found["Id"], found["Names"][0].lstrip("/")) for found in doomed_sandboxes)
        )
        await reap_parts(self._engine, doomed)
        try:
            async with asyncio.timeout(_SWEEP):
                await self._snapshots.reap(dead)
        except TimeoutError:
            _log.warning(
                "the engine did not remove what is left of forks within %g s: the next run goes on, or "
                "rl-harness sandbox prune",
                _SWEEP,
            )
        return sum(removed)

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*(sandbox.close() for sandbox in builtins.list(self._sandboxes.values())))
        if self._sandboxes_made:
            with contextlib.suppress(TimeoutError):  # left to the reaper
                async with asyncio.timeout(_SWEEP):
                    await self._snapshots.sweep()
        await self._watch.close()
        await self._networks.close()
        await self._engine.close()


def _origin(environment: EnvironmentSpec, main: Service, options: DockerOptions) -> str:
    """What the agent's image is known by: the file it is built from, or its name."""
    if main.build is not None:
        return str(main.build.dockerfile)
    if main.image is None and environment.dockerfile is not None:
        return str(environment.dockerfile)
    return f"image {main.image or environment.image or options.image}"


def _project(environment: EnvironmentSpec) -> Project | None:
    if environment.compose is None:
        return None
    project = read_compose(environment.compose)
    workdir = project.main.working_dir
    if workdir is not None and workdir != environment.workdir:
        raise TaskError(
            f"{environment.compose}: services.main.working_dir: is {workdir}, and the task's is {environment.workdir}",
            remedy="write it as [environment] workdir in task.toml",
        )
    return project


def _check_podman(address: str, version: Mapping[str, Any]) -> None:
    """Podman 4.3.1 was tried: a container of its starts with its standard input at an end, whoever attached to it
    before, which to our init means that the owner is gone."""
    for part in version.get("Components") or ():
        if "podman" in str(part.get("Name", "")).lower():
            number = str(part.get("Version", ""))
            if number.split(".")[0] in ("2", "3", "4"):
                raise Unavailable(
                    f"the engine at {address} is Podman {number}, whose containers start without the standard input by "
                    "which ours tell that their owner is alive",
                    remedy="use Docker's engine: DOCKER_HOST, or -o sandbox.host=ADDRESS",
                )
            _log.warning("the engine at %s is Podman %s, with which this sandbox is not tested", address, number)


def _check_version(address: str, version: Mapping[str, Any]) -> None:
    spoken = version.get("ApiVersion")
    if api_version(spoken) < OLDEST_API:
        raise Unavailable(
            f"the engine at {address} speaks API {spoken}; {OLDEST_API[0]}.{OLDEST_API[1]} (Docker 20.10) is the "
            "oldest that will do",
            remedy="install a newer Docker engine",
        )
