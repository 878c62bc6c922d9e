"""One running helper: its start, and the frames to and from it. Knows neither relays nor commands, only streams."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from rl_harness.contracts.sandbox import Process, Sandbox
from rl_harness.errors import SandboxError
from rl_harness.sandboxes.resident import helper as wire
from rl_harness.sandboxes.resident.frames import Decoder, ProtocolError

log = logging.getLogger("rl_harness.sandboxes.resident")

START_SECONDS = 30.0
END_SECONDS = 1.0
KILL_SECONDS = 10.0
#: Bytes waiting to be written to the helper beyond which sources on this side pause, and at which it is given up.
CONGESTED = 1 << 20
GIVEN_UP = 64 << 20
#: Bytes of all streams together that a helper may have sent and nobody taken.
MAX_HELD = 64 << 20
#: Frames handled before others get their turn.
FRAMES_A_TURN = 100
_NOTES = 2_000

_SOURCE = Path(wire.__file__).read_bytes()
# ``-I -S -B``: nothing of the agent's is imported, nothing is written, and it starts in a fraction of the time.
_LAUNCH = """
for python in python3 /usr/bin/python3 /usr/local/bin/python3 /opt/conda/bin/python3 /usr/libexec/platform-python; do
    command -v "$python" >/dev/null 2>&1 && exec "$python" -I -S -B -c "$@"
done
echo "no python3 in $PATH" >&2
exit 127
"""
_BOOT = """
import os, sys
if sys.version_info < (3, 6):
    sys.exit("no python3: this is Python %d.%d, and at least 3.6 is needed" % sys.version_info[:2])
code = b""
while len(code) < SIZE:
    code += os.read(0, SIZE - len(code)) or sys.exit(1)
exec(compile(code, "rl-harness helper", "exec"))
"""


class HelperUnavailable(SandboxError):
    """The sandbox runs, but no helper can be started in it."""


class Stream(Protocol):
    """What belongs to one stream id (a command has two)."""

    def received(self, stream: int, data: bytes) -> None: ...

    def credited(self, count: int) -> None: ...

    def closed(self, stream: int) -> None:
        """The other side sends no more."""

    def reset(self) -> None: ...

    def exited(self, returncode: int, stdout_truncated: bool, stderr_truncated: bool) -> None: ...

    def lost(self, reason: str) -> None:
        """The helper is gone."""


class Link:
    """A started helper. ``ended`` gives the reason once it is of no more use."""

    def __init__(self, process: Process, opened: Callable[[Link, int, int], None]) -> None:
        self._process = process
        self._opened = opened
        self._out = bytearray()
        self._writing = 0
        self._wake = asyncio.Event()
        self._roomy: list[Callable[[], None]] = []
        self._notes = b""
        self._hello: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._listening: dict[int, asyncio.Future[tuple[int, int]]] = {}
        self._next = 0
        self.held = 0
        self.streams: dict[int, Stream] = {}
        self.uid = -1
        self.commands = False
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]

    @classmethod
    async def start(cls, sandbox: Sandbox, *, commands: bool, opened: Callable[[Link, int, int], None]) -> Link:
        """Start a helper. ``opened(link, stream, listener)`` is called for each connection that is made inside.

        Raises :class:`HelperUnavailable`, or ``SandboxError`` when the sandbox itself fails.
        """
        code = _SOURCE
        boot = _BOOT.replace("SIZE", str(len(code)))
        mode = "commands" if commands else "relay"
        process = await sandbox.spawn(["/bin/sh", "-c", _LAUNCH, "sh", boot, mode])
        link = cls(process, opened)
        try:
            link._out += code
            link._wake.set()
            async with asyncio.timeout(START_SECONDS):
                await first(link._hello, link.ended)
        except TimeoutError:
            await link.close(f"it said nothing within {START_SECONDS:g} s")
        except BaseException:
            await link.close("its start was cancelled")
            raise
        if link.ended.done():
            reason = link.ended.result()
            await link.close()  # what it still runs, and the writer that waits for something to write
            remedy = "put Python 3.6 or newer into the environment's image" if "python3" in reason else None
            raise HelperUnavailable(f"sandbox {sandbox.id}: cannot start the helper: {reason}", remedy=remedy)
        return link

    def open(self, stream: Stream) -> int:
        """The id of a new command."""
        number, self._next = self._next, (self._next + 2) % wire.CONNECTION
        self.streams[number] = self.streams[number + 1] = stream
        return number

    def forget(self, number: int) -> None:
        """What still arrives on this stream is thrown away."""
        self.streams.pop(number, None)

    def send(self, kind: int, stream: int, payload: bytes = b"") -> None:
        if self.ended.done():
            return
        self._out += wire.HEADER.pack(kind, stream, len(payload))
        self._out += payload
        self._wake.set()
        if len(self._out) + self._writing > GIVEN_UP:
            self.end("it reads nothing")

    def credit(self, stream: int, count: int) -> None:
        """``count`` bytes of a stream were taken."""
        self.held -= count
        self.send(wire.CREDIT, stream, wire.COUNT.pack(count))

    @property
    def congested(self) -> bool:
        return len(self._out) + self._writing > CONGESTED

    def when_roomy(self, callback: Callable[[], None]) -> None:
        """Call back once when it is no longer congested, or has ended."""
        self._roomy.append(callback)

    async def room(self) -> None:
        while self.congested and not self.ended.done():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.when_roomy(lambda waiter=waiter: waiter.done() or waiter.set_result(None))  # type: ignore[misc]
            await waiter

    async def listen(self, number: int, port: int) -> int:
        """Listen inside; the port. Raises ``OSError`` when it cannot be had, ``HelperUnavailable`` without helper."""
        answer = self._listening[number] = asyncio.get_running_loop().create_future()
        self.send(wire.LISTEN, number, wire.PORT.pack(port, 0))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_SECONDS):
                await first(answer, self.ended)
        self._listening.pop(number, None)
        if not answer.done():
            raise HelperUnavailable(f"the helper does not listen: {self.reason}")
        port, error = answer.result()
        if error:
            raise OSError(error, f"cannot listen on port {port} in the sandbox")
        return port

    @property
    def reason(self) -> str:
        return self.ended.result() if self.ended.done() else "it gives no answer"

    async def _read(self) -> None:
        decoder = Decoder()
        reason = "its stream ended"
        try:
            async for name, chunk in self._process.output():
                if name == "stderr":
                    self._notes = (self._notes + chunk)[-_NOTES:]
                    continue
                for number, (kind, stream, payload) in enumerate(decoder.feed(chunk)):
                    self._handle(kind, stream, payload)
                    if number % FRAMES_A_TURN == FRAMES_A_TURN - 1:
                        await asyncio.sleep(0)  # a flood must not keep others from their turn
                await asyncio.sleep(0)
        except ProtocolError as error:
            reason = f"it broke the protocol: {error}"
        except SandboxError as error:
            reason = error.message
        except Exception as error:
            log.exception("reading from the helper failed")
            reason = f"{type(error).__name__}: {error}"
        if self._notes:
            reason += f" ({self._notes.decode('utf-8', 'replace').strip()})"
        self.end(reason)

    async def _write(self) -> None:
        try:
            while not self.ended.done():
                await self._wake.wait()
                self._wake.clear()
                while self._out:
                    # Taken whole, so that it is not shifted with every piece.
                    data = bytes(self._out)
                    self._out.clear()
                    for at in range(0, len(data), wire.WINDOW):
                        self._writing = len(data) - at
                        await self._process.write(data[at : at + wire.WINDOW])
                    self._writing = 0
                    if not self.congested:
                        self._release()
        except SandboxError as error:
            self.end(error.message)
        except Exception as error:
            log.exception("writing to the helper failed")
            self.end(f"{type(error).__name__}: {error}")

    def _release(self) -> None:
        waiting, self._roomy = self._roomy, []
        for callback in waiting:
            callback()

    def _handle(self, kind: int, stream: int, payload: bytes) -> None:
        if self.ended.done():
            return  # what was still under way when it was closed
        if not self._hello.done():
            self._greet(kind, payload)
        elif kind == wire.DATA:
            if stream in self.streams:
                self.held += len(payload)
                if self.held > MAX_HELD:
                    raise ProtocolError("more data than anybody takes")
                self.streams[stream].received(stream, payload)
        elif kind == wire.OPEN:
            if stream in self.streams or not stream & wire.CONNECTION:
                raise ProtocolError("a connection with an id in use")
            self._opened(self, stream, _unpack(wire.COUNT.size, payload, wire.COUNT.unpack)[0])
        elif kind == wire.LISTENING:
            answer = self._listening.get(stream)
            if answer is not None and not answer.done():
                port, error = _unpack(wire.PORT.size, payload, wire.PORT.unpack)
                answer.set_result((port, error))
        elif stream in self.streams:
            self._event(kind, stream, payload)
        elif kind not in (wire.CREDIT, wire.EOF, wire.RESET, wire.EXIT):
            raise ProtocolError(f"a frame of kind {kind}")

    def _event(self, kind: int, stream: int, payload: bytes) -> None:
        target = self.streams[stream]
        if kind == wire.CREDIT:
            target.credited(_unpack(wire.COUNT.size, payload, wire.COUNT.unpack)[0])
        elif kind == wire.EOF:
            target.closed(stream)
        elif kind == wire.RESET:
            target.reset()
        elif kind == wire.EXIT:
            returncode, stdout, stderr = _unpack(wire.EXIT_BODY.size, payload, wire.EXIT_BODY.unpack)
            if not -128 < returncode < 256:
                raise ProtocolError(f"exit code {returncode}")
            target.exited(returncode, bool(stdout), bool(stderr))
        else:
            raise ProtocolError(f"a frame of kind {kind}")

    def _greet(self, kind: int, payload: bytes) -> None:
        if kind != wire.HELLO or len(payload) != wire.HELLO_BODY.size:
            raise ProtocolError("no greeting")
        magic, version, uid, commands = wire.HELLO_BODY.unpack(payload)
        if (magic, version) != (wire.MAGIC, wire.VERSION):
            raise ProtocolError(f"not a helper of version {wire.VERSION}")
        self.uid, self.commands = uid, bool(commands)
        self._hello.set_result(None)

    def end(self, reason: str) -> None:
        """It is of no more use: whoever waits for it learns why. :meth:`close` ends the program as well."""
        if self.ended.done():
            return
        self.ended.set_result(reason)
        for stream in set(self.streams.values()):
            stream.lost(reason)
        self.streams.clear()
        self._out.clear()
        self._wake.set()
        self._release()

    async def close(self, reason: str = "it was closed") -> None:
        """End the helper. Idempotent; bounded in time whatever the sandbox does."""
        self.end(reason)
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(Exception):
            # At the end of its input it ends by itself, and leaves alone what finished commands left running.
            async with asyncio.timeout(END_SECONDS):
                await self._process.close_stdin()
                await self._process.wait()
                return
        with contextlib.suppress(Exception):
            async with asyncio.timeout(KILL_SECONDS):
                await self._process.kill()


async def first(*futures: asyncio.Future[Any]) -> None:
    """Wait until one of them is done, which stays as it is."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


def _unpack(size: int, payload: bytes, unpack: Callable[[bytes], tuple[int, ...]]) -> tuple[int, ...]:
    if len(payload) != size:
        raise ProtocolError(f"a payload of {len(payload)} bytes where {size} belong")
    return unpack(payload)
