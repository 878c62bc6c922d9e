"""The ``process`` provider: plain processes in a temporary directory, with NO isolation, only when asked for by name.

The directory stands for the sandbox's root in file operations and as the working directory: ``/app/x`` in
``write_file`` is ``ROOT/app/x``, and commands start in ``ROOT/app``. A command that itself opens ``/app/x`` opens the
host's. Nothing is hidden from a command, and one that leaves its session escapes the killing on systems without
``/proc``. Works on Linux and macOS.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

import msgspec
from pydantic import BaseModel, Field

from rl_harness.contracts.common import Options as BaseOptions
from rl_harness.contracts.sandbox import (
    DEFAULT_OUTPUT_LIMIT,
    Command,
    ExecResult,
    Limits,
    NetworkPolicy,
    Process,
    Sandbox,
    SandboxCapabilities,
    SandboxInfo,
    SandboxProvider,
    SandboxSpec,
)
from rl_harness.errors import SandboxError, UnsafeFiles, Unsupported
from rl_harness.private import private_folder
from rl_harness.sandboxes import trees
from rl_harness.sandboxes.processes import exit_code, kill_marked, kill_tree, process_start
from rl_harness.sandboxes.streams import Collector, Reader, Writer, feed, merge
from rl_harness.shortages import shortage

# In the environment of every command, where its runaway children are found again (on systems with /proc).
_MARK = "RL_HARNESS_SANDBOX"
_COMMAND = "RL_HARNESS_COMMAND"
_SHELL = "/bin/bash" if Path("/bin/bash").exists() else "/bin/sh"


class ProcessOptions(BaseOptions):
    state_dir: Path | None = Field(None, description="where the temporary directories are made")


class _Record(msgspec.Struct):
    labels: dict[str, str]
    created_at: float
    owner_pid: int
    owner_start: str | None


class ProcessProvider(SandboxProvider):
    """Processes of this user on this machine. Every result of a run with it is marked ``unisolated``.

    ``state`` is the folder that has one for each sandbox."""

    api: ClassVar[int] = 1
    Options = ProcessOptions

    def __init__(self, options: BaseModel) -> None:
        super().__init__(options)
        assert isinstance(options, ProcessOptions)
        self._chosen = options.state_dir is not None
        self.state = options.state_dir or Path(tempfile.gettempdir()) / f"rl-harness-process-{os.geteuid()}"
        self._sandboxes: set[ProcessSandbox] = set()
        self._closed = False

    @property
    def sandbox_class(self) -> type[ProcessSandbox]:
        """What is created; a provider built on this one gives its own."""
        return ProcessSandbox

    @property
    def capabilities(self) -> SandboxCapabilities:
        return SandboxCapabilities(isolated=False, network=frozenset({NetworkPolicy.FULL}))

    async def check(self, spec: SandboxSpec) -> None:
        environment = spec.environment
        if image := environment.dockerfile or environment.image or environment.compose:
            raise Unsupported(
                f"{image}: the process sandbox has no images",
                remedy="choose a sandbox that has images (rl-harness plugins list)",
            )
        if spec.network is not NetworkPolicy.FULL:
            raise Unsupported(
                f"the process sandbox cannot restrict the network to {spec.network.value}",
                remedy="write network_mode = 'public' in the task, or choose --sandbox local",
            )
        if spec.limits != Limits():
            raise Unsupported("the process sandbox enforces no limits", remedy="choose --sandbox local")
        if spec.mounts:
            raise Unsupported("the process sandbox has no root to show directories in", remedy="choose --sandbox local")

    async def create(self, spec: SandboxSpec) -> Sandbox:
        if self._closed:
            raise SandboxError("the sandbox provider is closed")
        await self.check(spec)
        if spec.snapshot is not None:
            raise Unsupported("the process sandbox has no snapshots")
        try:
            return await self._create(spec)
        except OSError as error:
            short = shortage(error.errno, self.state, "-o sandbox.state_dir=DIR")
            raise SandboxError(
                f"a sandbox cannot be made in {self.state}: {error.strerror or error}",
                remedy=f"{short.what}: {short.remedy}"
                if short
                else "name another folder with -o sandbox.state_dir=DIR",
            ) from None

    async def _create(self, spec: SandboxSpec) -> Sandbox:
        environment = spec.environment
        if self._chosen:
            self.state.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.state.stat().st_uid != os.geteuid():
                raise SandboxError(f"{self.state} belongs to another user", remedy="-o sandbox.state_dir=DIR")
        else:
            private_folder(self.state)
        name = f"process-{secrets.token_hex(8)}"
        folder = self.state / name
        record = _Record(dict(spec.labels), time.time(), os.getpid(), process_start(os.getpid()))
        folder.mkdir(mode=0o700)
        sandbox = self.sandbox_class(folder, environment.workdir, environment.env, self._sandboxes)
        self._sandboxes.add(sandbox)
        try:
            (folder / "record.json").write_bytes(msgspec.json.encode(record))
            sandbox.host(environment.workdir).mkdir(parents=True)
            workspace = environment.directory / "workspace" if environment.directory else None
            if workspace is not None and workspace.is_dir():
                await sandbox.upload(workspace, environment.workdir)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    def _records(self, labels: Mapping[str, str] | None) -> builtins.list[tuple[Path, _Record]]:
        found: builtins.list[tuple[Path, _Record]] = []
        if not self._chosen:
            try:
                private_folder(self.state)
            except OSError:  # nothing of ours can be there
                return found
        for path in sorted(self.state.glob("process-*/record.json")):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                record = msgspec.json.decode(path.read_bytes(), type=_Record)
                if (labels or {}).items() <= record.labels.items():
                    found.append((path.parent, record))
        return found

    async def list(self, labels: Mapping[str, str] | None = None) -> builtins.list[SandboxInfo]:
        return [
            SandboxInfo(
                id=folder.name,
                provider="process",
                labels=record.labels,
                created_at=record.created_at,
                owner_alive=_owner_alive(record),
            )
            for folder, record in self._records(labels)
        ]

    async def reap(self, labels: Mapping[str, str] | None = None, *, force: bool = False) -> int:
        count = 0
        for folder, record in self._records(labels):
            if force or not _owner_alive(record):
                kill_marked(_MARK, folder.name)
                await asyncio.to_thread(_remove_folder, folder)
                count += 1
        return count

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*(sandbox.close() for sandbox in builtins.list(self._sandboxes)))


def _owner_alive(record: _Record) -> bool:
    return record.owner_start is not None and process_start(record.owner_pid) == record.owner_start


def _kill_command(pid: int, token: str) -> None:
    kill_tree(pid)
    kill_marked(_COMMAND, token)


def _remove_folder(folder: Path) -> None:
    """Remove a sandbox's files, also where a command took its own permissions away."""

    def retry(function: Callable[[str], object], path: str, _: object) -> None:
        with contextlib.suppress(OSError):
            Path(path).parent.chmod(stat.S_IRWXU)
            Path(path).chmod(stat.S_IRWXU)
            function(path)

    for _ in range(2):  # what could not be opened the first time can be now
        if folder.exists():
            shutil.rmtree(folder, onerror=retry)


class ProcessSandbox(Sandbox):
    """``folder`` holds the sandbox's record and ``root``, what stands for its root."""

    def __init__(self, folder: Path, workdir: str, env: Mapping[str, str], registry: set[ProcessSandbox]) -> None:
        self.id = folder.name
        self.folder = folder
        self.root = folder / "root"
        self._workdir = workdir
        self._registry = registry
        path = os.environ.get("PATH", os.defpath)
        home = str(self.root / "root")
        self._env = {"PATH": path, "HOME": home, "LANG": "C.UTF-8", **env, _MARK: self.id}
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self._leftovers: set[Collector] = set()
        self._closed = False
        Path(home).mkdir(parents=True)

    def host(self, path: str) -> Path:
        """Where ``path`` of the sandbox lies on the host. Raises UnsafeFiles when a link on the way leaves the root."""
        if not path.startswith("/"):
            raise ValueError(f"{path!r}: a path in a sandbox must be absolute")
        if ".." in path.split("/"):
            raise UnsafeFiles(f"{path}: contains '..'")
        at = self.root
        for part in Path(path).parts[1:]:
            at /= part
            if at.is_symlink():
                raise UnsafeFiles(f"{path}: goes through a symbolic link")
        return at

    def native_path(self, path: str) -> str:
        return str(self.root / path.lstrip("/"))

    def check_open(self) -> None:
        """Raise SandboxError once the sandbox was closed."""
        if self._closed:
            raise SandboxError(f"sandbox {self.id} is closed")

    async def _start(
        self,
        command: Command,
        cwd: str | None,
        env: Mapping[str, str] | None,
        user: str | None,
        descriptors: Sequence[int],
    ) -> tuple[asyncio.subprocess.Process, Callable[[], None]]:
        """The process, and what kills it with its descendants."""
        self.check_open()
        token = secrets.token_hex(8)
        if user is not None:
            raise Unsupported("the process sandbox has no other users", remedy="choose --sandbox local")
        argv = [_SHELL, "-c", command] if isinstance(command, str) else [*command]
        stdin, stdout, stderr = descriptors
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd=self.host(cwd or self._workdir),
            env={**self._env, **(env or {}), _COMMAND: token},
            start_new_session=True,
        )
        self._running[process.pid] = process
        return process, partial(_kill_command, process.pid, token)

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
        started = time.perf_counter()
        pipes = [os.pipe() for _ in range(3)]
        (stdin_read, stdin_write), (out_read, out_write), (err_read, err_write) = pipes
        try:
            process, kill = await self._start(command, cwd, env, user, (stdin_read, out_write, err_write))
        except (OSError, ValueError, UnsafeFiles) as error:
            for descriptor in (stdin_write, out_read, err_read):
                os.close(descriptor)
            code = 127 if isinstance(error, FileNotFoundError) and cwd is None else 126
            reason = str(error)
            if cwd is not None and cwd not in reason:  # not every event loop says which path it was
                reason += f": {cwd!r}"
            return ExecResult(exit_code=code, stderr=f"cannot start the command: {reason}\n".encode())
        except BaseException:
            for descriptor in (stdin_write, out_read, err_read):
                os.close(descriptor)
            raise
        finally:
            for descriptor in (stdin_read, out_write, err_write):
                os.close(descriptor)
        outputs = [Collector(descriptor, output_limit) for descriptor in (out_read, err_read)]
        feeding = asyncio.create_task(feed(Writer(stdin_write), stdin))
        timed_out = False
        try:
            try:
                async with asyncio.timeout(timeout):
                    code = await process.wait()
            except TimeoutError:
                timed_out = True
                await asyncio.to_thread(kill)
                code = await process.wait()
        except BaseException:
            kill()
            for output in outputs:
                output.close()
            raise
        finally:
            feeding.cancel()
            self._running.pop(process.pid, None)
        stdout, stderr = (output.finish() for output in outputs)
        for output in outputs:
            if not output.ended.done():
                self._leftovers.add(output)
        return ExecResult(
            exit_code=exit_code(code),
            signal=-code if code < 0 else None,
            stdout=stdout,
            stderr=stderr,
            timed_out=timed_out,
            stdout_truncated=outputs[0].truncated,
            stderr_truncated=outputs[1].truncated,
            seconds=time.perf_counter() - started,
        )

    async def spawn(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> Process:
        pipes = [os.pipe() for _ in range(3)]
        (stdin_read, stdin_write), (out_read, out_write), (err_read, err_write) = pipes
        try:
            process, kill = await self._start(command, cwd, env, user, (stdin_read, out_write, err_write))
        except BaseException as error:
            for descriptor in (stdin_write, out_read, err_read):
                os.close(descriptor)
            if isinstance(error, OSError):
                raise SandboxError(f"cannot start the command: {error}") from None
            raise
        finally:
            for descriptor in (stdin_read, out_write, err_write):
                os.close(descriptor)
        return PlainProcess(process, kill, Writer(stdin_write), Reader(out_read), Reader(err_read))

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        self.check_open()
        parent = self._make_parent(path)
        target = parent / Path(path).name
        target.unlink(missing_ok=True)
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        target.chmod(mode)

    def _make_parent(self, path: str) -> Path:
        parent = self.host(str(Path(path).parent))
        parent.mkdir(parents=True, exist_ok=True)
        return parent

    async def read_file(self, path: str, *, limit: int | None = None) -> bytes:
        self.check_open()
        source = self.host(path)
        if not stat.S_ISREG(source.lstat().st_mode):
            raise UnsafeFiles(f"{path}: not a regular file")
        with source.open("rb") as file:
            data = file.read() if limit is None else file.read(limit + 1)
        if limit is not None and len(data) > limit:
            raise UnsafeFiles(f"{path}: more than {limit} bytes")
        return data

    async def upload(self, source: Path, target: str) -> None:
        self.check_open()
        parent = self._make_parent(target)
        try:
            await asyncio.to_thread(_copy, source, parent / Path(target).name, keep_links=True)
        except trees.TreeError as error:
            raise UnsafeFiles(f"{source}: {error}") from None

    async def download(
        self, source: str, target: Path, *, limit: int | None = None, skip_unsafe: bool = False
    ) -> builtins.list[str]:
        self.check_open()
        target.parent.mkdir(parents=True, exist_ok=True)
        copying = asyncio.to_thread(
            _copy, self.host(source), target, keep_links=False, limit=limit, skip_unsafe=skip_unsafe
        )
        try:
            return await copying
        except trees.TreeError as error:
            raise UnsafeFiles(f"{source}: {error}") from None

    async def kill_processes(self) -> None:
        self.check_open()
        await self._kill_everything()

    async def _kill_everything(self) -> None:
        for pid in list(self._running):
            kill_tree(pid)
        await asyncio.to_thread(kill_marked, _MARK, self.id)

    async def alive(self) -> bool:
        return not self._closed and self.root.is_dir()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await asyncio.shield(asyncio.ensure_future(self._remove()))

    async def _remove(self) -> None:
        await self._kill_everything()
        for output in list(self._leftovers):
            output.close()
        await asyncio.to_thread(_remove_folder, self.folder)
        self._registry.discard(self)


def _copy(
    source: Path, target: Path, *, keep_links: bool, limit: int | None = None, skip_unsafe: bool = False
) -> builtins.list[str]:
    with contextlib.ExitStack() as stack:
        tree = os.open(source, os.O_RDONLY | os.O_NONBLOCK)
        stack.callback(os.close, tree)
        parent = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(os.close, parent)
        return trees.copy(tree, parent, target.name, keep_links=keep_links, limit=limit, skip_unsafe=skip_unsafe)


class PlainProcess(Process):
    def __init__(
        self,
        process: asyncio.subprocess.Process,
        kill: Callable[[], None],
        stdin: Writer,
        stdout: Reader,
        stderr: Reader,
    ) -> None:
        self._process = process
        self._kill = kill
        self._stdin = stdin
        self._streams = {"stdout": stdout, "stderr": stderr}

    def output(self) -> AsyncIterator[tuple[str, bytes]]:
        return merge(self._streams)

    async def write(self, data: bytes) -> None:
        await self._stdin.write(data)

    async def close_stdin(self) -> None:
        self._stdin.close()

    async def wait(self) -> int:
        return exit_code(await self._process.wait())

    async def kill(self) -> None:
        await asyncio.to_thread(self._kill)
        await self._process.wait()
        self._stdin.close()
        for reader in self._streams.values():
            reader.close()
