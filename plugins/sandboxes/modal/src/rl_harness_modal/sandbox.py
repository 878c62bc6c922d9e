"""A sandbox on Modal: the contract's methods through the SDK's ``exec``, its snapshots, its word on what ended it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import shlex
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

import modal
import msgspec
from modal import exception
from rl_harness.contracts.sandbox import Process, Sandbox, SandboxSpec
from rl_harness.errors import SandboxError, Unsupported
from rl_harness.sandboxes.remote import (
    MAKE_PLACES,
    MARK,
    CannotStart,
    RemoteSandbox,
    as_user,
    look_around,
    seen,
    signal_processes,
    signalled,
)

from rl_harness_modal.files import ModalFiles
from rl_harness_modal.index import SnapshotIndex
from rl_harness_modal.service import FAILURES, Gone, Service, failure, finished

#: The SDK refuses longer arguments; a longer command goes in on stdin.
LONGEST_COMMAND = 60_000

_STDIN_CHUNK = 1 << 20
_SNAPSHOT_SECONDS = 900
_FORK_TTL = 24 * 3600  # as long as any sandbox lives
_CLOSE_SECONDS = 60.0
_KILL_PAUSE = 0.2
_KILL_TRIES, _DEAD_SECONDS = 4, 1.0
_WATCH_PAUSE = 5.0
_LOOK_SECONDS = 30.0
_TIMED_OUT, _TERMINATED = 124, 137  # the SDK's codes for what ended a sandbox
_KILLED, _NOT_STARTED = 137, 127

#: What writing to a command that has ended or closed its stdin may raise. Programs need not read their stdin.
_NOT_READING = (exception.NotFoundError, exception.InvalidError, ValueError)

# $0 a line that ends the command, which comes first on stdin; the shell reads it without reading ahead.
_FROM_STDIN = """s=
while IFS= read -r l && [ "$l" != "$0" ]; do s="$s$l
"; done
eval "$s"
"""


class ModalSandbox(RemoteSandbox):
    """See :class:`rl_harness.contracts.Sandbox`.

    ``spec`` is what it was made for, None for one that was found again; ``create`` makes its forks; ``later`` carries
    an operation to its end in the background; ``forget`` takes it off its provider's list.
    """

    kill_seconds = 60.0

    def __init__(
        self,
        service: Service,
        handle: modal.Sandbox,
        index: SnapshotIndex,
        *,
        workdir: str,
        spec: SandboxSpec | None,
        create: Callable[[SandboxSpec], Coroutine[Any, Any, Sandbox]],
        later: Callable[[Coroutine[Any, Any, object]], object],
        forget: Callable[[], object],
    ) -> None:
        super().__init__(handle.object_id, workdir=workdir, env=spec.environment.env if spec else {})
        self._service = service
        self._handle = handle
        self._index = index
        self._spec = spec
        self._create = create
        self._later = later
        self._forget = forget
        self.lacks = "sh"  # nothing is known of it yet
        self._spared: list[str] = []
        self.files = self._own_files = ModalFiles(handle, service.patiently, self._failed)

    async def prepare(self) -> None:
        """Make the working directory, and note what runs before anything of a task does: Modal's own processes and
        the entry point, whose end would be the sandbox's."""
        script = f'mkdir -p -- "$1" || exit 1\n{MAKE_PLACES}\nshift; exec "$@"'
        argv = ["/bin/sh", "-c", script, "sh", self.workdir, *look_around()]
        result = await self.run(argv, timeout=self.kill_seconds)
        await self._check(result, self.workdir)
        self._spared, self.lacks = seen(result.stdout.decode("utf-8", "replace").split())
        await self._try_killer()

    async def _start(
        self, argv: Sequence[str], *, cwd: str | None, env: Mapping[str, str], user: str | None
    ) -> Process:
        mark = env.get(MARK) or secrets.token_hex(8)
        variables: dict[str, str | None] = {**env, MARK: mark}
        command = as_user(user, argv)
        first = b""
        if sum(len(word.encode("utf-8", "surrogateescape")) for word in command) > LONGEST_COMMAND:
            end = secrets.token_hex(8)
            first = f"exec {shlex.join(command)}\n{end}\n".encode("utf-8", "surrogateescape")
            command = ["/bin/sh", "-c", _FROM_STDIN, end]
        # The SDK repeats a request under the number that it gave the command, so that it runs once; another request of
        # ours would be another command. An answer may have got lost before Modal turned down the repetition, and
        # nothing tells. So only commands of our own, which do no harm twice, are asked for again.
        ask = functools.partial(self._handle.exec.aio, *command, workdir=cwd, env=variables, text=False)
        starting = asyncio.ensure_future(ask() if MARK in env else self._service.patiently(ask))
        try:
            process = await asyncio.shield(starting)
        except asyncio.CancelledError:
            self._later(self._abandon(starting, mark))
            raise
        except FAILURES as error:
            failed = await self._failed("start a command", error)
            if not isinstance(error, exception.InvalidError):
                self._later(self._kill_abandoned(mark))  # it may run all the same
            if isinstance(error, exception.InvalidError) and await self.alive():
                raise CannotStart(failed.message) from None
            raise failed from None
        started = ModalProcess(
            process, self._service.patiently, self._failed, self._look, lambda: self._kill_command(mark)
        )
        if first:
            await started.write(first)
        return started

    async def _abandon(self, starting: asyncio.Future[Any], mark: str) -> None:
        """End a command that nobody waits for any more, once it runs; it ends with its machine, too."""
        starting.add_done_callback(_observed)
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            await asyncio.wait({starting, closing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            closing.cancel()
        if starting.done():
            await self._kill_abandoned(mark)
        else:
            starting.cancel()  # the SDK waits for ever for an answer from a machine that it was detached from

    async def _kill_abandoned(self, mark: str) -> None:
        with contextlib.suppress(SandboxError):  # its machine is gone, or so is Modal
            await self._guarded(self._kill_command(mark))

    async def _failed(self, what: str, error: BaseException) -> SandboxError:
        """The error to raise for the SDK's: that of a machine that is gone says what became of it."""
        if isinstance(error, exception.NotFoundError | exception.ConflictError):
            try:
                reason = await self._ended()
            except SandboxError:
                reason = ""
            if reason:
                return SandboxError(f"{reason}: cannot {what}")
        return failure(f"sandbox {self.id}: cannot {what}", error)

    async def _look(self) -> None:
        """Raises SandboxError when the machine is known to be gone."""
        try:
            reason = await self._ended()
        except SandboxError:
            return  # Modal is out of reach, which says nothing about the machine
        if reason:
            raise SandboxError(reason)

    async def _place(self, path: str, program: bytes) -> None:
        await self._own_files.write(path, program)

    async def kill_processes(self) -> None:
        if self._killer_works:
            if not await self._guarded(self._killed_by_ours("all", *self._spared)):
                raise await self._broken("its processes could not be killed: new ones keep appearing")
            return
        deadline = time.monotonic() + self.kill_seconds
        while True:
            result = await self.run(signal_processes("KILL", self._spared), timeout=self.kill_seconds, last=True)
            if signalled(result.stdout):
                return
            # A full machine may have no room to start even this; but no shell that works ends well without a word.
            if result.ok or result.exit_code == _NOT_STARTED or time.monotonic() > deadline:
                reason = result.stderr.decode("utf-8", "replace").strip() or "its shell does not do what it is told"
                raise await self._broken(f"its processes could not be killed: {reason}")
            await asyncio.sleep(_KILL_PAUSE)

    async def snapshot(self, *, key: str = "", labels: Mapping[str, str] | None = None) -> str:
        image = await self._guarded(self._freeze(self._index.ttl))
        try:
            self._index.add(image, key, labels or {})
        except BaseException:
            self._later(self._service.delete_image(image))
            raise
        return image

    async def _freeze(self, ttl: int | None) -> str:
        """The id of a new image of the file system. Nothing is left of one that nobody waits for any more."""
        freezing = asyncio.create_task(
            self._service.call(
                f"snapshot of sandbox {self.id}",
                lambda: self._handle.snapshot_filesystem.aio(timeout=_SNAPSHOT_SECONDS, ttl=ttl),
            )
        )
        try:
            image = await asyncio.shield(freezing)
        except asyncio.CancelledError:
            self._later(self._unfreeze(freezing))
            raise
        return str(image.object_id)

    async def _unfreeze(self, freezing: asyncio.Task[modal.Image]) -> None:
        try:
            await self._service.delete_image(str((await freezing).object_id))
        except SandboxError:
            return  # there is none, or it is dropped at the end of its time

    async def fork(self, count: int) -> list[Sandbox]:
        if self._spec is None:
            raise Unsupported(f"sandbox {self.id} was found again, and what it was made for is not known: cannot fork")
        image = await self._guarded(self._freeze(_FORK_TTL))
        spec = msgspec.structs.replace(self._spec, snapshot=image)
        making = [asyncio.create_task(self._create(spec)) for _ in range(count)]
        try:
            return await asyncio.gather(*making)
        except BaseException:
            for fork in making:
                fork.cancel()
            self._later(_close_all(making))
            raise

    async def died(self) -> str:
        while not self._closing.is_set():
            try:
                await self._handle.wait.aio(raise_on_termination=False)
            except exception.SandboxTimeoutError:
                pass
            except exception.NotFoundError:
                return f"Modal has no sandbox {self.id} any more"
            except FAILURES:  # Modal is out of reach, which says nothing about the sandbox
                await asyncio.sleep(_WATCH_PAUSE)
                continue
            if not self._closing.is_set():
                return self._reason(self._handle.returncode)
        closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await closed  # it did not die by itself: this ends by cancellation

    async def alive(self) -> bool:
        return not self._closing.is_set() and not await self._ended()

    async def _ended(self) -> str:
        """What ended the sandbox; "" while it runs."""
        try:
            code = await self._service.call(f"ask about sandbox {self.id}", self._handle.poll.aio)
        except Gone:
            return f"Modal has no sandbox {self.id} any more"
        return self._reason(code) if code is not None else ""

    def _reason(self, code: int | None) -> str:
        if code == _TIMED_OUT:
            lifetime = f" of {self._spec.lifetime:g} s" if self._spec else ""
            return f"sandbox {self.id} ended: its lifetime{lifetime} is over"
        if code == _TERMINATED:
            return f"sandbox {self.id} ended: it was terminated"
        return f"sandbox {self.id} ended by itself with exit code {code}"

    async def _destroy(self) -> None:
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._service.call(f"end sandbox {self.id}", self._terminate)
        except TimeoutError:
            raise SandboxError(f"Modal: sandbox {self.id} did not end within {_CLOSE_SECONDS:g} s") from None
        finally:
            self._forget()
            await self._handle.detach.aio()

    async def _terminate(self) -> None:
        try:
            await self._handle.terminate.aio(wait=True)
        except (exception.NotFoundError, exception.SandboxTimeoutError):
            return  # it is gone already


class ModalProcess(Process):
    """A command that was started through the SDK.

    ``patiently`` repeats what Modal refuses for now; ``failed`` makes the error to raise of one of the SDK's; ``look``
    raises one when the machine is gone.
    """

    def __init__(
        self,
        process: Any,
        patiently: Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]],
        failed: Callable[[str, BaseException], Awaitable[SandboxError]],
        look: Callable[[], Awaitable[None]],
        kill: Callable[[], Awaitable[None]],
    ) -> None:
        self._process = process
        self._patiently = patiently
        self._failed = failed
        self._look = look
        self._kill = kill
        # Set to the failure of a write: nobody knows how much got there, and the command may wait for the rest.
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def _lose(self, error: BaseException) -> SandboxError:
        failed = await self._failed("write to a command", error)
        if not self._lost.done():
            self._lost.set_exception(failed)
            self._lost.exception()  # whoever waits gets it; nobody need
        return failed

    async def output(self) -> AsyncIterator[tuple[str, bytes]]:
        streams: dict[str, Any] = {}
        reads = {asyncio.create_task(self._next(streams, name)): name for name in ("stdout", "stderr")}
        try:
            while reads:
                await asyncio.wait({*reads, self._lost}, return_when=asyncio.FIRST_COMPLETED)
                if self._lost.done():
                    self._lost.result()
                for read in [read for read in reads if read.done()]:
                    name = reads.pop(read)
                    if chunk := read.result():
                        reads[asyncio.create_task(self._next(streams, name))] = name
                        yield name, chunk
        except FAILURES as error:
            raise await self._failed("read the output of a command", error) from None
        finally:
            await finished(_close(streams.values(), reads))

    async def _next(self, streams: dict[str, Any], name: str) -> bytes:
        """The next bytes of a stream; empty at its end. One that broke is opened again where it was."""

        async def attempt() -> bytes:
            if name not in streams:
                streams[name] = aiter(getattr(self._process, name))
            try:
                return await anext(streams[name], b"")
            except FAILURES:
                del streams[name]
                raise

        return bytes(await self._patiently(attempt))

    async def write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            for start in range(0, len(view), _STDIN_CHUNK):
                self._process.stdin.write(bytes(view[start : start + _STDIN_CHUNK]))
                await self._patiently(self._process.stdin.drain.aio)
        except _NOT_READING:
            return
        except FAILURES as error:
            raise await self._lose(error) from None

    async def close_stdin(self) -> None:
        try:
            self._process.stdin.write_eof()
            await self._patiently(self._process.stdin.drain.aio)
        except _NOT_READING:
            return
        except FAILURES as error:
            raise await self._lose(error) from None

    async def wait(self) -> int:
        waiting = asyncio.ensure_future(self._patiently(self._process.wait.aio))
        waiting.add_done_callback(_observed)
        try:
            # The SDK asks for ever where the machine and what it ran on are both gone.
            either: set[asyncio.Future[Any]] = {waiting, self._lost}
            first = asyncio.FIRST_COMPLETED
            while not (await asyncio.wait(either, timeout=_LOOK_SECONDS, return_when=first))[0]:
                await self._look()
            if not waiting.done():
                self._lost.result()
            code = int(waiting.result())
            if code == _KILLED:  # the end of a command that the machine's own end killed is not the command's
                await self._look()
            return code
        except FAILURES as error:
            raise await self._failed("wait for a command", error) from None
        finally:
            waiting.cancel()

    async def kill(self) -> None:
        for _ in range(_KILL_TRIES):
            try:
                if await self._patiently(self._process.poll.aio) is not None:
                    return
                await self._kill()
                async with asyncio.timeout(_DEAD_SECONDS):
                    await self._patiently(self._process.wait.aio)
            except TimeoutError:
                continue  # one that was only just starting did not carry its mark yet
            except FAILURES:
                return  # the machine is gone, and the command with it


def _observed(task: asyncio.Future[Any]) -> None:
    """Its failure is of no concern to anybody any more."""
    if not task.cancelled():
        task.exception()


async def _close_all(making: Sequence[asyncio.Task[Sandbox]]) -> None:
    """Close those sandboxes that came to be."""
    outcomes = await asyncio.gather(*making, return_exceptions=True)
    await asyncio.gather(*(made.close() for made in outcomes if isinstance(made, Sandbox)))


async def _close(streams: Iterable[Any], reads: Mapping[asyncio.Task[bytes], str]) -> None:
    """Stop reading: the requests behind the streams end too."""
    for read in reads:
        read.cancel()
    await asyncio.gather(*reads, return_exceptions=True)
    await asyncio.gather(*(stream.aclose() for stream in streams), return_exceptions=True)
