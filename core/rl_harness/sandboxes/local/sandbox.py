"""A running local sandbox, seen from the host: the contract's methods as requests to its init."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from rl_harness.contracts.sandbox import (
    DEFAULT_OUTPUT_LIMIT,
    Command,
    ExecResult,
    Process,
    Sandbox,
    SandboxSpec,
)
from rl_harness.errors import SandboxError, UnsafeFiles
from rl_harness.sandboxes import trees
from rl_harness.sandboxes.flights import finished
from rl_harness.sandboxes.local.channel import Channel
from rl_harness.sandboxes.local.workers import Job, Workers
from rl_harness.sandboxes.streams import Collector, Reader, Writer, feed, merge

KILL_GRACE = 30.0
_MAX_LISTING = 64 << 20

T = TypeVar("T")


class Maker(Protocol):
    """What a sandbox needs of its provider to be frozen, forked and ended. ``ends``: so many are killed at once."""

    ends: asyncio.Semaphore

    async def freeze(self, sandbox: LocalSandbox, *, key: str, labels: Mapping[str, str], temporary: bool) -> str: ...

    async def create(self, spec: SandboxSpec) -> Sandbox: ...

    async def delete_snapshot(self, snapshot: str) -> None: ...


def exit_code(status: int) -> tuple[int, int | None]:
    """Exit code and signal of a wait status."""
    if os.WIFSIGNALED(status):
        return 128 + os.WTERMSIG(status), os.WTERMSIG(status)
    return os.WEXITSTATUS(status), None


class LocalSandbox(Sandbox):
    """See :class:`rl_harness.contracts.Sandbox`.

    ``layers`` are the snapshots it stands on, newest first, and ``base`` tells what those stand on. ``remove`` (run in
    ``pool``) clears what is left on disk; ``forget`` then takes it off the provider's list.
    """

    def __init__(
        self,
        name: str,
        channel: Channel,
        *,
        spec: SandboxSpec,
        env: Mapping[str, str],
        layers: Sequence[str],
        base: Mapping[str, Any],
        maker: Maker,
        pool: Executor,
        remove: Callable[[], None],
        forget: Callable[[], object],
    ) -> None:
        self.id = name
        self._channel = channel
        self._workers = Workers(channel)
        self.layers = layers
        self.base = base
        self._spec = spec
        self._env = {**env, **spec.environment.env}
        self._maker = maker
        self._pool = pool
        self._remove = remove
        self._forget = forget
        self._closing: asyncio.Task[None] | None = None
        self._closed_alive = False
        self._leftovers: set[Collector] = set()

    async def started(self) -> None:
        """Wait until it runs. Raises :class:`~rl_harness.sandboxes.local.channel.StartFailed`."""
        await asyncio.shield(self._channel.started)

    def _submit(self, message: dict[str, Any], descriptors: Sequence[int]) -> Job:
        if self._closing is not None:
            raise SandboxError(f"sandbox {self.id} is closed")
        return self._workers.submit(message, descriptors)

    def _command(
        self, command: Command, cwd: str | None, env: Mapping[str, str] | None, user: str | None
    ) -> dict[str, Any]:
        message: dict[str, Any] = {"op": "exec", "cwd": cwd or self._spec.environment.workdir, "user": user}
        message["env"] = {**self._env, **(env or {})}
        if isinstance(command, str):
            message["shell"] = command
        elif command:
            message["argv"] = list(command)
        else:
            raise ValueError("an empty argv")
        return message

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
        with contextlib.ExitStack() as stack:
            stdin_read, stdin_write = _pipe(stack) if stdin else (_null(stack), -1)
            out_read, out_write = _pipe(stack)
            err_read, err_write = _pipe(stack)
            job = self._submit(self._command(command, cwd, env, user), (stdin_read, out_write, err_write))
            outputs = [Collector(os.dup(descriptor), output_limit) for descriptor in (out_read, err_read)]
            writer = Writer(os.dup(stdin_write)) if stdin else None
        feeding = asyncio.create_task(feed(writer, stdin)) if writer else None
        timed_out = False
        try:
            try:
                async with asyncio.timeout(timeout):
                    message = await asyncio.shield(job.answer)
            except TimeoutError:
                timed_out = True
                message = await self._kill(job)
        except BaseException:
            self._workers.kill(job)
            for output in outputs:
                output.close()
            raise
        finally:
            if feeding is not None:
                feeding.cancel()
        stdout, stderr = (output.finish() for output in outputs)
        for output in outputs:
            self._keep_draining(output)
        status = message.get("status")
        if not isinstance(status, int):
            reason = str(message.get("error"))
            stderr += f"cannot start the command: {reason}\n".encode("utf-8", "replace")
            status = 126 << 8
        code, number_of_signal = exit_code(status)
        if number_of_signal == signal.SIGKILL and not timed_out:
            await self._confirm_alive()
        return ExecResult(
            exit_code=code,
            stdout=stdout,
            stderr=stderr,
            signal=number_of_signal,
            timed_out=timed_out,
            stdout_truncated=outputs[0].truncated,
            stderr_truncated=outputs[1].truncated,
            seconds=time.perf_counter() - started,
        )

    async def _confirm_alive(self) -> None:
        """Raises SandboxError when init is dead or dying: the kernel kills its processes first, and the end of a
        command among them is not the command's own."""
        await self._promptly(self._channel.request({"op": "ping"}))

    def _keep_draining(self, output: Collector) -> None:
        if not output.ended.done():
            self._leftovers.add(output)
            output.ended.add_done_callback(lambda _: self._leftovers.discard(output))

    async def _kill(self, job: Job) -> dict[str, Any]:
        """Kill a command with all its descendants; its answer."""
        killed = self._workers.kill(job)
        if killed is not None:
            await self._promptly(killed)
        return await self._promptly(job.answer)

    async def _promptly(self, answer: asyncio.Future[dict[str, Any]]) -> dict[str, Any]:
        """The answer to a request to kill; a sandbox that does not obey is itself killed."""
        try:
            async with asyncio.timeout(KILL_GRACE):
                return await asyncio.shield(answer)
        except TimeoutError:
            self._channel.kill()
            self._channel.close("it did not kill a command in time")
            raise self._channel.error() from None

    async def spawn(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> Process:
        with contextlib.ExitStack() as stack:
            stdin_read, stdin_write = _pipe(stack)
            out_read, out_write = _pipe(stack)
            err_read, err_write = _pipe(stack)
            job = self._submit(self._command(command, cwd, env, user), (stdin_read, out_write, err_write))
            return LocalProcess(
                Writer(os.dup(stdin_write)),
                Reader(os.dup(out_read)),
                Reader(os.dup(err_read)),
                job.answer,
                partial(self._kill, job),
            )

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        with contextlib.ExitStack() as stack:
            read, write = _pipe(stack)
            job = self._submit({"op": "write", "path": _absolute(path), "mode": mode}, (read,))
            writer = Writer(os.dup(write))
        feeding = asyncio.create_task(feed(writer, data))
        try:
            _raise_for(await self._answer(job))
        finally:
            feeding.cancel()

    async def _answer(self, job: Job) -> dict[str, Any]:
        """The answer about files; the worker is killed when nobody waits for it any more."""
        try:
            return await job.answer
        except asyncio.CancelledError:
            self._workers.kill(job)
            raise

    async def read_file(self, path: str, *, limit: int | None = None) -> bytes:
        return await self._collect({"op": "read", "path": _absolute(path), "limit": limit}, limit)

    async def _collect(self, message: dict[str, Any], limit: int | None) -> bytes:
        with contextlib.ExitStack() as stack:
            read, write = _pipe(stack)
            job = self._submit(message, (write,))
            output = Collector(os.dup(read), limit if limit is not None else sys.maxsize)
        try:
            _raise_for(await self._answer(job))
            await output.ended
            if output.truncated:
                raise UnsafeFiles(f"{message.get('path', self.id)}: more than {limit} bytes")
            return output.finish()
        finally:
            output.close()

    async def upload(self, source: Path, target: str) -> None:
        read, write = os.pipe2(os.O_CLOEXEC)
        try:
            job = self._submit({"op": "unpack", "path": _absolute(target)}, (read,))
        except BaseException:
            os.close(write)
            raise
        finally:
            os.close(read)
        await self._transfer(job, partial(_send_tree, source, write))

    async def download(
        self, source: str, target: Path, *, limit: int | None = None, skip_unsafe: bool = False
    ) -> list[str]:
        read, write = os.pipe2(os.O_CLOEXEC)
        try:
            request = {"op": "pack", "path": _absolute(source), "skip_unsafe": skip_unsafe}
            job = self._submit(request, (write,))
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
        return await self._transfer(job, partial(_receive_tree, read, target, limit, skip_unsafe))

    async def _transfer(self, job: Job, work: Callable[[], T]) -> T:
        """Do this side of a transfer in a thread; what it refused comes before the other side's broken pipe."""
        transfer = asyncio.get_running_loop().run_in_executor(self._pool, work)
        try:
            await asyncio.wait([transfer])
            message = await job.answer
        except asyncio.CancelledError:
            self._workers.kill(job)
            transfer.add_done_callback(_retrieve)
            raise
        try:
            result = transfer.result()
        except trees.TreeError as error:
            _raise_for(message if message.get("kind") != "broken" else {})
            raise UnsafeFiles(str(error)) from None
        _raise_for(message)
        return result

    async def kill_processes(self) -> None:
        if self._closing is not None:
            raise SandboxError(f"sandbox {self.id} is closed")
        await self._promptly(self._channel.request({"op": "kill_all"}))

    async def changes(self) -> list[str]:
        data = await self._collect({"op": "changes"}, _MAX_LISTING)
        return sorted(path.decode("utf-8", "surrogateescape") for path in data.split(b"\0") if path)

    async def snapshot(self, *, key: str = "", labels: Mapping[str, str] | None = None) -> str:
        return await self._maker.freeze(self, key=key, labels=labels or {}, temporary=False)

    async def fork(self, count: int) -> list[Sandbox]:
        snapshot = await self._maker.freeze(self, key="", labels=self._spec.labels, temporary=True)
        spec = msgspec.structs.replace(self._spec, snapshot=snapshot)
        forks = [asyncio.ensure_future(self._maker.create(spec)) for _ in range(count)]
        try:
            try:
                await asyncio.gather(*forks)
            finally:
                await finished(self._maker.delete_snapshot(snapshot))
        except BaseException:  # also when it comes after the last fork was made
            await finished(_undo(forks))
            raise
        return [fork.result() for fork in forks]

    async def freeze(self, target: int, *, merge: bool) -> int:
        """Have what was written copied into the directory open at ``target``; its bytes. Under cancellation it returns
        when nothing writes there any more."""
        job = self._submit({"op": "freeze", "merge": merge}, (target,))
        try:
            message = await asyncio.shield(job.answer)
        except asyncio.CancelledError:
            await finished(self._stopped(job))
            raise
        if "error" in message:
            full = message.get("kind") == "full"
            remedy = "make room in the state folder, also with rl-harness sandbox prune" if full else None
            raise SandboxError(f"sandbox {self.id} could not be frozen: {str(message['error'])[:2000]}", remedy=remedy)
        return int(message["size"])

    async def _stopped(self, job: Job) -> None:
        with contextlib.suppress(SandboxError):
            await self._kill(job)

    async def died(self) -> str:
        await asyncio.shield(self._channel.dead)
        if self._closed_alive:
            await asyncio.get_running_loop().create_future()  # it did not die by itself: this ends by cancellation
        return self._channel.error().message

    async def alive(self) -> bool:
        return self._closing is None and self._channel.alive

    async def close(self) -> None:
        if self._closing is None:
            self._closed_alive = self._channel.alive
            self._closing = asyncio.create_task(self._teardown())
        await asyncio.shield(self._closing)

    async def _teardown(self) -> None:
        """Kill, wait, remove. When the loop itself is shutting down and cancels this, the rest is done blocking."""
        try:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(KILL_GRACE):
                    await asyncio.shield(self._channel.started)
            async with self._maker.ends:
                self._channel.kill()
                self._channel.close("it was closed")
                await asyncio.sleep(0)  # others are at their turn
            await asyncio.shield(self._channel.dead)
            await asyncio.get_running_loop().run_in_executor(self._pool, self._remove)
        except asyncio.CancelledError:
            self._channel.close("it was closed")
            self._channel.kill_and_wait()
            self._remove()
            raise
        finally:
            self._workers.close()
            for output in list(self._leftovers):
                output.close()
            self._forget()


async def _undo(making: Sequence[asyncio.Future[Sandbox]]) -> None:
    """Close what was made, and cancel what is being made."""
    for sandbox in making:
        sandbox.cancel()
    for outcome in await asyncio.gather(*making, return_exceptions=True):
        if isinstance(outcome, Sandbox):
            await outcome.close()


class LocalProcess(Process):
    def __init__(
        self,
        stdin: Writer,
        stdout: Reader,
        stderr: Reader,
        answer: asyncio.Future[dict[str, Any]],
        kill: Callable[[], Awaitable[object]],
    ) -> None:
        self._stdin = stdin
        self._streams = {"stdout": stdout, "stderr": stderr}
        self._answer = answer
        self._kill = kill

    def output(self) -> AsyncIterator[tuple[str, bytes]]:
        return merge(self._streams)

    async def write(self, data: bytes) -> None:
        await self._stdin.write(data)

    async def close_stdin(self) -> None:
        self._stdin.close()

    async def wait(self) -> int:
        message = await asyncio.shield(self._answer)
        self._stdin.close()
        status = message.get("status")
        return exit_code(status)[0] if isinstance(status, int) else 126

    async def kill(self) -> None:
        await self._kill()
        await self.wait()
        for reader in self._streams.values():
            reader.close()


def _retrieve(future: asyncio.Future[Any]) -> None:
    """For what nobody waits for any more: how it ended is of no interest."""
    if not future.cancelled():
        future.exception()


def _pipe(stack: contextlib.ExitStack) -> tuple[int, int]:
    """A pipe whose ends are closed with ``stack``."""
    read, write = os.pipe2(os.O_CLOEXEC)
    stack.callback(os.close, read)
    stack.callback(os.close, write)
    return read, write


def _null(stack: contextlib.ExitStack) -> int:
    descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, descriptor)
    return descriptor


def _absolute(path: str) -> str:
    if not path.startswith("/"):
        raise ValueError(f"{path!r}: a path in a sandbox must be absolute")
    return path


def _raise_for(message: dict[str, Any]) -> None:
    """Turn a file worker's answer into the contract's errors."""
    error = message.get("error")
    if error is None:
        return
    reason = str(error)[:2000]
    if message.get("kind") == "missing":
        raise FileNotFoundError(reason)
    if message.get("kind") in ("refused", "full"):
        raise UnsafeFiles(reason, full=message["kind"] == "full")
    if message.get("kind") == "killed":
        raise UnsafeFiles("a process in the sandbox killed what handles its files")
    raise SandboxError(reason)


def _send_tree(source: Path, output: int) -> None:
    try:
        descriptor = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO must not block
        try:
            trees.send(descriptor, output)
        finally:
            os.close(descriptor)
    except BrokenPipeError:
        pass  # the other side gave up and says why
    finally:
        os.close(output)


def _receive_tree(source: int, target: Path, limit: int | None, skip_unsafe: bool) -> list[str]:
    try:
        target = target.absolute()
        target.parent.mkdir(parents=True, exist_ok=True)
        parent = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return trees.receive(source, parent, target.name, keep_links=False, limit=limit, skip_unsafe=skip_unsafe)
        finally:
            os.close(parent)
    finally:
        os.close(source)
