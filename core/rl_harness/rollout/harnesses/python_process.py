"""Start, talk to and end one worker process (package ``python_worker``); what the agent prints is kept, bounded."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from rl_harness.rollout.harnesses.python_worker.channel import HEADER, MAX_FRAME

WORKER = Path(__file__).parent / "python_worker" / "__main__.py"
#: Seconds a supervisor gets to kill its descendants before it is killed itself.
_KILL_GRACE = 5.0


class ProtocolError(Exception):
    """The worker sent something that is not a message; only an agent that meddles with its channel can cause it."""


class Output:
    """The first and the last bytes of a stream that may be endless."""

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._dropped = 0

    def feed(self, data: bytes) -> None:
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:] if room > 0 else data
        excess = len(self._tail) - self._half
        if excess > 0:
            del self._tail[:excess]
            self._dropped += excess

    @property
    def truncated(self) -> bool:
        return self._dropped > 0

    def text(self) -> str:
        """Decoded late and with ``replace``; a mark stands where bytes were left out."""
        middle = f"\n[... {self._dropped} bytes left out ...]\n".encode() if self._dropped else b""
        return (bytes(self._head) + middle + bytes(self._tail)).decode("utf-8", "replace")


class WorkerProcess:
    """A live worker. Whoever starts one must :meth:`close` it; then none of its descendants is alive."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        output_limit: int,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self.output = Output(output_limit)
        self._pump = asyncio.create_task(self._keep_output())

    @classmethod
    async def start(cls, python: str, *, cwd: Path, env: Mapping[str, str], output_limit: int) -> Self:
        """Raises ``OSError`` when the interpreter or the directory cannot be used."""
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                python,
                str(WORKER),
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                cwd=cwd,
                env=env,
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        try:
            ours.setblocking(False)
            reader, writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            _cut_lifeline(process)
            raise
        return cls(process, reader, writer, output_limit)

    async def send(self, message: Mapping[str, Any]) -> None:
        """Send one message; a worker that is gone is noticed by :meth:`receive`."""
        data = msgspec.json.encode(message)
        with contextlib.suppress(ConnectionError):
            self._writer.write(HEADER.pack(len(data)) + data)
            await self._writer.drain()

    async def receive(self) -> bytes | None:
        """The next message's JSON, or None when the worker has no more to say."""
        try:
            (size,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            if size > MAX_FRAME:
                raise ProtocolError(f"a message of {size} bytes is over the limit of {MAX_FRAME} bytes")
            return await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def ended(self, grace: float) -> None:
        """Wait at most ``grace`` seconds for the worker to end by itself."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await self._process.wait()

    async def close(self) -> None:
        """Kill the agent and its descendants. The decisive step comes first: cancelling this does not undo it."""
        _cut_lifeline(self._process)
        self._writer.close()
        await self.ended(_KILL_GRACE)
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        await asyncio.wait([self._pump], timeout=1.0)
        self._pump.cancel()

    def how_it_ended(self) -> str:
        """``exited with status 3`` or ``was killed by signal 9 (SIGKILL)``."""
        code = self._process.returncode
        if code is None:
            return "did not end"
        number = -code if code < 0 else code - 128
        if code < 0 or code > 128:
            with contextlib.suppress(ValueError):
                return f"was killed by signal {number} ({signal.Signals(number).name})"
        return f"exited with status {code}"

    async def _keep_output(self) -> None:
        assert self._process.stdout is not None
        while data := await self._process.stdout.read(1 << 16):
            self.output.feed(data)


def _cut_lifeline(process: asyncio.subprocess.Process) -> None:
    """The supervisor sees its standard input end, kills the agent with every descendant, and ends."""
    assert process.stdin is not None
    process.stdin.close()
