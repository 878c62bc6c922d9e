"""A command on E2B: its streams over envd's RPC as bytes, its exit code, its input.

envd reports the end of a command only when everybody has let go of its output, background processes included. So each
runs under a shell that marks the end of the command in both streams; the mark is a hint that is looked into, since
whatever runs inside could write one.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from e2b.connection_config import KEEPALIVE_PING_INTERVAL_SEC
from e2b.envd.process import process_pb
from protobuf import Oneof
from rl_harness.contracts.sandbox import Process
from rl_harness.errors import SandboxError

from rl_harness_e2b.service import FAILURES, Gone, next_event

if TYPE_CHECKING:
    from rl_harness_e2b.sandbox import E2BSandbox

_STDIN_CHUNK = 1 << 20
_BUFFERED = 4 << 20  # bytes read ahead of whoever reads the output
_SILENT_SECONDS = 3 * KEEPALIVE_PING_INTERVAL_SEC  # envd says that often that a command lives
_KILLED = 137

# How long the word of a command's end may take after its mark, and the pauses between looks when it does not come.
_END_SECONDS = 0.1
_GONE_SECONDS = 0.2
_LONGEST_CODE = 3  # digits
_FIRST_LOOK, _LONGEST_LOOK = 0.1, 2.0

# $1 a word for the mark, then the command. What the shell itself says of a killed command is not the command's output.
_SUPERVISE = """
mark=$1; shift
{ (exec "$@" 2>&3 3>&-); code=$?; } 3>&2 2>/dev/null
printf '\\036%s %s\\036' "$mark" "$code"; printf '\\036%s %s\\036' "$mark" "$code" >&2
exit "$code"
"""

# $1 a process: "gone", "Z CODE" with the status that it ended with (the last field), or its state.
_LOOK = """
{ read -r line < "/proc/$1/stat"; } 2>/dev/null || { echo gone; exit; }
set -- ${line##*) }
state=$1; shift $(($# - 1))
echo "$state $1"
"""
_SEEN = re.compile(r"(gone|[A-Za-z])(?: ([0-9]{1,5}))?", re.ASCII)


def supervised(argv: Sequence[str]) -> tuple[str, list[str]]:
    """The command under its shell, and the word that marks its end."""
    mark = secrets.token_hex(8)
    return mark, ["/bin/sh", "-c", _SUPERVISE, "sh", mark, *argv]


class E2BProcess(Process):
    """A command that was started. ``kill`` kills it and all that it started. ``own``: none of the task's, whose end is
    waited for without a look, for which another of these would be needed."""

    def __init__(
        self,
        machine: E2BSandbox,
        pid: int,
        events: Any,
        mark: str,
        kill: Callable[[], Awaitable[None]],
        *,
        own: bool,
    ) -> None:
        self.pid = pid
        self._machine = machine
        self._kill = kill
        self._own = own
        self._streams = {name: _Stream(mark) for name in ("stdout", "stderr")}
        self._chunks: deque[tuple[str, bytes]] = deque()
        self._buffered = 0
        self._changed = asyncio.Event()
        self._marked = asyncio.Event()
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._code: int | None = None
        self._pump = asyncio.create_task(self._read(events))

    # ------------------------------------------------------------------------------------------------------ output

    async def _read(self, events: Any) -> None:
        """Take what arrives, as long as somebody takes it from here."""
        try:
            while True:
                event = await self._heard(events)
                match event.event.event if event.event is not None else None:
                    case Oneof(field="data", value=data):
                        if data.output is not None and data.output.field in self._streams:
                            await self._take(data.output.field, bytes(data.output.value))
                    case Oneof(field="end", value=end):
                        self._end(end.exit_code if end.exited else _KILLED)
                        return
        except StopAsyncIteration:
            early = SandboxError("E2B: read the output of a command: the stream broke off")
            self._fail(await self._machine.explained(early))
        except FAILURES as error:
            self._fail(await self._machine.failed("read the output of a command", error))
        finally:
            with contextlib.suppress(*FAILURES, RuntimeError):
                await events.aclose()

    async def _heard(self, events: Any) -> Any:
        try:
            async with asyncio.timeout(_SILENT_SECONDS):
                return await next_event(events)
        except TimeoutError:
            raise TimeoutError(f"nothing was heard for {_SILENT_SECONDS} s, not even that it lives") from None

    async def _take(self, name: str, data: bytes) -> None:
        stream = self._streams[name]
        if text := stream.add(data):
            self._chunks.append((name, text))
            self._buffered += len(text)
            self._changed.set()
        if stream.code is not None:
            self._marked.set()
        while self._buffered > _BUFFERED:
            self._changed.clear()
            await self._changed.wait()

    def _end(self, code: int) -> None:
        for name, stream in self._streams.items():
            if text := stream.rest():
                self._chunks.append((name, text))
        if not self._ended.done():
            self._ended.set_result(code)
        self._machine.forget_process(self)
        self._changed.set()

    def _fail(self, error: SandboxError) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)
            self._ended.exception()  # whoever asks gets it; nobody need
        self._machine.forget_process(self)
        self._changed.set()

    async def output(self) -> AsyncIterator[tuple[str, bytes]]:
        while True:
            if self._chunks:
                name, chunk = self._chunks.popleft()
                self._buffered -= len(chunk)
                self._changed.set()
                yield name, chunk
            elif self._ended.done():
                if self._code is None:
                    self._ended.result()  # a stream that broke off has no end
                return
            else:
                self._changed.clear()
                await self._changed.wait()

    # ------------------------------------------------------------------------------------------------------- input

    async def write(self, data: bytes) -> None:
        view = memoryview(data)
        for start in range(0, len(view), _STDIN_CHUNK):
            try:
                taken = await self._machine.send_input(self.pid, bytes(view[start : start + _STDIN_CHUNK]))
            except SandboxError as error:
                self._fail(error)  # nobody knows how much of it got there
                raise
            if not taken:
                return

    async def close_stdin(self) -> None:
        await self._machine.close_input(self.pid)

    # --------------------------------------------------------------------------------------------------------- end

    async def wait(self) -> int:
        if self._code is None:
            self._code = await self._exit()
        return self._code

    async def _exit(self) -> int:
        marked = asyncio.create_task(self._marked.wait())
        either: set[asyncio.Future[Any]] = {self._ended, marked}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            marked.cancel()
        if not self._ended.done():
            await asyncio.wait({self._ended}, timeout=_END_SECONDS)
        look = _FIRST_LOOK
        while not self._ended.done() and not self._own:
            # Something holds the output still, or the mark was not its shell's. The kernel knows.
            seen = _SEEN.fullmatch(await self._machine.look(_LOOK, str(self.pid)))
            if seen is None or seen[1] == "gone":  # not what the script says: no shell is left to tell a false mark by
                await asyncio.wait({self._ended}, timeout=_GONE_SECONDS)
                if self._ended.done():
                    break
                return next(stream.code for stream in self._streams.values() if stream.code is not None)
            if seen[1] == "Z":
                return _exit_code(int(seen[2]))
            await asyncio.wait({self._ended}, timeout=look)
            look = min(2 * look, _LONGEST_LOOK)
        return await asyncio.shield(self._ended)

    async def kill(self) -> None:
        if not self._ended.done():
            try:
                await self._kill()
            except Gone:
                return  # the machine is gone, and the command with it

    async def let_go(self) -> None:
        """Have envd close the output of a command whose processes are dead, whoever else holds it."""
        if not self._ended.done():
            await self._machine.kill_pid(self.pid)

    # -------------------------------------------------------------------------------------------------- checkpoints

    async def detach(self) -> None:
        """Stop listening: the machine is about to stand still, which cuts streams."""
        self._pump.cancel()
        await asyncio.wait({self._pump})

    def attach(self, events: Any) -> None:
        """Listen again. The processes were stopped in between, so that nothing was missed."""
        self._pump = asyncio.create_task(self._read(events))

    def lost(self, error: SandboxError) -> None:
        """It could not be found again."""
        self._fail(error)


def _exit_code(status: int) -> int:
    """What a shell says of the status that the kernel keeps of a dead process."""
    signal = status & 0x7F
    return 128 + signal if signal else (status >> 8) & 0xFF


class _Stream:
    """One stream of output without marks in it. ``code``: what the last one said, once there was any."""

    def __init__(self, mark: str) -> None:
        self._start = f"\036{mark} ".encode()
        self._tail = b""
        self.code: int | None = None

    def add(self, data: bytes) -> bytes:
        """What of the stream is surely not a mark's."""
        data = self._tail + data
        text, kept, at = [], 0, -1  # ``kept``: how far the data is in the text, or was a mark
        while (at := data.find(self._start, at + 1)) >= 0:
            begin = at + len(self._start)
            end = data.find(b"\036", begin, begin + _LONGEST_CODE + 1)
            if end < 0 and len(data) - begin <= _LONGEST_CODE:
                break  # the rest of it may be still to come
            if end >= 0 and data[begin:end].isdigit():
                self.code = int(data[begin:end])
                text.append(data[kept:at])
                kept, at = end + 1, end
        if at < 0:
            longest = min(len(self._start) - 1, len(data) - kept)
            at = len(data) - next((n for n in range(longest, 0, -1) if data.endswith(self._start[:n])), 0)
        self._tail = data[at:]
        return b"".join([*text, data[kept:at]])

    def rest(self) -> bytes:
        rest, self._tail = self._tail, b""
        return rest


def input_request(pid: int, data: bytes) -> process_pb.SendInputRequest:
    stdin: Oneof[Literal["stdin"], bytes] = Oneof("stdin", data)
    return process_pb.SendInputRequest(process=selector(pid), input=process_pb.ProcessInput(input=stdin))


def selector(pid: int) -> process_pb.ProcessSelector:
    chosen: Oneof[Literal["pid"], int] = Oneof("pid", pid)
    return process_pb.ProcessSelector(selector=chosen)
