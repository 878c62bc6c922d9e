"""Sandbox plugins: an isolated machine for one episode.

A :class:`SandboxProvider` makes :class:`Sandbox` objects. All output is bytes: decoding is the caller's
business, late and with ``replace``. A failure of the sandbox itself raises
:class:`~rl_harness.errors.SandboxError`; a command that fails is a result, not an error.
"""

from __future__ import annotations

import abc
import asyncio
import builtins
import enum
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from rl_harness.contracts.common import Plugin
from rl_harness.errors import Unsupported

Command = str | Sequence[str]
"""A shell string, run by the sandbox's ``/bin/sh -c`` (bash where it has one), or an argv."""

DEFAULT_OUTPUT_LIMIT = 1 << 20


class SnapshotLevel(enum.StrEnum):
    NONE = "none"
    FILESYSTEM = "filesystem"
    MEMORY = "memory"


class NetworkPolicy(enum.StrEnum):
    """What a sandbox can reach. "The gateway only" is ``NONE`` plus the relay, which needs no network at all.

    An isolating provider with ``NONE`` need not offer ``ALLOW_LIST``: core gives it one, by a proxy over the relay.
    """

    NONE = "none"
    ALLOW_LIST = "allow_list"
    FULL = "full"


class SandboxCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What this provider can do *here*, with its options, after ``preflight``.

    ``limits`` names the resource limits it really enforces, of ``memory``, ``pids``, ``cpus``, ``disk``.
    ``isolated`` False marks every result of the run ``unisolated``. ``changes``: :meth:`Sandbox.changes` works.
    ``users``: ``exec(user=...)`` works. ``dockerfile``/``image``/``compose``: environments it can be started from.
    ``slow_exec``: a command costs much more than a process, so the agent's commands go through a resident helper.
    ``reconnect``: :meth:`SandboxProvider.connect` finds a sandbox again. ``mounts``: :attr:`SandboxSpec.mounts` works.
    ``builds``: :meth:`SandboxProvider.builds` lists the images it built.
    """

    isolated: bool = True
    snapshot: SnapshotLevel = SnapshotLevel.NONE
    fork: bool = False
    pause: bool = False
    changes: bool = False
    users: bool = False
    dockerfile: bool = False
    image: bool = False
    compose: bool = False
    slow_exec: bool = False
    reconnect: bool = False
    mounts: bool = False
    builds: bool = False
    network: frozenset[NetworkPolicy] = frozenset({NetworkPolicy.NONE})
    limits: frozenset[str] = frozenset()
    gpu: bool = False


class SetupStep(msgspec.Struct, frozen=True, kw_only=True):
    """A shell script that prepares an environment: a task's ``environment/setup.sh``, a harness's installation.

    It runs in the sandbox as its root user, in ``workdir``, after the workspace was copied and before any agent.
    What it leaves on disk is part of the environment; processes it leaves are killed. ``timeout`` in seconds.
    """

    name: str
    script: str
    env: Mapping[str, str] = {}
    timeout: float = 600.0


class EnvironmentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent's machine is made of.

    ``directory`` is the task's ``environment/`` (or None). Its ``workspace/`` subtree, where there is one, is
    copied into ``workdir`` before anything else runs. ``dockerfile``, ``image`` and ``compose`` ask for images; a
    provider without that capability refuses the task before the run starts. ``setup`` is run by the core, once for
    each content digest where the provider has snapshots, else in every sandbox; providers ignore it.
    """

    directory: Path | None = None
    dockerfile: Path | None = None
    image: str | None = None
    compose: Path | None = None
    workdir: str = "/app"
    env: Mapping[str, str] = {}
    setup: tuple[SetupStep, ...] = ()
    build_timeout: float = 600.0


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Resource limits; None leaves one unlimited. Bytes for memory and disk, a fraction of cores for cpus."""

    memory: int | None = None
    pids: int | None = None
    cpus: float | None = None
    disk: int | None = None


class HostMount(msgspec.Struct, frozen=True, kw_only=True):
    """A directory of this machine (``source``) shown in the sandbox as ``target``, an absolute path: read-only, and
    without set-user-id programs and devices. It is no part of the environment: neither of its key nor of a snapshot."""

    source: Path
    target: str


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One sandbox to create. ``labels`` carry at least ``run`` (the run id), by which it is listed and reaped.

    ``network_allow`` are the hosts of :attr:`NetworkPolicy.ALLOW_LIST`: addresses, ranges of addresses, domain names,
    and ``*.`` with a domain for every name below it, at any port.

    ``lifetime`` (seconds) bounds a sandbox nobody closes. ``snapshot`` (an id of this provider) is the file system
    to start from instead of the environment's image and workspace; ``workdir``, ``env`` and everything else of the
    spec still hold. ``mounts`` need the capability of that name.
    """

    environment: EnvironmentSpec = EnvironmentSpec()
    limits: Limits = Limits()
    network: NetworkPolicy = NetworkPolicy.NONE
    network_allow: tuple[str, ...] = ()
    labels: Mapping[str, str] = {}
    lifetime: float = 3600.0
    snapshot: str | None = None
    mounts: tuple[HostMount, ...] = ()


class ExecResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a command ended.

    ``exit_code`` is the command's own, or 128+N when signal N killed it (``signal`` is then N). ``timed_out``:
    our timeout killed it and all its descendants; the output up to then is kept. ``*_truncated``: output beyond
    the limit was read and thrown away.
    """

    exit_code: int
    stdout: bytes = b""
    stderr: bytes = b""
    signal: int | None = None
    timed_out: bool = False
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.timed_out


class Process(abc.ABC):
    """A running command with live streams. Dropping it without :meth:`kill` or :meth:`wait` is a leak."""

    @abc.abstractmethod
    def output(self) -> AsyncIterator[tuple[str, bytes]]:
        """Yield ``("stdout" | "stderr", chunk)`` as they arrive, until both are closed."""

    @abc.abstractmethod
    async def write(self, data: bytes) -> None:
        """Write to stdin, with back-pressure."""

    @abc.abstractmethod
    async def close_stdin(self) -> None: ...

    @abc.abstractmethod
    async def wait(self) -> int:
        """The exit code (128+N for signal N)."""

    @abc.abstractmethod
    async def kill(self) -> None:
        """Kill the command and every descendant."""


class Sandbox(abc.ABC):
    """One isolated machine. Safe for concurrent use by tasks of one event loop.

    Any method after :meth:`close`, or once the machine died, raises ``SandboxError``.
    """

    id: str

    @abc.abstractmethod
    async def exec(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bytes = b"",
        timeout: float | None = None,
        output_limit: int = DEFAULT_OUTPUT_LIMIT,
    ) -> ExecResult:
        """Run a command to its end. ``cwd`` defaults to the environment's ``workdir``; ``env`` adds to it.

        Background children it leaves keep running (until :meth:`kill_processes` or :meth:`close`) and do not
        hold up the result once the command itself has exited. ``output_limit`` is bytes for each stream.
        An unknown ``user`` or ``cwd`` is a result with exit code 126 and the reason on stderr.
        """

    @abc.abstractmethod
    async def spawn(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> Process: ...

    @abc.abstractmethod
    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write one file inside, creating parents; ``path`` is absolute inside the sandbox.

        No symlink of the sandbox can redirect the write to the host.
        """

    @abc.abstractmethod
    async def read_file(self, path: str, *, limit: int | None = None) -> bytes:
        """Read one regular file. Raises ``FileNotFoundError``, or ``SandboxError`` for anything not a regular
        file or larger than ``limit`` bytes. Never follows a symlink out of the sandbox."""

    @abc.abstractmethod
    async def upload(self, source: Path, target: str) -> None:
        """Copy a host file or directory tree to ``target`` (the copy's own path), keeping modes and symlinks."""

    @abc.abstractmethod
    async def download(
        self, source: str, target: Path, *, limit: int | None = None, skip_unsafe: bool = False
    ) -> list[str]:
        """Copy a file or tree out to host path ``target``; ``FileNotFoundError`` when there is none.

        Device files, sockets, pipes, and links that leave the tree are refused with
        :class:`~rl_harness.errors.UnsafeFiles`, or with ``skip_unsafe`` left out and their paths returned. More
        than ``limit`` bytes of files (apparent size, so a sparse file counts in full) is refused likewise; at
        most that much is ever written to the host."""

    @abc.abstractmethod
    async def kill_processes(self) -> None:
        """Kill every process in the sandbox. When it returns none is alive; files are untouched, and further
        ``exec`` calls work."""

    def native_path(self, path: str) -> str:
        """What a command must call the file that the methods of this class call ``path``: the same, except in a
        sandbox without a root of its own."""
        return path

    async def changes(self) -> list[str]:
        """Absolute paths that differ from the environment the sandbox started from (capability ``changes``)."""
        raise Unsupported(f"{type(self).__name__} cannot list changed files")

    async def snapshot(self, *, key: str = "", labels: Mapping[str, str] | None = None) -> str:
        """Freeze the file system under a new snapshot whose id goes into :attr:`SandboxSpec.snapshot`.

        The sandbox goes on, and nothing it does later reaches the snapshot. ``key`` (a content digest, "" for none)
        and ``labels`` are kept with it and listed by :meth:`SandboxProvider.snapshots`. Running processes are not
        part of it; whoever needs files at rest calls :meth:`kill_processes` first.
        """
        raise Unsupported(f"{type(self).__name__} has no snapshots")

    async def fork(self, count: int) -> list[Sandbox]:
        """``count`` independent sandboxes with this one's spec that start from its present file system."""
        raise Unsupported(f"{type(self).__name__} cannot fork")

    async def pause(self) -> None:
        """Stop using resources until :meth:`resume`; other methods may raise ``SandboxError`` meanwhile."""
        raise Unsupported(f"{type(self).__name__} cannot pause")

    async def resume(self) -> None:
        raise Unsupported(f"{type(self).__name__} cannot pause")

    async def died(self) -> str:
        """Return, with the reason in the provider's words, when the machine has died by itself (its init was
        killed, it ran out of memory, its lifetime ended, the service took it away); not before. Within a second of
        it where the provider tells; this default asks :meth:`alive` twice a second. Ends by cancellation when
        :meth:`close` is called first."""
        while await self.alive():  # noqa: ASYNC110 -- a remote machine sets no event here
            await asyncio.sleep(0.5)
        return f"sandbox {self.id} is no longer alive"

    @abc.abstractmethod
    async def alive(self) -> bool: ...

    @abc.abstractmethod
    async def close(self) -> None:
        """Kill everything and remove every trace. Idempotent, safe while commands run and under cancellation."""


class SandboxInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox on record. ``owner_alive`` is None where that cannot be told: its owner is on another machine.
    ``snapshot``: the id it started from."""

    id: str
    provider: str
    labels: Mapping[str, str]
    created_at: float
    owner_alive: bool | None
    snapshot: str | None = None


class SnapshotInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot on record. ``size``: bytes beyond what it was made from, None where the provider does not tell."""

    id: str
    provider: str
    key: str
    labels: Mapping[str, str]
    created_at: float
    size: int | None = None


class BuildInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An image that this provider built for a Dockerfile, and keeps for the next sandbox. ``source``: what it was built
    from, for people. ``used_by``: the ids of sandboxes and snapshots that stand on it, and names of whatever else does.
    ``size``: bytes with everything below it, None where the provider does not tell."""

    id: str
    provider: str
    source: str
    created_at: float
    last_used: float
    used_by: tuple[str, ...] = ()
    size: int | None = None


class SandboxProvider(Plugin):
    """Makes sandboxes. One instance per run; it may keep a helper process or a client session open."""

    @property
    @abc.abstractmethod
    def capabilities(self) -> SandboxCapabilities: ...

    @abc.abstractmethod
    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Raises :class:`~rl_harness.errors.Unsupported` for a spec this provider cannot honour in full, and
        ``SandboxError`` when it should have worked."""

    @abc.abstractmethod
    async def list(self, labels: Mapping[str, str] | None = None) -> list[SandboxInfo]:
        """Every sandbox of this provider on record whose labels include ``labels``, whoever made it."""

    @abc.abstractmethod
    async def reap(self, labels: Mapping[str, str] | None = None, *, force: bool = False) -> int:
        """Remove sandboxes (processes, files) whose owner process is known to be gone, or all matching with
        ``force``; also what an interrupted build or snapshot left. Returns how many."""

    async def check(self, spec: SandboxSpec) -> None:
        """Refuse what :meth:`create` would, as far as that shows without building, pulling or starting anything: what
        this provider does not honour, what is wrong with the files and names of the environment. Asked about each
        spec of a run before it starts. Raises like :meth:`create`."""
        return

    async def fingerprint(self, spec: SandboxSpec) -> Mapping[str, str]:
        """What decides the content of a prepared environment beside the files of the environment itself: digests of
        base images, build arguments, the root file system chosen by an option. Part of every snapshot's key; a tag
        that moved must show here. ``spec`` has an environment and limits, and nothing else: the limits belong here
        only where a snapshot is of a machine of one size. Raises like :meth:`create`."""
        return {}

    async def snapshots(self, labels: Mapping[str, str] | None = None) -> builtins.list[SnapshotInfo]:
        """Every snapshot of this provider on record whose labels include ``labels``."""
        return []

    async def delete_snapshot(self, snapshot: str) -> None:
        """Remove a snapshot; sandboxes that started from it go on. One that is gone already is no error."""
        raise Unsupported(f"{type(self).__name__} has no snapshots")

    async def builds(self) -> builtins.list[BuildInfo]:
        """Every image on record that this provider built, whoever asked for it (capability ``builds``)."""
        return []

    async def delete_build(self, build: str) -> bool:
        """Remove an image that this provider built, unless something stands on it. Returns whether it is gone, which
        one that was gone already is too. Whoever needs its content again gets it built again."""
        raise Unsupported(f"{type(self).__name__} does not list what it builds")

    async def connect(self, sandbox: str) -> Sandbox:
        """A handle on a running (or paused) sandbox by its id (capability ``reconnect``)."""
        raise Unsupported(f"{type(self).__name__} cannot find a sandbox again")

    async def close(self) -> None:
        """Close every sandbox made by this instance, and its helpers. Idempotent."""


class SandboxSource(Protocol):
    """Whatever hands out sandboxes: a provider itself, or one behind snapshots and a warm pool."""

    @property
    def capabilities(self) -> SandboxCapabilities: ...

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Like :meth:`SandboxProvider.create`. The caller closes the sandbox."""
