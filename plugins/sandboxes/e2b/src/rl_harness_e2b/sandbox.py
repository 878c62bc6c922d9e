"""A sandbox on E2B: the contract's methods over envd's RPC, and what the service does with the machine as a whole."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from e2b import AsyncSandbox, SandboxState
from e2b.connection_config import KEEPALIVE_PING_HEADER, KEEPALIVE_PING_INTERVAL_SEC
from e2b.envd.filesystem import filesystem_connect, filesystem_pb
from e2b.envd.process import process_connect, process_pb
from e2b.envd.rpc import handle_rpc_exception
from e2b.envd.utils import authentication_header, extract_start_pid
from rl_harness.contracts.sandbox import Process, Sandbox, SandboxSpec
from rl_harness.errors import SandboxError
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

from rl_harness_e2b.files import E2BFiles
from rl_harness_e2b.process import E2BProcess, input_request, selector, supervised
from rl_harness_e2b.rpc import rpc_client
from rl_harness_e2b.service import FAILURES, Gone, failure, finished, next_event

if TYPE_CHECKING:
    from rl_harness_e2b.provider import E2BProvider

T = TypeVar("T")

_START_SECONDS = 60.0
_ASKING_SECONDS = 60.0
_CLOSE_SECONDS = 60.0
_CHECKPOINT_SECONDS = 900.0
_ANSWER_SECONDS = 5.0  # for what a machine was asked before it stands still
_QUIET_SECONDS = 0.1  # for what stopped processes have written to get here
_WATCH_SECONDS = 30.0  # between questions about a sandbox whose stream is silent
_WATCH_PAUSE = 0.5

#: What writing to a command says that has ended, or has closed its input. Programs need not read theirs.
_NOT_READING = (Code.NOT_FOUND, Code.INTERNAL, Code.UNKNOWN)

# $1 the working directory, then the command that lists processes.
_PREPARE = f"""
mkdir -p -- "$1" || exit 1
{MAKE_PLACES}
read -r boot < /proc/sys/kernel/random/boot_id; echo "$boot"
shift; exec "$@"
"""


class E2BSandbox(RemoteSandbox):
    """See :class:`rl_harness.contracts.Sandbox`.

    ``spec`` is what it was made for, None for one that was found again; ``family`` says which sandboxes descend from
    one request to create, by forks; ``longest`` is how many seconds ahead E2B may be asked to keep it.
    """

    kill_seconds = 60.0

    def __init__(
        self,
        provider: E2BProvider,
        handle: AsyncSandbox,
        *,
        workdir: str,
        spec: SandboxSpec | None,
        family: str,
        longest: float,
    ) -> None:
        super().__init__(handle.sandbox_id, workdir=workdir, env=spec.environment.env if spec else {})
        self.family = family
        self.spec = spec
        self._provider = provider
        self._service = provider.service
        self._handle = handle
        self._longest = longest
        self._ends = time.monotonic() + spec.lifetime if spec else math.inf
        patience = self._service.patience
        self._rpc = rpc_client(process_connect.ProcessClient, handle, patience)
        self._files = rpc_client(filesystem_connect.FilesystemClient, handle, patience)
        self.files = self._own_files = E2BFiles(self._files, handle, self.explained)
        self._start_seconds = _START_SECONDS + patience
        self._asking_ms = round(1000 * (_ASKING_SECONDS + patience))
        self._headers = {
            **authentication_header(handle._envd_version, "root"),
            KEEPALIVE_PING_HEADER: str(KEEPALIVE_PING_INTERVAL_SEC),
        }
        self.lacks = "sh"  # nothing is known of it yet
        self._system: list[str] = []
        self._processes: dict[E2BProcess, str] = {}
        self._asking: set[asyncio.Task[Any]] = set()
        self._moving = asyncio.Event()  # set while commands may be started
        self._moving.set()
        self._checkpoints = asyncio.Lock()
        self._paused = False
        self._keeping = asyncio.create_task(self._keep()) if spec and spec.lifetime > longest else None

    async def prepare(self, inherited: Sequence[str] = (), *, kill: bool = True) -> None:
        """Make the working directory, and note which processes are not a task's: those that run before anything of one
        does. A machine restored from another's memory still runs that one's; ``inherited`` then tells which of them
        are E2B's, and the others are killed. Not so (``kill`` False) in a machine that was found again."""
        argv = ["/bin/sh", "-c", _PREPARE, "sh", self.workdir, *look_around()]
        result = await self.run(argv, timeout=self.kill_seconds)
        await self._check(result, self.workdir)
        words, self.lacks = seen(result.stdout.decode("utf-8", "replace").split())
        if not words:
            raise SandboxError(
                f"sandbox {self.id}: its shell said nothing", remedy="give the task an image that has sh"
            )
        boot, *running = words
        await self._try_killer()
        if [boot] != [*inherited[:1]]:
            self._system = [boot, *running]
            return
        self._system = [*inherited]
        if kill:
            await self._kill_all()

    @property
    def system(self) -> Sequence[str]:
        """The machine's boot, and the processes that are E2B's own since then."""
        return self._system

    # ---------------------------------------------------------------------------------------------------- commands

    async def _start(
        self, argv: Sequence[str], *, cwd: str | None, env: Mapping[str, str], user: str | None
    ) -> Process:
        await self._ready()
        return await self._launch(as_user(user, argv), cwd, env)

    async def _start_placed(
        self, argv: Sequence[str], *, cwd: str | None, env: Mapping[str, str], user: str | None
    ) -> Process:
        await self._ready()
        return await self._launch(argv, cwd, env, bare=True)

    async def _place(self, path: str, program: bytes) -> None:
        await self._ready()
        await self._asking_for(self._own_files.write(path, program))

    async def _ready(self) -> None:
        await self._moved()
        if self._paused:
            raise SandboxError(f"sandbox {self.id} is paused")

    async def _moved(self) -> None:
        """Wait until the machine does not stand still, nor is about to."""
        while not self._moving.is_set():
            await self._moving.wait()

    async def _launch(
        self, argv: Sequence[str], cwd: str | None, env: Mapping[str, str], *, bare: bool = False
    ) -> E2BProcess:
        """Start a command; ``bare``: without a shell around it. envd starts it whether or not anybody still waits for
        the answer."""
        variables = {**env, MARK: env.get(MARK) or secrets.token_hex(8)}
        mark, command = supervised(argv)
        if bare:
            command = [*argv]
        starting = self._asking_for(self._begin(command, mark, cwd, variables, own=MARK not in env))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            self._provider.do_later(self._abandon(starting))
            raise

    def _asking_for(self, request: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A request that the machine must not stand still in the middle of."""
        asking = asyncio.create_task(request)
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        return asking

    async def _begin(
        self, command: Sequence[str], mark: str, cwd: str | None, env: dict[str, str], *, own: bool
    ) -> E2BProcess:
        try:
            "".join((*command, *env, *env.values(), cwd or "")).encode()
        except UnicodeEncodeError as error:
            raise SandboxError(f"E2B takes commands that are text, and these bytes are no text: {error}") from None
        config = process_pb.ProcessConfig(cmd=command[0], args=[*command[1:]], envs=env, cwd=cwd)
        events: Any = self._rpc.start(process_pb.StartRequest(process=config, stdin=True), headers=self._headers)
        process = await self._opened(events, mark, env[MARK], own=own)
        self._processes[process] = env[MARK]
        return process

    async def _opened(self, events: Any, mark: str, command: str, *, own: bool) -> E2BProcess:
        try:
            async with asyncio.timeout(self._start_seconds):
                first = await next_event(events)
            pid = extract_start_pid(first, "start process")
        except StopAsyncIteration:
            raise await self.explained(SandboxError(f"E2B: start a command: no answer from {self.id}")) from None
        except FAILURES as error:
            with contextlib.suppress(*FAILURES, RuntimeError):
                await events.aclose()
            failed = await self.failed("start a command", error)
            if isinstance(error, ConnectError) and error.code is Code.INVALID_ARGUMENT and not isinstance(failed, Gone):
                raise CannotStart(failed.message) from None
            raise failed from None
        return E2BProcess(self, pid, events, mark, lambda: self._kill_command(command), own=own)

    async def _abandon(self, starting: asyncio.Task[E2BProcess]) -> None:
        try:
            await (await starting).kill()
        except (SandboxError, CannotStart):
            return  # it never ran, or its machine is gone

    def forget_process(self, process: E2BProcess) -> None:
        self._processes.pop(process, None)

    async def _kill_command(self, mark: str) -> None:
        await super()._kill_command(mark)
        await asyncio.gather(*(process.let_go() for process, of in [*self._processes.items()] if of == mark))

    async def _give_up(self, process: Process) -> None:
        assert isinstance(process, E2BProcess)
        await process.let_go()

    async def kill_pid(self, pid: int) -> None:
        request = process_pb.SendSignalRequest(process=selector(pid), signal=process_pb.Signal.SIGKILL)
        await self._asked(
            "kill a command", self._rpc.send_signal(request, headers=self._headers, timeout_ms=self._asking_ms)
        )

    async def send_input(self, pid: int, data: bytes) -> bool:
        """Whether the command takes input still."""
        return await self._asked(
            "write to a command", self._rpc.send_input(input_request(pid, data), headers=self._headers)
        )

    async def close_input(self, pid: int) -> None:
        request = process_pb.CloseStdinRequest(process=selector(pid))
        await self._asked(
            "close the input of a command",
            self._rpc.close_stdin(request, headers=self._headers, timeout_ms=self._asking_ms),
        )

    async def _asked(self, what: str, call: Coroutine[Any, Any, object]) -> bool:
        """False if the command has ended, or does not take input."""
        try:
            await self._moved()
        except BaseException:
            call.close()
            raise
        asking = self._asking_for(call)
        try:
            await asking
        except asyncio.CancelledError:
            asking.cancel()
            raise
        except ConnectError as error:
            if isinstance(error.__cause__, asyncio.CancelledError):
                raise error.__cause__ from None
            if error.code in _NOT_READING:
                return False
            raise await self.failed(what, error) from None
        except FAILURES as error:
            raise await self.failed(what, error) from None
        return True

    async def look(self, script: str, *arguments: str) -> str:
        result = await self.run(["/bin/sh", "-c", script, "sh", *arguments], timeout=self.kill_seconds)
        return result.stdout.decode("utf-8", "replace").strip()

    async def kill_processes(self) -> None:
        running = [*self._processes]
        await self._guarded(self._kill_all())
        await asyncio.gather(*(process.let_go() for process in running))

    async def _kill_all(self) -> None:
        if self._killer_works:
            if not await self._killed_by_ours("all", *self._system):
                raise await self._broken("its processes could not be killed: new ones keep appearing")
            return
        deadline = time.monotonic() + self.kill_seconds
        while True:
            result = await self.run(signal_processes("KILL", self._system), timeout=self.kill_seconds, last=True)
            if signalled(result.stdout):
                return
            if result.signal is None or time.monotonic() > deadline:
                await self._check(result, "processes")
                raise await self._broken("its processes could not be killed: its shell does not do what it is told")
            # Killed itself, by another one that kills everything.

    # ---------------------------------------------------------------------------------------------------- failures

    async def failed(self, what: str, error: BaseException) -> SandboxError:
        """The error to raise for the SDK's."""
        if isinstance(error, ConnectError):
            error = handle_rpc_exception(error)
        return await self.explained(failure(what, error))

    async def explained(self, error: SandboxError) -> SandboxError:
        """The same error; of a machine that is gone, what became of it."""
        if self._closing.is_set():
            return Gone(f"sandbox {self.id} is closed")
        try:
            reason = await self._ended()
        except SandboxError:
            return error
        return Gone(reason) if reason else error

    async def _ended(self) -> str:
        """What ended the sandbox; "" while it runs, or is paused because we asked for it."""
        try:
            info = await self._service.call(
                f"ask about sandbox {self.id}", lambda options: AsyncSandbox.get_info(self.id, **options)
            )
        except Gone as error:
            over = f"its lifetime of {self.spec.lifetime:g} s is over" if self._over() and self.spec else str(error)
            return f"sandbox {self.id} ended: {over}"
        if info.state is SandboxState.PAUSED and not self._paused:
            return f"sandbox {self.id} was paused by E2B: its time was over"
        return ""

    def _over(self) -> bool:
        return time.monotonic() >= self._ends - 1

    async def alive(self) -> bool:
        return not self._closing.is_set() and not await self._ended()

    async def died(self) -> str:
        while True:
            if not self._paused:
                await self._silence()
            await self._moved()
            try:
                if reason := await self._ended():
                    return reason
            except SandboxError:
                pass  # E2B is out of reach, which says nothing about the sandbox
            await asyncio.sleep(_WATCH_PAUSE)

    async def _silence(self) -> None:
        """Wait until a stream from the machine breaks, or for so long that it is as well to ask."""
        events: Any = self._files.watch_dir(filesystem_pb.WatchDirRequest(path="/"), headers=self._headers)
        try:
            async with asyncio.timeout(_WATCH_SECONDS):
                while True:
                    await next_event(events)
        except (*FAILURES, StopAsyncIteration):
            return
        finally:
            with contextlib.suppress(*FAILURES, RuntimeError):
                await events.aclose()

    # --------------------------------------------------------------------------------------------------- lifecycle

    def ahead(self) -> int:
        """For how many seconds E2B is to keep the sandbox from now on."""
        return max(1, math.ceil(min(self._ends - time.monotonic(), self._longest)))

    def fresh(self) -> int:
        """For how many seconds E2B is to keep a sandbox of the same spec that begins now."""
        return max(1, math.ceil(min(self.spec.lifetime if self.spec else self._longest, self._longest)))

    async def _keep(self) -> None:
        """Ask for more time, again and again, up to the lifetime."""
        while True:
            await asyncio.sleep(self._longest / 3)
            if not self._paused:
                with contextlib.suppress(SandboxError):  # asked again, or told by died()
                    await self._service.call(
                        f"keep sandbox {self.id}",
                        lambda options: AsyncSandbox.set_timeout(self.id, timeout=self.ahead(), **options),
                    )

    @contextlib.asynccontextmanager
    async def _checkpoint(self) -> AsyncIterator[None]:
        """The machine stands still meanwhile, and every stream is cut. Commands go on afterwards with nothing lost:
        they are stopped before, and heard again before they go on."""
        async with self._checkpoints:
            self._moving.clear()
            try:
                await self._halt()
                try:
                    yield
                finally:
                    if not self._paused:
                        await finished(self._go_on())
            finally:
                self._moving.set()

    async def _halt(self) -> None:
        if self._asking:  # one that writes to a command may take as long as that does not read
            await asyncio.wait(self._asking, timeout=_ANSWER_SECONDS)
        if self._processes:
            await self._command(signal_processes("STOP", self._system))
            await asyncio.sleep(_QUIET_SECONDS)
            await asyncio.gather(*(process.detach() for process in [*self._processes]))

    async def _go_on(self) -> None:
        waiting = [*self._processes]
        if not waiting:
            return
        for process in waiting:
            events: Any = self._rpc.connect(
                process_pb.ConnectRequest(process=selector(process.pid)), headers=self._headers
            )
            try:
                async with asyncio.timeout(self._start_seconds):
                    await next_event(events)
            except (*FAILURES, StopAsyncIteration) as error:
                process.lost(await self.failed("find a command again", error))
            else:
                process.attach(events)
        await self._command(signal_processes("CONT", self._system))

    async def _command(self, argv: Sequence[str]) -> None:
        """A command of our own while no others may start."""
        try:
            process = await self._launch(argv, "/", {})
        except CannotStart as error:
            raise await self._broken(str(error)) from None
        try:
            async with asyncio.timeout(self.kill_seconds):
                async for _ in process.output():
                    pass
                await process.wait()
        except TimeoutError:
            await process.let_go()
            raise await self._broken("its shell does not do what it is told") from None

    async def _undisturbed(
        self,
        operation: Callable[[], Coroutine[Any, Any, T]],
        undo: Callable[[asyncio.Task[T]], Coroutine[Any, Any, None]],
    ) -> T:
        """Carry an operation to its end whoever waits for it: the machine stands still until then. ``undo`` is given
        what nobody waits for any more."""
        running = asyncio.create_task(operation())
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            self._provider.do_later(undo(running))
            raise

    async def pause(self) -> None:
        await self._guarded(self._undisturbed(self._pause, _ignored))

    async def _pause(self) -> None:
        async with self._checkpoint():
            self._paused = True  # from now on, whoever finds it paused need not wonder
            try:
                await self._service.call(
                    f"pause sandbox {self.id}",
                    lambda options: AsyncSandbox.pause(self.id, **options),
                    timeout=_CHECKPOINT_SECONDS,
                )
            except BaseException:
                self._paused = False
                raise

    async def resume(self) -> None:
        await self._guarded(self._undisturbed(self._resume, _ignored))

    async def _resume(self) -> None:
        async with self._checkpoints:
            await self._service.call(
                f"resume sandbox {self.id}",
                lambda options: AsyncSandbox.connect(self.id, timeout=self.ahead(), **options),
            )
            self._paused = False
            await finished(self._go_on())

    async def snapshot(self, *, key: str = "", labels: Mapping[str, str] | None = None) -> str:
        return await self._guarded(self._undisturbed(lambda: self._frozen(key, labels or {}), self._provider.thaw))

    async def _frozen(self, key: str, labels: Mapping[str, str]) -> str:
        async with self._checkpoint():
            return await self._provider.freeze(self.id, key, labels, self._system)

    async def fork(self, count: int) -> list[Sandbox]:
        return [*await self._guarded(self._undisturbed(lambda: self._forked(count), self._provider.dispose_forks))]

    async def _forked(self, count: int) -> list[E2BSandbox]:
        async with self._checkpoint():
            return await self._provider.fork(self, count, self._system)

    async def _destroy(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._service.call(
                    f"end sandbox {self.id}", lambda options: AsyncSandbox.kill(self.id, **options)
                )
        except TimeoutError:
            raise SandboxError(f"E2B: sandbox {self.id} did not end within {_CLOSE_SECONDS:g} s") from None
        finally:
            for process in [*self._processes]:
                await process.detach()
                process.lost(Gone(f"sandbox {self.id} is closed"))
            self._provider.forget(self)


async def _ignored(running: asyncio.Task[None]) -> None:
    """Only its failure is of no concern to anybody any more."""
    with contextlib.suppress(SandboxError):
        await running
