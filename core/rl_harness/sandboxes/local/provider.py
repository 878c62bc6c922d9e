"""The ``local`` provider: what it can enforce here, creating, listing and reaping sandboxes."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import errno
import os
import re
import secrets
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import msgspec
from pydantic import BaseModel, ByteSize, Field

from rl_harness.contracts.common import Options as BaseOptions
from rl_harness.contracts.sandbox import (
    EnvironmentSpec,
    Limits,
    NetworkPolicy,
    Sandbox,
    SandboxCapabilities,
    SandboxInfo,
    SandboxProvider,
    SandboxSpec,
    SnapshotInfo,
    SnapshotLevel,
)
from rl_harness.errors import SandboxError, Unavailable, UnsafeFiles, Unsupported, WrongValue
from rl_harness.private import private_folder
from rl_harness.sandboxes.flights import finished
from rl_harness.sandboxes.local import cgroups, seccomp, snapshots, storage
from rl_harness.sandboxes.local.channel import Channel, StartFailed
from rl_harness.sandboxes.local.diagnosis import OTHER_SANDBOX, STATE_DIR, remedy
from rl_harness.sandboxes.local.fingerprint import fingerprint
from rl_harness.sandboxes.local.helper import Helper
from rl_harness.sandboxes.local.limits import Plan, enforceable, plan
from rl_harness.sandboxes.local.sandbox import LocalSandbox
from rl_harness.sandboxes.remote import owner_alive, owner_label
from rl_harness.shortages import shortage

OLDEST_KERNEL = (5, 14)
# Starting or ending more at once is not quicker, and would keep the event loop from its other work.
_AT_ONCE = 16
# A snapshot is on the disk this much later at most; until then only a crash of the machine takes it away.
_SYNC_SECONDS = 10.0
# How long closing waits for threads that are still at somebody's files.
_THREADS_SECONDS = 60.0

# No byte code is written, because what the agent's runs leave beside the system's modules would look like tampering.
BASE_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "PYTHONDONTWRITEBYTECODE": "1",
}

T = TypeVar("T")


class LocalOptions(BaseOptions):
    root: Path | None = Field(None, description="a root file system to start from, instead of this machine's /usr etc.")
    storage: Literal["disk", "memory"] = Field("disk", description="where changed files live: the state folder, or RAM")
    processes: int = Field(1024, ge=8, description="most processes of a sandbox whose task sets no limit")
    memory: ByteSize | None = Field(None, ge=1 << 20, description="memory of a sandbox, whatever its task says")
    state_dir: Path | None = Field(None, description="where sandboxes keep records and changed files")


class LocalProvider(SandboxProvider):
    """Sandboxes of Linux namespaces. As root: limits by control groups; otherwise by namespaces and rlimits."""

    api: ClassVar[int] = 1
    Options = LocalOptions

    def __init__(self, options: BaseModel) -> None:
        super().__init__(options)
        assert isinstance(options, LocalOptions)
        self._options = options
        self._owner = secrets.token_hex(8)
        self._starting: asyncio.Task[Helper] | None = None
        self._sandboxes: dict[str, LocalSandbox] = {}
        self._pool = ThreadPoolExecutor(8, thread_name_prefix="sandbox-files")
        self._state_fd = -1
        self._fingerprint: asyncio.Task[str] | None = None
        self._starts = asyncio.Semaphore(_AT_ONCE)
        self.ends = asyncio.Semaphore(_AT_ONCE)
        self._unsynced: set[str] = set()
        self._syncing: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def _privileged(self) -> bool:
        return os.geteuid() == 0

    @property
    def capabilities(self) -> SandboxCapabilities:
        return SandboxCapabilities(
            snapshot=SnapshotLevel.FILESYSTEM,
            fork=True,
            changes=True,
            users=self._privileged,
            mounts=True,
            limits=enforceable(),
        )

    async def preflight(self) -> None:
        root = self._options.root
        if root is not None and not root.is_dir():
            raise WrongValue(
                f"sandbox.root: there is no directory {root}",
                remedy="give a complete root file system with -o sandbox.root=DIR",
            )
        if sys.platform != "linux":
            raise Unavailable("the local sandbox needs Linux", remedy=OTHER_SANDBOX)
        if os.uname().machine not in seccomp.MACHINES:
            raise Unavailable(
                f"the local sandbox has no system call filter for {os.uname().machine}",
                remedy=OTHER_SANDBOX,
            )
        release = os.uname().release
        if _version(release) < OLDEST_KERNEL:
            raise Unavailable(
                f"the local sandbox needs Linux {'.'.join(map(str, OLDEST_KERNEL))}, where limits of processes are "
                f"counted in each user namespace; this is {release}",
                remedy=OTHER_SANDBOX,
            )
        try:
            sandbox = await self._create(SandboxSpec(labels={"run": "preflight"}))
        except StartFailed as error:
            raise Unavailable(f"the local sandbox cannot start: {error}", remedy=remedy(error, self._state())) from None
        try:
            result = await sandbox.exec(["/bin/sh", "-c", "exit 7"], cwd="/", timeout=30)
        finally:
            await sandbox.close()
        if result.exit_code != 7:
            raise Unavailable(
                f"the local sandbox cannot run /bin/sh: {result.stderr.decode('utf-8', 'replace').strip()}",
                remedy="give a complete root file system with -o sandbox.root=DIR" if self._options.root else None,
            )

    async def create(self, spec: SandboxSpec) -> Sandbox:
        await self.check(spec)
        try:
            return await self._create(spec)
        except StartFailed as error:
            raise SandboxError(
                f"the local sandbox cannot start: {error}", remedy=remedy(error, self._state())
            ) from None

    async def check(self, spec: SandboxSpec) -> None:
        environment = spec.environment
        other = "choose a sandbox that has images (rl-harness plugins list)"
        if environment.dockerfile is not None:
            raise Unsupported(f"{environment.dockerfile}: the local sandbox cannot build a Dockerfile", remedy=other)
        if environment.image is not None:
            raise Unsupported(f"image {environment.image}: the local sandbox has no images", remedy=other)
        if environment.compose is not None:
            raise Unsupported(f"{environment.compose}: the local sandbox has no containers", remedy=other)
        if spec.network is not NetworkPolicy.NONE or spec.network_allow:
            raise Unsupported(
                f"the local sandbox has no network: policy {spec.network.value} is not supported",
                remedy="write network_mode = 'no-network' in the task, or choose a sandbox that has this network",
            )
        if not environment.workdir.startswith("/"):
            raise Unsupported(f"workdir {environment.workdir!r} is not absolute")
        for mount in spec.mounts:
            if not mount.source.is_dir():
                raise SandboxError(f"{mount.source}, to be shown in the sandbox as {mount.target}, is no directory")
            if not mount.target.startswith("/") or ".." in mount.target.split("/"):
                raise Unsupported(f"mount on {mount.target!r}: not an absolute path")
        self._plan(self._limits(spec.limits))

    def _limits(self, limits: Limits) -> Limits:
        if self._options.memory is None:
            return limits
        return msgspec.structs.replace(limits, memory=int(self._options.memory))

    def _plan(self, limits: Limits) -> Plan:
        return plan(limits, processes=self._options.processes, in_memory=self._options.storage == "memory")

    async def _create(self, spec: SandboxSpec) -> LocalSandbox:
        limits = self._limits(spec.limits)
        async with self._starts:
            enforced = self._plan(limits)
            sandbox = self._launch(await self._running_helper(), spec, enforced)
            try:
                await sandbox.started()
            except BaseException:
                await sandbox.close()
                raise
        if spec.snapshot is None:
            try:
                await self._fill(sandbox, spec.environment, limits)
            except BaseException:
                await sandbox.close()
                raise
        return sandbox

    def _launch(self, helper: Helper, spec: SandboxSpec, enforced: Plan) -> LocalSandbox:
        """Write the record and ask the helper for the sandbox: all that must be undone is known to ``close``."""
        name = f"{storage.SANDBOX}{secrets.token_hex(8)}"
        groups = cgroups.paths(name, enforced.groups)
        base = {"root": str(self._root() or ""), "layers": helper.layers}
        layers = self._layers(spec.snapshot, base)

        def remove() -> None:
            storage.remove(self._state_fd, name, groups)
            snapshots.released(self._state_fd, layers)

        try:
            own = {"cgroups": groups, "snapshot": spec.snapshot, "layers": layers}
            storage.make(self._state_fd, name, storage.RECORD, self._record(spec.labels) | own)
            self._layers(spec.snapshot, base)  # still there, now that the record keeps it
            os.mkdir(f"{name}/fs", 0o700, dir_fd=self._state_fd)
            try:
                cgroups.create(name, enforced.groups)
            except OSError as error:
                raise StartFailed("make control groups", error.errno or 0) from None
            request = {
                "sandbox": name,
                "cgroups": groups,
                "processes": enforced.processes,
                "memory": enforced.address_space,
                "disk": enforced.disk,
                "snapshots": layers,
                "workdir": spec.environment.workdir,
                "mounts": [(str(mount.source.resolve()), mount.target) for mount in spec.mounts],
                "lifetime": spec.lifetime,
            }
            control = helper.launch(request)
        except BaseException as error:
            remove()
            if isinstance(error, OSError):
                raise _unwritable(error, self._state()) from None
            raise

        def remember(pid: int) -> None:
            content = {"pid": pid, "pid_start": storage.process_start(pid)}
            storage.write(self._state_fd, f"{name}/{storage.INIT}", content)

        sandbox = LocalSandbox(
            name,
            Channel(control, name, remember),
            spec=spec,
            env=BASE_ENV,
            layers=layers,
            base=base,
            maker=self,
            pool=self._pool,
            remove=remove,
            forget=lambda: self._sandboxes.pop(name, None),
        )
        self._sandboxes[name] = sandbox
        return sandbox

    def _record(self, labels: Mapping[str, str]) -> dict[str, Any]:
        """What every record begins with: whose it is, for the helper and for the reapers of other processes."""
        return {"owner": self._owner, "process": owner_label(), "labels": dict(labels), "created_at": time.time()}

    def _layers(self, snapshot: str | None, base: Mapping[str, Any]) -> builtins.list[str]:
        """The layers of a snapshot to start from, newest first."""
        if snapshot is None:
            return []
        record = snapshots.find(self._state_fd, snapshot)
        if record is None:
            raise SandboxError(f"the local sandbox has no snapshot {snapshot!r}")
        if record["base"] != base:
            raise Unsupported(
                f"snapshot {snapshot} was made on another root file system: {record['base']}, here it is {base}",
                remedy="prepare the environment again, or give the same -o sandbox.root",
            )
        return builtins.list(record["layers"])

    async def _fill(self, sandbox: LocalSandbox, environment: EnvironmentSpec, limits: Limits) -> None:
        workspace = environment.directory / "workspace" if environment.directory else None
        if workspace is not None and workspace.is_dir():
            try:
                await sandbox.upload(workspace, environment.workdir)
            except UnsafeFiles as error:  # nobody's doing: no agent has been here yet
                limited = limits.disk is not None or self._options.storage == "memory"
                enlarge = "[environment] storage_mb in task.toml" if limited else STATE_DIR
                short = shortage(errno.ENOSPC, "the sandbox" if limited else self._state(), enlarge)
                raise SandboxError(
                    f"{workspace} cannot be copied into the sandbox: {error.message}",
                    remedy=short.remedy if error.full and short else None,
                ) from None

    async def _running_helper(self) -> Helper:
        """The helper, started at the first use and again when it died. A start outlives its caller's cancellation."""
        if self._closed:
            raise SandboxError("the sandbox provider is closed")
        if self._starting is None or (self._starting.done() and not _usable(self._starting)):
            self._starting = asyncio.create_task(self._start_helper())
        return await asyncio.shield(self._starting)

    async def _start_helper(self) -> Helper:
        root = self._root()
        return await Helper.start(
            {
                "state": str(self._state()),
                "root": str(root) if root else None,
                "privileged": self._privileged,
                "owner": self._owner,
            }
        )

    def _root(self) -> Path | None:
        return self._options.root.resolve() if self._options.root else None

    def _state(self) -> Path:
        """The state directory, made and opened at the first use; /tmp serves where the home cannot be written."""
        if self._closed and self._state_fd < 0:
            raise SandboxError("the sandbox provider is closed")
        path = _state_directory(self._options.state_dir, search=0o711 if self._privileged else 0o700)
        if self._state_fd < 0:
            self._state_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return path

    async def list(self, labels: Mapping[str, str] | None = None) -> builtins.list[SandboxInfo]:
        found = []
        for name, record in self._records(labels).items():
            found.append(
                SandboxInfo(
                    id=name,
                    provider="local",
                    labels=record.get("labels", {}),
                    created_at=record.get("created_at", 0.0),
                    owner_alive=_alive(record),
                    snapshot=record.get("snapshot"),
                )
            )
        return found

    def _records(self, labels: Mapping[str, str] | None) -> dict[str, dict[str, Any]]:
        self._state()
        wanted = (labels or {}).items()
        return {
            name: record
            for name, record in storage.read_records(self._state_fd).items()
            if wanted <= record.get("labels", {}).items()
        }

    async def reap(self, labels: Mapping[str, str] | None = None, *, force: bool = False) -> int:
        count = 0
        for name, record in self._records(labels).items():
            if force or _alive(record) is False:
                await self._in_pool(self._reap, name, record)
                count += 1
        await self._in_pool(storage.sweep, self._state_fd)
        return count + await self._in_pool(snapshots.remove_abandoned, self._state_fd, labels or {}, _alive)

    def _reap(self, name: str, record: dict[str, Any]) -> None:
        pid, start = record.get("pid"), record.get("pid_start")
        if isinstance(pid, int) and start is not None:
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(pid)
                try:
                    if storage.process_start(pid) == start:
                        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                        _wait_for(pidfd)
                finally:
                    os.close(pidfd)
        storage.remove(self._state_fd, name, record.get("cgroups", []))
        snapshots.released(self._state_fd, record.get("layers", []))

    async def fingerprint(self, spec: SandboxSpec) -> Mapping[str, str]:
        """What the sandboxes' root is made of; looked at once, as a run goes on with what it began with."""
        if self._fingerprint is None:
            self._fingerprint = asyncio.create_task(asyncio.to_thread(fingerprint, self._root()))
        layout = "root" if self._privileged else "user"
        return {"system": await asyncio.shield(self._fingerprint), "machine": os.uname().machine, "layout": layout}

    async def snapshots(self, labels: Mapping[str, str] | None = None) -> builtins.list[SnapshotInfo]:
        self._state()
        records = await self._in_pool(snapshots.listed, self._state_fd)
        return [
            SnapshotInfo(
                id=name,
                provider="local",
                key=record["key"],
                labels=record["labels"],
                created_at=record["created_at"],
                size=record["size"],
            )
            for name, record in sorted(records.items(), key=lambda item: item[1]["created_at"])
            if (labels or {}).items() <= record["labels"].items()
        ]

    async def delete_snapshot(self, snapshot: str) -> None:
        self._state()
        self._unsynced.discard(snapshot)
        await self._in_pool(snapshots.delete, self._state_fd, snapshot)

    async def freeze(self, sandbox: LocalSandbox, *, key: str, labels: Mapping[str, str], temporary: bool) -> str:
        """A new snapshot of what ``sandbox`` has written, on the layers it stands on."""
        self._state()
        merge = len(sandbox.layers) + 1 >= snapshots.MAX_LAYERS
        try:
            name = snapshots.begin(
                self._state_fd,
                {**self._record(labels), "key": key, "temporary": temporary},
                below=[] if merge else sandbox.layers,
                base=sandbox.base,
                uid=storage.UID_BASE if self._privileged else None,
            )
        except OSError as error:
            raise _unwritable(error, self._state()) from None
        try:
            target = os.open(f"{name}/fs", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._state_fd)
            try:
                size = await sandbox.freeze(target, merge=merge)
            finally:
                os.close(target)
            snapshots.finish(self._state_fd, name, size)
        except BaseException as error:
            await finished(self._in_pool(snapshots.delete, self._state_fd, name))
            if isinstance(error, OSError):
                raise _unwritable(error, self._state()) from None
            raise
        if not temporary:
            self._unsynced.add(name)
            if self._syncing is None or self._syncing.done():
                self._syncing = asyncio.create_task(self._sync_later())
        return name

    async def _sync_later(self) -> None:
        await asyncio.sleep(_SYNC_SECONDS)
        await self._sync()

    async def _sync(self) -> None:
        """Bring to the disk what is not there yet, all in one go: it makes everybody's writing wait."""
        names = set(self._unsynced)
        with contextlib.suppress(OSError):
            await self._in_pool(snapshots.sync, self._state_fd, names)
        self._unsynced -= names

    async def _in_pool(self, function: Callable[..., T], *arguments: Any) -> T:
        if self._closed and self._state_fd < 0:
            raise SandboxError("the sandbox provider is closed")
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    async def close(self) -> None:
        self._closed = True
        if self._starting is not None:
            await asyncio.wait([self._starting])
        await asyncio.gather(*(sandbox.close() for sandbox in builtins.list(self._sandboxes.values())))
        if self._syncing is not None:
            self._syncing.cancel()
            await asyncio.wait([self._syncing])
        if self._unsynced:
            await self._sync()
        if self._starting is not None and _usable(self._starting):
            await asyncio.to_thread(self._starting.result().stop)
        # What a cancelled caller had begun goes on in its thread, with files below the state folder.
        ended = asyncio.create_task(asyncio.to_thread(self._pool.shutdown))
        await asyncio.wait([ended], timeout=_THREADS_SECONDS)
        if ended.done() and self._state_fd >= 0:
            os.close(self._state_fd)
            self._state_fd = -1


def _version(release: str) -> tuple[int, ...]:
    """The leading numbers of a kernel's release, such as ``6.1.0-18-amd64``."""
    numbers = re.match(r"(\d+)\.(\d+)", release)
    return tuple(map(int, numbers.groups())) if numbers else (0,)


def _usable(starting: asyncio.Task[Helper]) -> bool:
    return not starting.cancelled() and starting.exception() is None and starting.result().alive


def _alive(record: Mapping[str, Any]) -> bool | None:
    """Whether the process that made something lives; None where that cannot be told. A damaged record names none."""
    return owner_alive(record["process"]) if "process" in record else False


def _unwritable(error: OSError, state: Path) -> SandboxError:
    short = shortage(error.errno, state, STATE_DIR)
    return SandboxError(
        f"the state folder of sandboxes, {state}, cannot be written: {error.strerror}",
        remedy=f"{short.what}: {short.remedy}" if short else f"name another with {STATE_DIR}",
    )


def _wait_for(pidfd: int) -> None:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll(30_000)


def _state_directory(chosen: Path | None, *, search: int) -> Path:
    """The folder for sandboxes' state, made where it is missing, with at least the permissions ``search``."""
    home = Path(os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser())
    shared = Path(tempfile.gettempdir()) / f"rl-harness-{os.geteuid()}"
    candidates = [chosen] if chosen else [home / "rl-harness/sandboxes", shared / "sandboxes"]
    reasons = []
    for candidate in candidates:
        try:
            if candidate.parent == shared:
                private_folder(shared)
            candidate.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            candidate.mkdir(mode=0o700, exist_ok=True)
            status = candidate.stat()
            if status.st_uid != os.geteuid():
                reasons.append(f"{candidate} belongs to another user")
                continue
            if status.st_mode & search != search:
                candidate.chmod(status.st_mode | search)
            return candidate.resolve()
        except OSError as error:
            at = f" ({error.filename})" if error.filename not in (None, str(candidate)) else ""
            reasons.append(f"{candidate} cannot be written: {error.strerror}{at}")
    raise (WrongValue if chosen else Unavailable)(
        f"no folder for the state of sandboxes: {'; '.join(reasons)}", remedy="name one with -o sandbox.state_dir=DIR"
    )
