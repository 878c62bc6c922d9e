"""A whole sandbox from one primitive: starting a process with live streams in a machine that is elsewhere.

Everything else is done with what the machine has: ``sh``, ``cat``, ``tar``, ``grep``. A provider overrides what its
own interface does better, or does without trusting the machine's programs. Where its service has an interface for
files, two things are done without any of them: killing (``killer.c``) and, when they fail, getting files out.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import re
import secrets
import shutil
import time
from collections.abc import AsyncIterable, AsyncIterator, Coroutine, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, TypeVar

from rl_harness.contracts.sandbox import DEFAULT_OUTPUT_LIMIT, Command, ExecResult, Process, Sandbox
from rl_harness.errors import BrokenSandbox, SandboxError, UnsafeFiles, Unsupported
from rl_harness.sandboxes.remote import killer
from rl_harness.sandboxes.remote.archives import packed, unpack
from rl_harness.sandboxes.remote.rescue import FileService, rescued, rescued_file

#: Environment variable that marks every process of one command, so that all of them can be found and killed.
MARK = "RL_HARNESS_COMMAND"

# How long output may take to arrive once its command has ended without saying so (it was killed).
_DRAIN = 1.0
_KILL_TRIES = 5
_SAID = 1 << 20  # bytes of what our own commands say
_KILLED = 137
_NOT_STARTED = 127
_CANNOT_RUN = (126, 127)
# What is fetched through the service, file by file, from a machine whose programs are broken.
_RESCUE_SECONDS = 60.0

_MISSING, _REFUSED, _TOO_LARGE = 66, 67, 68
_LAST_SIGNAL = 64
_LONGEST_CODE = 3  # digits of an exit code

# $1 the directory, then the command. The shell outlives the command, to mark the end of its output on both streams:
# a background process may hold them open, and its output must not be waited for. What it says itself of a command that
# was killed belongs to no output.
_RUN = """
cd -- "$1" 2>/dev/null || { echo "cannot enter the directory $1" >&2; exit 126; }
mark=$2; shift 2
exec 3>&2 2>/dev/null
(exec 2>&3 3>&-; exec "$@")
code=$?
printf '\\036%s:%d\\036' "$mark" $code; printf '\\036%s:%d\\036' "$mark" $code >&3
"""
_EXEC = """
cd -- "$1" 2>/dev/null || { echo "cannot enter the directory $1" >&2; exit 126; }
shift
exec "$@"
"""
_SHELL = 'command -v bash >/dev/null 2>&1 && exec bash -c "$1"; exec sh -c "$1"'

_KILL_MARKED = """
n=0
while [ $n -lt 50 ]; do
  found=
  files=$(grep -ls "$1" /proc/[0-9]*/environ 2>/dev/null)
  [ $? -le 2 ] || exit 1
  for file in $files; do
    pid=${file#/proc/}; kill -9 "${pid%/environ}" 2>/dev/null && found=1
  done
  [ -z "$found" ] && exit 0
  n=$((n+1))
done
exit 1
"""

# $1 the path. A link anywhere below the root's own entries is refused, so that nothing is read or written elsewhere.
_NO_LINKS = f"""
at=${{1%/*}}
while [ "${{at%/*}}" != "" ] && [ "$at" != "" ]; do
  if [ -L "$at" ]; then echo "$1: goes through a symbolic link" >&2; exit {_REFUSED}; fi
  at=${{at%/*}}
done
"""
_WRITE = (
    _NO_LINKS
    + f"""
parent=${{1%/*}}
mkdir -p -- "${{parent:-/}}" || exit {_REFUSED}
if [ -L "$1" ]; then rm -f -- "$1"; fi
if [ -d "$1" ]; then echo "$1: is a directory" >&2; exit {_REFUSED}; fi
new="$parent/.rl-harness.$$"
cat > "$new" && chmod "$2" "$new" && mv -f -- "$new" "$1" && exit 0
rm -f -- "$new"; exit 1
"""
)
_READ = (
    _NO_LINKS
    + f"""
if [ -L "$1" ]; then echo "$1: goes through a symbolic link" >&2; exit {_REFUSED}; fi
[ -e "$1" ] || exit {_MISSING}
if [ ! -f "$1" ]; then echo "$1: not a regular file" >&2; exit {_REFUSED}; fi
if [ -n "$2" ]; then
  size=$(stat -c %s -- "$1") || exit 1
  if [ "$size" -gt "$2" ]; then echo "$1: $size bytes, more than the limit of $2" >&2; exit {_TOO_LARGE}; fi
fi
exec cat -- "$1"
"""
)
_UPLOAD = (
    _NO_LINKS
    + f"""
parent=${{1%/*}}
mkdir -p -- "${{parent:-/}}" || exit {_REFUSED}
if [ -L "$1" ]; then rm -f -- "$1"; fi
exec tar -x -p -f - -C "${{parent:-/}}"
"""
)
_DOWNLOAD = (
    _NO_LINKS
    + f"""
if [ -L "$1" ]; then echo "$1: is a symbolic link" >&2; exit {_REFUSED}; fi
if [ ! -e "$1" ]; then echo "$1: no such file" >&2; exit {_MISSING}; fi
parent=${{1%/*}}
exec tar -c -f - -C "${{parent:-/}}" -- "${{1##*/}}"
"""
)

# As the C library has it, and Rust's.
_NO_ROOM = re.compile("no space left|disk quota exceeded|storage ?full|quota ?exceeded", re.IGNORECASE)

T = TypeVar("T")


class CannotStart(Exception):
    """The machine, which lives, could not start a program, such as one that it does not have; the text goes onto its
    stderr."""


class UnknownUser(Exception):
    """A command was to run as a user that the machine does not have; the text goes onto its stderr."""


# No byte code is written, because what the agent's runs leave beside the system's modules would look like tampering
# to a verifier in the same root; images of Python come without it.
_BASE_ENV = {"PYTHONDONTWRITEBYTECODE": "1"}


class RemoteSandbox(Sandbox):
    """The contract of :class:`~rl_harness.contracts.Sandbox` over :meth:`_start`.

    Commands are told apart by an environment variable, so one that clears its environment and leaves its session
    outlives a timeout; a provider that can see processes from outside overrides :meth:`_kill_command`.
    """

    #: What the shell of a command still does when the command has ended and this side knows it: shell statements, for a
    #: machine that would otherwise close the streams under a background process.
    linger: ClassVar[str] = ""
    #: Seconds for which the machine's own programs may be silent in the middle of a file's way out.
    patience: float = 60.0
    #: Seconds for which no more of a command's output may arrive once it has ended and said so.
    silence: float = 30.0
    #: Seconds that a command of our own, by which others are killed, may take.
    kill_seconds: float = 30.0
    #: Seconds that a command which was killed may take to end, as told by what may be a slow service, before all others
    #: are killed too.
    dying_seconds: float = 15.0
    #: The service's own interface for files, used where the machine's programs fail.
    files: FileService | None = None

    def __init__(self, sandbox: str, *, workdir: str, env: Mapping[str, str]) -> None:
        """``sandbox`` is its id; ``env`` is added to every command's."""
        self.id = sandbox
        #: Programs needed here that the machine never had, such as "tar".
        self.lacks = ""
        self.workdir = workdir
        self.env = {**_BASE_ENV, **env}
        self._closing = asyncio.Event()
        self._destroying: asyncio.Task[None] | None = None
        self._leftovers: set[asyncio.Task[None]] = set()
        self._killer_works = False
        self._killing = asyncio.Lock()

    @abc.abstractmethod
    async def _start(
        self, argv: Sequence[str], *, cwd: str | None, env: Mapping[str, str], user: str | None
    ) -> Process:
        """Start a process. ``env`` is complete but for what the image sets; ``user`` None is the sandbox's own root.

        Its :meth:`~rl_harness.contracts.Process.wait` returns once the process itself has exited, whoever else holds
        its streams. A user that does not exist raises :class:`UnknownUser`, a live machine that cannot start it
        :class:`CannotStart`; a machine that is gone, ``SandboxError``.
        """

    async def _place(self, path: str, program: bytes) -> None:
        """Write over the executable file at ``path``, without any program of the machine's and without changing its
        mode. For providers whose service can, which also call :meth:`_try_killer`. Raises
        :class:`~rl_harness.errors.UnsafeFiles` with ``full`` where there is no room."""
        raise Unsupported(f"{type(self).__name__} has no way to place a program")

    async def _start_placed(
        self, argv: Sequence[str], *, cwd: str | None, env: Mapping[str, str], user: str | None
    ) -> Process:
        """:meth:`_start` for a program that was placed, without any other program of the machine's."""
        return await self._start(argv, cwd=cwd, env=env, user=user)

    @abc.abstractmethod
    async def _destroy(self) -> None:
        """Remove the machine and every trace of it. Called once; a machine that is gone already is no error."""

    # ------------------------------------------------------------------------------------------------- commands

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
        mark = secrets.token_hex(8)
        script = f"{_RUN}{self.linger}exit $code"
        argv = ["/bin/sh", "-c", script, "sh", cwd or self.workdir, mark, *_argv(command)]
        running = self._collect(
            argv,
            env=env,
            user=user,
            stdin=stdin,
            timeout=timeout,
            limit=output_limit,
            mark=f"\036{mark}:".encode(),  # not as it stands in the arguments, which ``ps`` shows
        )
        return await self._guarded(running)

    async def spawn(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> Process:
        mark = secrets.token_hex(8)
        argv = ["/bin/sh", "-c", _EXEC, "sh", cwd or self.workdir, *_argv(command)]
        try:
            process = await self._guarded(
                self._start(argv, cwd="/", env={**self.env, **(env or {}), MARK: mark}, user=user)
            )
        except UnknownUser as error:
            raise SandboxError(f"cannot start the command: {error}") from None
        except CannotStart as error:
            raise await self._broken(f"cannot start the command: {error}") from None
        return _Spawned(process, lambda: self._kill_command(mark))

    async def kill_processes(self) -> None:
        # All but the first process and the shell itself; again, for what was starting meanwhile.
        killer = "for n in 1 2 3; do kill -9 -1 2>/dev/null; done; exit 0"
        result = await self.run(["/bin/sh", "-c", killer], timeout=self.kill_seconds, last=True)
        if result.exit_code:
            raise await self._broken(f"its processes could not be killed: {_text(result)}")

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | AsyncIterable[bytes] = b"",
        timeout: float | None = None,
        output_limit: int | None = _SAID,
        last: bool = False,
    ) -> ExecResult:
        """A command of our own in ``/``, as root, with nothing of the task's environment. ``last``: one by which others
        are killed, so that nothing is left to kill it with when its time is over."""
        collected = self._collect(argv, env=None, stdin=stdin, timeout=timeout, limit=output_limit, last=last)
        return await self._guarded(collected)

    async def _collect(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bytes | AsyncIterable[bytes] = b"",
        timeout: float | None = None,
        limit: int | None = None,
        mark: bytes = b"",
        last: bool = False,
        placed: bool = False,
    ) -> ExecResult:
        started = time.perf_counter()
        token = secrets.token_hex(8)
        complete = {**self.env, **(env or {}), MARK: token} if mark else {}
        start = self._start_placed if placed else self._start
        try:
            process = await start(argv, cwd="/", env=complete, user=user)
        except UnknownUser as error:
            return ExecResult(exit_code=126, stderr=f"{error}\n".encode(), seconds=time.perf_counter() - started)
        except CannotStart as error:
            said, seconds = f"{error}\n".encode(), time.perf_counter() - started
            return ExecResult(exit_code=_NOT_STARTED, stderr=said, seconds=seconds)
        outputs = {name: _Output(limit, mark) for name in ("stdout", "stderr")}
        complete_output = asyncio.Event()
        # What was placed reads no input, and must not depend on what can be sent.
        feeding = asyncio.create_task(_feed(process, stdin) if not placed else _nothing())
        reading = asyncio.create_task(_read(process, outputs, complete_output))
        arriving = asyncio.create_task(complete_output.wait())
        timed_out = False
        try:
            try:
                async with asyncio.timeout(timeout):
                    code = await _exit_code(process, outputs, arriving)
            except TimeoutError:
                timed_out = True
                if mark:
                    await self._kill_command(token)
                    code = await self._end(process)
                else:
                    code = _KILLED
                    if not last:
                        await self._give_up(process)
            if timed_out or code > 128:
                await asyncio.wait({arriving}, timeout=_DRAIN)
            else:
                await self._arrived(arriving, outputs)
            if reading.done():
                reading.result()
            elif mark and not timed_out:
                self._keep_draining(reading)
        except BaseException:
            if mark or not last:
                await _uninterrupted(self._kill_command(token) if mark else self._give_up(process))
            raise
        finally:
            ending = {feeding, reading, arriving} - self._leftovers
            for task in ending:
                task.cancel()
            await asyncio.wait(ending)
        if not feeding.cancelled():
            feeding.result()
        signal = code - 128 if 128 < code <= 128 + _LAST_SIGNAL else None
        return ExecResult(
            exit_code=code,
            signal=signal,
            stdout=outputs["stdout"].data(),
            stderr=outputs["stderr"].data(),
            timed_out=timed_out,
            stdout_truncated=outputs["stdout"].truncated,
            stderr_truncated=outputs["stderr"].truncated,
            seconds=time.perf_counter() - started,
        )

    async def _arrived(self, arriving: asyncio.Task[Any], outputs: Mapping[str, _Output]) -> None:
        """Wait for the rest of the output of a command that has ended, which is on its way as long as some arrives."""
        heard = -1
        while not arriving.done():
            before, heard = heard, sum(output.heard for output in outputs.values())
            if heard == before:
                # Held by what no shell of ours has left, since that marks the end.
                raise await self._broken("a command has ended, and the end of its output does not come")
            await asyncio.wait({arriving}, timeout=self.silence)

    def _keep_draining(self, reading: asyncio.Task[None]) -> None:
        """A background process that holds a stream of a command that has ended is neither blocked nor killed by it."""
        self._leftovers.add(reading)

        def ended(task: asyncio.Task[None]) -> None:
            self._leftovers.discard(task)
            if not task.cancelled():
                task.exception()  # retrieved: the stream broke, which is nobody's concern any more

        reading.add_done_callback(ended)

    async def _kill_command(self, mark: str) -> None:
        """Kill every process of the command that was started with this mark; all processes, where that fails (such as
        when no further one can be started)."""
        if self._killer_works:
            try:
                killed = await self._killed_by_ours("marked", f"{MARK}={mark}")
            except SandboxError:
                if not await self.alive():
                    return
                killed = False
            if not killed:
                await self.kill_processes()
            return
        argv = ["/bin/sh", "-c", _KILL_MARKED, "sh", f"{MARK}={mark}"]
        for _ in range(_KILL_TRIES):
            try:
                result = await self._collect(argv, timeout=self.kill_seconds, limit=_SAID, last=True)
            except SandboxError:
                if not await self.alive():
                    return
                continue
            if result.ok:
                return
            if result.signal is None or result.timed_out:
                break
            # Killed itself, by who kills everything: asked again, not a reason to kill what has started since.
        await self.kill_processes()

    async def _try_killer(self) -> None:
        """Find out whether a program of ours can be placed and run here, before anything of a task's runs, so that
        later no program of the machine's need be believed that processes are dead."""
        try:
            self._killer_works = b"1:" in (await self._run_ours("list")).stdout
        except (SandboxError, Unsupported):
            self._killer_works = False

    async def _killed_by_ours(self, *arguments: str) -> bool:
        return killer.killed((await self._run_ours(*arguments)).stdout)

    async def _run_ours(self, *arguments: str) -> ExecResult:
        """Place the program that kills, and run it. Raises :class:`~rl_harness.errors.BrokenSandbox` when a machine
        that lives does not let it."""
        said, full = "", False
        async with self._killing:
            for place in (*killer.PLACES, *killer.PLACES):
                try:
                    if full:  # what the others hold is room that is kept for this
                        for other in killer.PLACES:
                            await self._place(other, b"")
                    await self._place(place, killer.program())
                    argv = [place, *arguments]
                    result = await self._collect(argv, timeout=self.kill_seconds, limit=_SAID, last=True, placed=True)
                except SandboxError as error:
                    if not await self.alive():
                        raise
                    said, full = error.message, isinstance(error, UnsafeFiles) and error.full
                    continue
                if result.exit_code not in _CANNOT_RUN and (result.signal is None or result.timed_out):
                    return result
                said = _text(result) or f"exit code {result.exit_code}"
        broken = await self._broken(f"the program that kills its processes cannot be run: {said}")
        raise BrokenSandbox(broken.message, full=True) if full else broken

    async def _end(self, process: Process) -> int:
        """The exit code of a command that was killed; with all other processes, if it has not ended by then: the
        machine's programs, which told that it was killed, may be an agent's."""
        for patience, last in ((self.dying_seconds, False), (self.kill_seconds, True)):
            try:
                async with asyncio.timeout(patience):
                    return await process.wait()
            except TimeoutError:
                if not last:
                    await self.kill_processes()
        raise await self._broken("a command could not be killed")

    async def _give_up(self, process: Process) -> None:
        """End a command of our own that does not end."""
        await process.kill()

    async def _broken(self, message: str) -> SandboxError:
        """The error for what the machine's own programs did not do."""
        message = f"sandbox {self.id}: {message}"
        if self.lacks:
            return SandboxError(message, remedy=f"give the task an image that has {self.lacks}")
        return BrokenSandbox(message) if await self.alive() else SandboxError(message)

    async def _guarded(self, operation: Coroutine[Any, Any, T]) -> T:
        """Raises ``SandboxError`` when the sandbox is closed, or is closed meanwhile."""
        if self._closing.is_set():
            operation.close()
            raise SandboxError(f"sandbox {self.id} is closed")
        task = asyncio.ensure_future(operation)
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            await asyncio.wait({task, closing}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise SandboxError(f"sandbox {self.id} was closed")
            return task.result()
        finally:
            closing.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    # ---------------------------------------------------------------------------------------------------- files

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        _absolute(path)
        result = await self.run(["/bin/sh", "-c", _WRITE, "sh", path, f"{mode:o}"], stdin=data)
        await self._check(result, path)

    async def read_file(self, path: str, *, limit: int | None = None) -> bytes:
        _absolute(path)
        try:
            return await self._read_file(path, limit)
        except BrokenSandbox as error:
            if self.files is None:
                raise
            return await self._guarded(self._rescue(rescued_file(self.files, path, limit), error))

    async def _read_file(self, path: str, limit: int | None) -> bytes:
        asked = "" if limit is None else str(limit)
        # One byte more than was asked for, in case the file grows while it is read.
        result = await self.run(
            ["/bin/sh", "-c", _READ, "sh", path, asked], output_limit=None if limit is None else limit + 1
        )
        await self._check(result, path)
        if limit is not None and len(result.stdout) > limit:
            raise UnsafeFiles(f"{path}: more than {limit} bytes")
        return result.stdout

    async def upload(self, source: Path, target: str) -> None:
        _absolute(target)
        name = PurePosixPath(target).name
        stream = packed(source, name)
        try:
            result = await self.run(["/bin/sh", "-c", _UPLOAD, "sh", target.rstrip("/")], stdin=stream)
        finally:
            await stream.aclose()  # type: ignore[attr-defined]  # an async generator
        await self._check(result, target)

    async def download(
        self, source: str, target: Path, *, limit: int | None = None, skip_unsafe: bool = False
    ) -> list[str]:
        _absolute(source)
        source = source.rstrip("/")
        try:
            return await self._guarded(self._download(source, target, limit, skip_unsafe))
        except BrokenSandbox as error:
            if self.files is None:
                raise
            await asyncio.to_thread(_remove, target)
            rescue = rescued(self.files, source, target, limit=limit, skip_unsafe=skip_unsafe)
            return await self._guarded(self._rescue(rescue, error))

    async def _rescue(self, rescue: Coroutine[Any, Any, T], broken: BrokenSandbox) -> T:
        """What the service gets out of a broken machine. Its agent broke it: what cannot be had in time this way counts
        as if it were not there."""
        try:
            async with asyncio.timeout(_RESCUE_SECONDS):
                return await rescue
        except TimeoutError:
            raise broken from None
        except UnsafeFiles:
            raise
        except SandboxError:
            if await self.alive():
                raise broken from None
            raise

    async def _download(self, source: str, target: Path, limit: int | None, skip_unsafe: bool) -> list[str]:
        try:
            process = await self._start(["/bin/sh", "-c", _DOWNLOAD, "sh", source], cwd="/", env={}, user=None)
        except CannotStart as error:
            raise await self._broken(f"{source}: {error}") from None
        errors = _Output(DEFAULT_OUTPUT_LIMIT, b"")
        outcome: UnsafeFiles | None = None
        left_out: list[str] = []
        try:
            await process.close_stdin()
            try:
                left_out = await unpack(
                    _stdout(process, errors, self.patience), target, limit=limit, skip_unsafe=skip_unsafe
                )
            except UnsafeFiles as error:
                outcome = error
                if not errors.ended:  # refused by us: what is still to come is not waited for
                    raise
            async with asyncio.timeout(self.patience):
                code = await process.wait()
        except BaseException as error:
            await _uninterrupted(self._give_up(process))
            if isinstance(error, TimeoutError):
                raise await self._broken(f"{source}: nothing came for {self.patience:g} s") from None
            raise
        await self._check(ExecResult(exit_code=code, stderr=errors.data()), source)
        if outcome is not None:
            raise outcome
        return left_out

    async def _check(self, result: ExecResult, path: str) -> None:
        """Turn the exit codes of our scripts into the contract's errors."""
        if result.exit_code == _MISSING:
            raise FileNotFoundError(f"{path}: no such file")
        if result.exit_code and no_room(text := _text(result)):
            raise UnsafeFiles(f"{path}: {text}", full=True)
        if result.exit_code in (_REFUSED, _TOO_LARGE):
            raise UnsafeFiles(_text(result) or f"{path}: refused")
        if result.exit_code:
            raise await self._broken(f"{path}: {_text(result) or f'exit code {result.exit_code}'}")

    # ------------------------------------------------------------------------------------------------ lifecycle

    async def close(self) -> None:
        self._closing.set()
        for task in list(self._leftovers):
            task.cancel()
        if self._destroying is None:
            self._destroying = asyncio.create_task(self._destroy())
        await asyncio.shield(self._destroying)


class _Spawned(Process):
    """A started process whose descendants die with it."""

    def __init__(self, process: Process, kill: Any) -> None:
        self._process = process
        self._kill = kill

    def output(self) -> AsyncIterator[tuple[str, bytes]]:
        return self._process.output()

    async def write(self, data: bytes) -> None:
        await self._process.write(data)

    async def close_stdin(self) -> None:
        await self._process.close_stdin()

    async def wait(self) -> int:
        return await self._process.wait()

    async def kill(self) -> None:
        await self._kill()
        await self._process.kill()


class _Output:
    """Keeps the first ``limit`` bytes of a stream, up to ``mark`` where the command ended, which its exit ``code`` and
    a separator follow."""

    def __init__(self, limit: int | None, mark: bytes) -> None:
        self._limit = limit
        self._mark = mark
        self._data = bytearray()
        self._tail = b""  # what may be the beginning of the mark, and of the code after it
        self.truncated = False
        self.ended = False
        self.heard = 0
        self.code: int | None = None

    def add(self, chunk: bytes) -> None:
        if self.ended:
            return
        self.heard += len(chunk)
        chunk = self._tail + chunk
        at = self._surely_before_mark(chunk) if self._mark else len(chunk)
        self._tail = b"" if self.ended else chunk[at:]
        self._keep(chunk[:at])

    def _surely_before_mark(self, chunk: bytes) -> int:
        """How far a chunk is output. What follows is the mark, which ends it, or may be the beginning of it; a command
        can print the mark too, which it finds among the arguments of its shell, and then go on."""
        at = -1
        while (at := chunk.find(self._mark, at + 1)) >= 0:
            begin = at + len(self._mark)
            end = chunk.find(b"\036", begin, begin + _LONGEST_CODE + 1)
            if end < 0 and len(chunk) - begin <= _LONGEST_CODE:
                return at
            if end >= 0 and chunk[begin:end].isdigit():
                self.ended, self.code = True, int(chunk[begin:end])
                return at
        longest = min(len(self._mark) - 1, len(chunk))
        return len(chunk) - next((n for n in range(longest, 0, -1) if chunk.endswith(self._mark[:n])), 0)

    def _keep(self, chunk: bytes) -> None:
        room = len(chunk) if self._limit is None else self._limit - len(self._data)
        self._data += chunk[:room]
        self.truncated = self.truncated or len(chunk) > room

    def data(self) -> bytes:
        if self._tail:
            self._keep(self._tail)
            self._tail = b""
        return bytes(self._data)


async def _exit_code(process: Process, outputs: Mapping[str, _Output], arriving: asyncio.Task[Any]) -> int:
    """As its shell told it at the end of the output, or the machine, which may wait for background processes too."""
    waiting = asyncio.ensure_future(process.wait())
    try:
        await asyncio.wait({waiting, arriving}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done() and (told := outputs["stdout"].code) is not None:
            return told
        return await waiting
    finally:
        waiting.cancel()
        await asyncio.wait({waiting})


async def _read(process: Process, outputs: Mapping[str, _Output], complete: asyncio.Event) -> None:
    """Read until both streams have ended; ``complete`` once all of the command's own output is there."""
    try:
        async for name, chunk in process.output():
            outputs[name].add(chunk)
            if all(output.ended for output in outputs.values()):
                complete.set()
    finally:
        complete.set()


async def _stdout(process: Process, errors: _Output, patience: float) -> AsyncIterator[bytes]:
    """Raises ``TimeoutError`` when nothing more comes for ``patience`` seconds."""
    output = aiter(process.output())
    while True:
        try:
            async with asyncio.timeout(patience):
                name, chunk = await anext(output)
        except StopAsyncIteration:
            break
        if name == "stdout":
            yield chunk
        else:
            errors.add(chunk)
    errors.ended = True


async def _feed(process: Process, stdin: bytes | AsyncIterable[bytes]) -> None:
    """Write all of stdin and close it. A command that does not read it, or has ended, is not an error; a source that
    fails is, and ends the command."""
    gone = (SandboxError, OSError)
    if isinstance(stdin, bytes):
        with contextlib.suppress(*gone):
            if stdin:
                await process.write(stdin)
            await process.close_stdin()
        return
    try:
        async for chunk in stdin:
            try:
                await process.write(chunk)
            except gone:
                return
    except Exception:
        await process.kill()
        raise
    with contextlib.suppress(*gone):
        await process.close_stdin()


async def _nothing() -> None:
    return


async def _uninterrupted(operation: Coroutine[Any, Any, None]) -> None:
    """Carry a clean-up to its end under cancellation; its own failure does not hide what led here."""
    task = asyncio.ensure_future(operation)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
    except Exception:
        return


def _remove(path: Path) -> None:
    """What came of an archive before it broke off."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def no_room(text: str) -> bool:
    """Whether a program, or a service, says that a disk is full."""
    return _NO_ROOM.search(text) is not None


def _argv(command: Command) -> list[str]:
    return ["/bin/sh", "-c", _SHELL, "sh", command] if isinstance(command, str) else [*command]


def _absolute(path: str) -> None:
    if not path.startswith("/") or path.rstrip("/") == "" or "\0" in path:
        raise UnsafeFiles(f"{path!r}: a path in a sandbox must be absolute and not its root")
    if ".." in path.split("/"):
        raise UnsafeFiles(f"{path}: contains '..'")


def _text(result: ExecResult) -> str:
    return result.stderr[-2000:].decode("utf-8", "replace").strip()
