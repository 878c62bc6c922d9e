"""One container as a sandbox. Commands are exec instances; files go through the engine's archives, which trust no
program inside; killing means that the container stops and starts again."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import logging
import re
import signal
import tarfile
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import msgspec
from rl_harness.contracts.sandbox import DEFAULT_OUTPUT_LIMIT, Command, ExecResult, Process, Sandbox
from rl_harness.errors import SandboxError, UnsafeFiles
from rl_harness.sandboxes.remote import RemoteSandbox, UnknownUser, packed, unpack

from rl_harness_docker.channel import LARGEST, Channel
from rl_harness_docker.engine import Engine, EngineError
from rl_harness_docker.process import DockerProcess
from rl_harness_docker.watch import ASK_EVERY, Watch

_log = logging.getLogger(__name__)

# Go's file modes, as the engine describes files.
_GO_DIRECTORY, _GO_LINK = 1 << 31, 1 << 27
_GO_SPECIAL = _GO_DIRECTORY | _GO_LINK | 1 << 26 | 1 << 25 | 1 << 24 | 1 << 21 | 1 << 19

#: How long a machine in which nothing can be started any more may take to be dead.
_DYING = 2.0
#: So the engine begins when it could not start even the shell of a command.
_NOT_STARTED = b"OCI runtime"

#: What the engine, and the program it starts containers with, read inside whenever they start something, and what is
#: put there for it where an agent left what would hold them up for ever: the engine keeps the container locked.
_ACCOUNTS = {"/etc/passwd": b"root:x:0:0:root:/root:/bin/sh\n", "/etc/group": b"root:x:0:\n"}
_ACCOUNTS_LARGEST = 1 << 20

#: How long the engine may take with one container, in seconds: to start it again, to look at a path, to remove it. Its
#: other containers do not wait longer for one that is stuck.
_AGAIN, _LOOK, REMOVE = 60.0, 30.0, 30.0

#: What the engine says of a path that leads nowhere, and of what is wrong with the files inside, not with itself.
_NO_FILE = re.compile("not a directory|file name too long")
_OF_THE_FILES = re.compile(
    "not a directory|is a directory|file name too long|too many (links|levels of symbolic links)|file exists"
    "|directory not empty|cannot overwrite"
)

#: How often a container that was ended from inside is started again until we stop it ourselves, and for one command.
_ENDS, _TRIES = 8, 3
# How often to look, while a container is killed, for output that nobody reads, in seconds.
_LOOK_AGAIN = 0.1
# How long until a container that refused a command as not running is asked again, in seconds.
_SETTLING = 0.1

#: Differences that the engine itself makes when a container starts.
_ENGINES_OWN = ("/.dockerenv", "/dev", "/proc", "/sys", "/sbin/docker-init", "/usr/sbin/docker-init")
_ENGINES_FILES = ("/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/etc/mtab")


# The engine stops reading a command's streams when the command has ended, and a background process that writes on is
# then held up for ever. So the command's shell stays while anybody else has them.
_LINGER = """
set -- /proc/[0-9]*
if [ $# -gt 4 ]; then  # more than the first processes and this shell
    out=$(readlink /proc/$$/fd/1); err=$(readlink /proc/$$/fd/3)
    exec >/dev/null 3>&-
    while ls -l /proc/[0-9]*/fd 2>/dev/null | grep -qF -e "$out" -e "$err"; do sleep 1; done
fi
"""


class Ended(UnsafeFiles):
    """The processes of a sandbox were killed from inside too often: it is started again when we have stopped it."""


class DockerSandbox(RemoteSandbox):
    """See :class:`rl_harness.contracts.Sandbox`.

    ``user`` runs commands that name none. ``writable``: where a read-only container can be written (empty: anywhere).
    ``remove`` clears away what belongs to the sandbox beside its container.
    """

    linger: ClassVar[str] = _LINGER

    def __init__(
        self,
        name: str,
        container: str,
        engine: Engine,
        watch: Watch,
        *,
        workdir: str,
        env: Mapping[str, str],
        user: str,
        lifetime: float,
        writable: Sequence[str] = (),
        remove: Callable[[], Awaitable[None]] | None = None,
        snapshot: Callable[[str, Mapping[str, str]], Coroutine[Any, Any, str]] | None = None,
        fork: Callable[[int], Coroutine[Any, Any, list[Sandbox]]] | None = None,
    ) -> None:
        super().__init__(name, workdir=workdir, env=env)
        self.container = container
        self.user = user
        self._engine = engine
        self._watch = watch
        self._lifetime = lifetime
        self._writable = tuple(writable)
        self._remove = remove
        self._snapshot = snapshot
        self._fork = fork
        self._lifeline: Channel | None = None
        self._processes: weakref.WeakSet[DockerProcess] = weakref.WeakSet()
        self._starts = 0
        self._stopped = True  # by us, to be started again by the next command
        self._deaths = 0  # that were told before it was last started
        self._ends = 0  # how often it was ended from inside since we last stopped it
        self._expires = float("inf")
        self._switch = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------------------------------ starting and ending

    async def started(self) -> None:
        """Start the container unless it runs. One that has died by itself stays dead."""
        if self._stopped:
            async with self._switch:
                if self._stopped:  # nobody else has started it meanwhile
                    await self._launch()

    async def _launch(self) -> None:
        self._drop_lifeline()
        path = f"/containers/{self.container}"
        connection = await self._engine.hijack(f"{path}/attach", params={"stream": 1, "stdin": 1})
        self._lifeline = Channel(self._engine, self.container, connection)
        self._watch.start()
        self._watch.machine(self.container).clear()
        deaths = self._watch.deaths(self.container)
        self._watch.revived(self.container)
        began = asyncio.get_running_loop().time()
        if self._starts:
            await self._start_again()
        else:
            await self._engine.request("POST", f"{path}/start")
        self._stopped = False
        self._starts += 1
        self._deaths = deaths
        if self._timer is None:
            self._expires = began + self._lifetime
            self._timer = asyncio.get_running_loop().call_later(self._lifetime, self._drop_lifeline)

    async def _start_again(self) -> None:
        """Raises UnsafeFiles when what an agent did to the files does not let it."""
        if self._expired():
            raise SandboxError(f"sandbox {self.id}: its lifetime of {self._lifetime:g} s is over")
        await self._mend_accounts()
        try:
            await self._engine.request("POST", f"/containers/{self.container}/start", timeout=_AGAIN)
        except EngineError as error:
            # It has started before, and only its files are different now.
            if error.status == 400 or _OF_THE_FILES.search(error.message):
                raise UnsafeFiles(
                    f"sandbox {self.id} does not start again with the files it has now: {error.message}"
                ) from None
            raise

    def _expired(self) -> bool:
        return asyncio.get_running_loop().time() >= self._expires - 0.05

    async def make_workdir(self) -> None:
        """Before any command runs inside. The engine takes ten times as long to look into a container that does not
        run."""
        if self._writable:
            return  # a read-only container has it as a volume
        ways = [self.workdir, *map(str, PurePosixPath(self.workdir).parents)][:-1]
        stats = await asyncio.gather(*map(self._stat, ways))
        missing = [way for way, stat in zip(reversed(ways), reversed(stats), strict=True) if stat is None]
        if missing and missing[-1] == self.workdir:
            place = _Place("/", "", b"")
            archive = _directories(missing) + bytes(2 * tarfile.BLOCKSIZE)
            if not await self._sent(place, [archive]):
                await self._put(place, _one(archive), self.workdir)

    async def _mend_accounts(self) -> None:
        """Replace what is no ordinary file where the engine reads the accounts. Raises UnsafeFiles where it would look
        for them through a link, which it follows elsewhere than we do."""
        folder, *stats = await asyncio.gather(
            self._stat("/etc"), *(self._stat(path) for path in _ACCOUNTS), return_exceptions=True
        )
        if isinstance(folder, BaseException):
            raise folder
        if folder is not None and not folder["mode"] & _GO_DIRECTORY:
            raise UnsafeFiles(f"sandbox {self.id}: /etc is no directory any more")
        for (path, content), stat in zip(_ACCOUNTS.items(), stats, strict=True):
            if isinstance(stat, BaseException):
                if not isinstance(stat, UnsafeFiles):
                    raise stat
            elif stat is not None and stat["mode"] & _GO_LINK:  # as some images have them
                target = stat["linkTarget"]
                found = None if _mounted(target) else await self._stat(target)
                if found is not None and _readable(found):
                    continue
            elif stat is None or _readable(stat):
                continue
            _log.warning("sandbox %s: %s was no ordinary file and is replaced", self.id, path)
            await self._put(_Place("/", path[1:], b""), _one(_packed_file(path[1:], content, 0o644)), path)

    def _drop_lifeline(self) -> None:
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None

    async def kill_processes(self) -> None:
        """Stop the container, so that nothing inside has a say in what dies. It starts again when it is needed."""
        await self._guarded(self._stop())

    async def _stop(self) -> None:
        async with self._switch:
            if self._stopped:
                self._ends = 0
                return
            await self._check_alive()
            self._ends = 0
            self._stopped = True
            ending = asyncio.ensure_future(self._kill())
            try:
                while not ending.done():
                    for process in self._processes:
                        process.unblock()
                    await asyncio.wait({ending}, timeout=_LOOK_AGAIN)
            finally:
                ending.cancel()
            await ending

    async def _kill(self) -> None:
        path = f"/containers/{self.container}"
        try:
            await self._engine.request("POST", f"{path}/kill", timeout=_AGAIN)
        except EngineError as error:
            if error.status != 409:  # it does not run
                raise
        await self._engine.request("POST", f"{path}/wait", timeout=_AGAIN)

    async def _check_alive(self) -> None:
        if reason := await self._dead():
            raise SandboxError(reason)

    async def _dead(self) -> str | None:
        """Why the container does not run, though nobody of us has stopped it. One whose first processes were killed
        from inside is as good as one whose processes we have killed: an agent that does so has not lost its files."""
        starts = self._starts
        try:
            state = (await self._engine.request("GET", f"/containers/{self.container}/json"))["State"]
        except EngineError as error:
            if error.status == 404:
                return f"sandbox {self.id} is no longer there"
            raise
        if state["Running"] or self._stopped or self._starts != starts:
            return None
        if await self._ended_inside(state):
            if not self._stopped and self._starts == starts:
                self._stopped = True
                self._ends += 1
            return None
        how = f"{state['Status']} with exit code {state['ExitCode']}"
        how += ", out of memory" if state.get("OOMKilled") else ""
        how += f": {state['Error']}" if state.get("Error") else ""
        return f"sandbox {self.id} has died ({how})"

    async def _ended_inside(self, state: Mapping[str, Any]) -> bool:
        """Whether what has exited was ended by a process inside, not by the engine, its limits, its lifetime or us."""
        if state["Status"] != "exited" or state.get("OOMKilled") or state.get("Error") or self._closing.is_set():
            return False
        if self._lifeline is None or self._lifeline.closed or self._expired():
            return False
        until = asyncio.get_running_loop().time() + _DYING
        while self._watch.deaths(self.container) <= self._deaths:  # all that led to it is told before it
            if asyncio.get_running_loop().time() > until:
                break
            await asyncio.sleep(0.01)
        return not self._watch.killed(self.container)

    async def alive(self) -> bool:
        return not self._closing.is_set() and await self._dead() is None

    async def died(self) -> str:
        stopped = self._watch.machine(self.container)
        while True:
            stopped.clear()  # before looking, so that nothing is missed
            if reason := await self._dead():
                stopped.set()
                return reason
            try:
                await asyncio.wait_for(stopped.wait(), ASK_EVERY)
            except TimeoutError:
                pass

    async def _destroy(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for process in self._processes:
            await process.kill()
        await remove_or_warn(self._engine, self.container, self.id)
        self._drop_lifeline()
        self._watch.forget(self.container)
        if self._remove is not None:
            await self._remove()

    async def pause(self) -> None:
        await self._guarded(self._post("pause"))

    async def resume(self) -> None:
        await self._guarded(self._post("unpause"))

    async def _post(self, action: str) -> None:
        await self._engine.request("POST", f"/containers/{self.container}/{action}")

    # ------------------------------------------------------------------------------------------------------ commands

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
        try:
            result = await super().exec(
                command,
                cwd=cwd,
                env=env,
                user=user or self.user,
                stdin=stdin,
                timeout=timeout,
                output_limit=output_limit,
            )
        except Ended as error:
            return ExecResult(exit_code=137, signal=signal.SIGKILL, stderr=f"{error}\n".encode())
        refused = result.exit_code == 126 and result.stderr.startswith(_NOT_STARTED)
        if (refused or result.signal == signal.SIGKILL) and not result.timed_out:
            starts = self._starts
            await self._confirm_alive()
            if refused and self._stopped and self._starts == starts:  # in a machine that was being ended
                return msgspec.structs.replace(result, exit_code=128 + signal.SIGKILL, signal=signal.SIGKILL)
        return result

    async def _confirm_alive(self) -> None:
        """Raises SandboxError when the machine is dead or dying: its first process dies after all others, and the end
        of a command among them is not the command's own. In a machine that is dying no process can be started."""
        if self._stopped:
            return
        starts = self._starts
        if (await self.run(["/bin/sh", "-c", ":"])).ok or self._starts != starts:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._watch.machine(self.container).wait(), _DYING)
        await self._check_alive()

    async def spawn(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> Process:
        return await super().spawn(command, cwd=cwd, env=env, user=user or self.user)

    async def _start(
        self, argv: Sequence[str], *, cwd: str | None, env: Mapping[str, str], user: str | None
    ) -> Process:
        if user == "root":
            user = None  # whatever an agent made of the names
        for _ in range(_TRIES):
            if self._ends > _ENDS:
                raise Ended(f"sandbox {self.id}: all its processes were killed from inside {self._ends} times")
            await self.started()
            try:
                await self._mend_accounts()
                process = await DockerProcess.start(
                    self._engine, self._watch, self.container, argv, cwd=cwd, env=env, user=user or "0"
                )
                self._processes.add(process)
                return process
            except EngineError as error:
                if "unable to find user" in error.message:  # newer engines say so here, older as the command's output
                    raise UnknownUser(error.message) from None
                not_running = error.status == 409 or "is not running" in error.message  # with 500, for an exec's start
                if error.status == 404 or not_running:
                    await self._check_alive()
                if not_running and not self._stopped:  # just ending, or just started again by another command
                    await asyncio.sleep(_SETTLING)
                elif not self._stopped:
                    raise
        raise UnsafeFiles(f"sandbox {self.id} ends as soon as it is started, with the files it has now")

    # --------------------------------------------------------------------------------------------------------- files

    # The engine's archives do not see what is mounted inside only; there the container's own programs have to serve.

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        if _mounted(path):
            await super().write_file(path, data, mode=mode)
            return
        await self._guarded(self._write(checked(path), data, mode))

    async def _check_files(self) -> None:
        """Files of a container that has stopped can still be had; those of one that has died are not to be."""
        if self._watch.machine(self.container).is_set():
            await self._check_alive()

    async def _write(self, path: str, data: bytes, mode: int) -> None:
        await self._check_files()
        name = await self._prepare(path)
        archive = name.parents + _packed_file(name.member, data, mode)
        if not await self._sent(name, [archive]):
            await self._put(name, _one(archive), path)
        await self._give(path)

    async def _sent(self, place: _Place, pieces: Sequence[bytes]) -> bool:
        """Whether a small archive was unpacked by the first process, which is faster and, until all processes were
        killed for the sake of whoever comes then, trusted as much as any program inside."""
        channel = self._lifeline
        if channel is None or self._starts != 1 or self._stopped or place.base != "/":
            return False
        return sum(map(len, pieces)) <= LARGEST and await channel.unpack(pieces)

    async def upload(self, source: Path, target: str) -> None:
        if _mounted(target):
            await super().upload(source, target)
            return
        await self._guarded(self._upload(source, checked(target)))

    async def _upload(self, source: Path, target: str) -> None:
        await self._check_files()
        name = await self._prepare(target)

        first = [name.parents]
        stream = packed(source, name.member)
        try:
            async for chunk in stream:
                first.append(chunk)
                if sum(map(len, first)) > LARGEST:
                    break
            else:
                if await self._sent(name, first):
                    await self._give(target)
                    return

            async def chunks() -> AsyncIterator[bytes]:
                for chunk in first:
                    if chunk:
                        yield chunk
                async for chunk in stream:
                    yield chunk

            await self._put(name, chunks(), target)
        finally:
            await stream.aclose()  # type: ignore[attr-defined]  # an async generator
        await self._give(target)

    async def _prepare(self, path: str) -> _Place:
        """Where in the container an archive for ``path`` is to be put. Raises UnsafeFiles for a link on the way."""
        base = next((base for base in self._writable if path.startswith(f"{base}/")), "/")
        if self._writable and base == "/":
            raise SandboxError(f"{path}: the sandbox is read-only but for {', '.join(self._writable)}")
        missing = []
        parents = [str(parent) for parent in PurePosixPath(path).parents if len(str(parent)) > len(base)]
        if str(PurePosixPath(path).parent) == self.workdir and self.workdir.count("/") == 1:
            parents = []  # there since the start
        stats = await asyncio.gather(*(self._stat(parent) for parent in parents))
        for parent, stat in zip(reversed(parents), reversed(stats), strict=True):
            if stat is None:
                missing.append(parent)
            elif not stat["mode"] & (_GO_DIRECTORY | _GO_LINK):
                raise UnsafeFiles(f"{path}: {parent} is no directory")
            elif stat["mode"] & _GO_LINK and parent.count("/") > 1:
                raise UnsafeFiles(f"{path}: goes through a symbolic link")
        return _Place(base, path[len(base) :].lstrip("/"), _directories(missing, base))

    async def _stat(self, path: str) -> dict[str, Any] | None:
        try:
            params = {"path": path}
            location = f"/containers/{self.container}/archive"
            async with asyncio.timeout(_LOOK), self._engine.stream("HEAD", location, params=params) as response:
                return _path_stat(response.headers)
        except TimeoutError:
            raise SandboxError(f"sandbox {self.id}: the engine did not answer within {_LOOK:g} s") from None
        except EngineError as error:
            if error.status == 404:
                return None
            if error.status and error.status < 500:
                raise
        try:  # again, for an answer that says why
            async with asyncio.timeout(_LOOK), self._archive(path) as (stat, _):
                return stat
        except FileNotFoundError:
            return None

    async def _put(self, place: _Place, archive: AsyncIterator[bytes], path: str) -> None:
        try:
            await self._engine.send(f"/containers/{self.container}/archive", archive, params={"path": place.base})
        except EngineError as error:
            await self._check_alive()
            if _OF_THE_FILES.search(error.message):
                raise UnsafeFiles(f"{path}: {error.message}") from None
            raise SandboxError(f"sandbox {self.id}: {path}: {error.message}") from None

    async def _give(self, path: str) -> None:
        """To the user that commands run as."""
        if self.user in ("0", "root"):
            return
        result = await self.run(["chown", "-hR", "--", self.user, path])
        if result.exit_code:
            raise SandboxError(f"sandbox {self.id}: {path}: {result.stderr.decode('utf-8', 'replace').strip()}")

    async def read_file(self, path: str, *, limit: int | None = None) -> bytes:
        if _mounted(path):
            return await super().read_file(path, limit=limit)
        return await self._guarded(self._read(checked(path), limit))

    async def _read(self, path: str, limit: int | None) -> bytes:
        await self._check_files()
        await self._refuse_links(path)
        async with self._archive(path) as (stat, chunks):
            if stat["mode"] & _GO_SPECIAL:
                raise UnsafeFiles(f"{path}: not a regular file")
            if limit is not None and stat["size"] > limit:
                raise UnsafeFiles(f"{path}: {stat['size']} bytes, more than the limit of {limit}")
            most = stat["size"] + (1 << 20)  # headers
            content = bytearray()
            async for chunk in chunks:
                content += chunk
                if len(content) > most:
                    raise UnsafeFiles(f"{path}: grew while it was read")
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
            member = tar.next()
            file = tar.extractfile(member) if member is not None and member.isreg() else None
            if file is None:
                raise UnsafeFiles(f"{path}: not a regular file")
            data = file.read()
        if limit is not None and len(data) > limit:
            raise UnsafeFiles(f"{path}: more than {limit} bytes")
        return data

    async def _refuse_links(self, path: str) -> None:
        between = [str(parent) for parent in PurePosixPath(path).parents if str(parent).count("/") > 1]
        for stat in await asyncio.gather(*(self._stat(parent) for parent in between)):
            if stat is not None and stat["mode"] & _GO_LINK:
                raise UnsafeFiles(f"{path}: goes through a symbolic link")

    def _archive(self, path: str) -> _Archive:
        return _Archive(self, path)

    async def _download(self, source: str, target: Path, limit: int | None, skip_unsafe: bool) -> list[str]:
        if _mounted(source):
            return await super()._download(source, target, limit, skip_unsafe)
        await self._check_files()
        source = checked(source)
        await self._refuse_links(source)
        async with self._archive(source) as (stat, chunks):
            if limit is not None and not stat["mode"] & _GO_SPECIAL and stat["size"] > limit:
                raise UnsafeFiles(f"{source}: {stat['size']} bytes, more than the limit of {limit}")
            return await unpack(chunks, target, limit=limit, skip_unsafe=skip_unsafe)

    async def changes(self) -> list[str]:
        return await self._guarded(self._changes())

    async def _changes(self) -> list[str]:
        found = await self._engine.request("GET", f"/containers/{self.container}/changes") or []
        changed = {entry["Path"]: entry["Kind"] for entry in found}
        parents = {str(parent) for path in changed for parent in PurePosixPath(path).parents}
        return sorted(
            path for path, kind in changed.items() if not (kind == 0 and path in parents) and not _of_the_engine(path)
        )

    # ----------------------------------------------------------------------------------------- snapshots

    async def snapshot(self, *, key: str = "", labels: Mapping[str, str] | None = None) -> str:
        if self._snapshot is None:
            return await super().snapshot(key=key, labels=labels)
        return await self._guarded(self._snapshot(key, labels or {}))

    async def fork(self, count: int) -> list[Sandbox]:
        if self._fork is None:
            return await super().fork(count)
        return await self._guarded(self._fork(count))


class _Place:
    """``base`` is the directory an archive is put into, ``member`` the path in it; ``parents`` goes before it."""

    def __init__(self, base: str, member: str, parents: bytes) -> None:
        self.base = base
        self.member = member
        self.parents = parents


class _Archive:
    """An archive of ``path`` on its way out: what the engine says of the path, and the tar stream."""

    def __init__(self, sandbox: DockerSandbox, path: str) -> None:
        self._sandbox = sandbox
        self._path = path
        self._stream: Any = None

    async def __aenter__(self) -> tuple[dict[str, Any], AsyncIterator[bytes]]:
        sandbox = self._sandbox
        self._stream = sandbox._engine.stream(
            "GET", f"/containers/{sandbox.container}/archive", params={"path": self._path}
        )
        try:
            response = await self._stream.__aenter__()
        except EngineError as error:
            await sandbox._check_alive()
            if error.status == 404 or _NO_FILE.search(error.message):
                raise FileNotFoundError(f"{self._path}: no such file") from None
            if _OF_THE_FILES.search(error.message):
                raise UnsafeFiles(f"{self._path}: {error.message}") from None
            raise
        return _path_stat(response.headers), response.content.iter_any()

    async def __aexit__(self, *error: Any) -> None:
        await self._stream.__aexit__(*error)


async def _one(chunk: bytes) -> AsyncIterator[bytes]:
    yield chunk


def _directories(paths: Sequence[str], base: str = "/") -> bytes:
    """The beginning of an archive to be put into ``base``."""
    blocks = bytearray()
    for path in paths:
        info = tarfile.TarInfo(path[len(base) :].lstrip("/"))
        info.type, info.mode = tarfile.DIRTYPE, 0o755
        blocks += info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
    return bytes(blocks)


def _packed_file(name: str, data: bytes, mode: int) -> bytes:
    """An archive of one file."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), mode
    block = info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
    return block + data + bytes(-len(data) % tarfile.BLOCKSIZE + 2 * tarfile.BLOCKSIZE)


def _path_stat(headers: Mapping[str, str]) -> dict[str, Any]:
    return dict(json.loads(base64.b64decode(headers["X-Docker-Container-Path-Stat"])))


def _readable(stat: Mapping[str, Any]) -> bool:
    """Whether it is an ordinary file that is read in no time."""
    return not stat["mode"] & _GO_SPECIAL and stat["size"] <= _ACCOUNTS_LARGEST


def _mounted(path: str) -> bool:
    return path.startswith(("/dev/", "/proc/", "/sys/"))


def _of_the_engine(path: str) -> bool:
    own = any(path == name or path.startswith(f"{name}/") for name in _ENGINES_OWN)
    return own or path in _ENGINES_FILES


def checked(path: str) -> str:
    """``path`` without a trailing slash. Raises UnsafeFiles unless it is absolute, below the root, without '..'."""
    if not path.startswith("/") or path.rstrip("/") == "" or "\0" in path:
        raise UnsafeFiles(f"{path!r}: a path in a sandbox must be absolute and not its root")
    if ".." in path.split("/"):
        raise UnsafeFiles(f"{path}: contains '..'")
    return str(PurePosixPath("/" + path.lstrip("/")))


async def remove_container(engine: Engine, container: str) -> None:
    """Kill and remove, within a limited time; one that is gone or going is no error."""
    try:
        async with asyncio.timeout(REMOVE):
            while True:
                try:
                    await engine.request("DELETE", f"/containers/{container}", params={"force": 1, "v": 1})
                except EngineError as error:
                    if error.status == 404:
                        return
                    if error.status != 409 or "already in progress" not in error.message:
                        raise
                    await asyncio.sleep(0.05)
                    continue
                return
    except TimeoutError:
        raise EngineError(f"the engine did not remove it within {REMOVE:g} s") from None


async def remove_or_warn(engine: Engine, container: str, name: str) -> bool:
    """Remove a container, or say that it stays, for the reaper: what the engine is stuck with ends no run."""
    try:
        await remove_container(engine, container)
    except EngineError as error:
        _log.warning("container %s cannot be removed and is left to the reaper: %s", name, error.message)
        return False
    return True
