"""The host's end of commands that a helper runs: their output within bounds, their stdin with back-pressure."""

from __future__ import annotations

import abc
import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import NamedTuple

from rl_harness.contracts.sandbox import Command, Process
from rl_harness.sandboxes.processes import exit_code
from rl_harness.sandboxes.resident import helper as wire
from rl_harness.sandboxes.resident.frames import ProtocolError
from rl_harness.sandboxes.resident.link import Link, first


class Ended(NamedTuple):
    """How a command ended, in ``subprocess``'s terms; ``lost`` is why its end is not known."""

    returncode: int
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    lost: str = ""


def request(
    command: Command,
    *,
    cwd: str | None,
    env: Mapping[str, str] | None,
    user: str | None,
    limit: int | None,
    stdin: bool,
) -> bytes:
    """The payload of an ``EXEC`` frame. Raises ``ValueError`` for an empty argv."""
    argv = [command] if isinstance(command, str) else list(command)
    if not argv:
        raise ValueError("an empty argv")
    fields = [
        "shell" if isinstance(command, str) else "argv",
        cwd or "",
        user or "",
        "" if limit is None else str(limit),
        "stdin" if stdin else "",
        str(len(argv)),
        *argv,
    ]
    for name, value in (env or {}).items():
        fields += [name, value]
    return wire.pack([field.encode("utf-8", "surrogateescape") for field in fields])


class Running(abc.ABC):
    """A command that was asked for."""

    def __init__(self, link: Link, payload: bytes) -> None:
        self._link = link
        self._credit = wire.WINDOW
        self._more: asyncio.Future[None] | None = None
        self.ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        #: Done when a kill has done all it can.
        self.gone: asyncio.Future[Ended] | asyncio.Future[None] = self.ended
        self.number = link.open(self)
        link.send(wire.EXEC, self.number, payload)

    @abc.abstractmethod
    def received(self, stream: int, data: bytes) -> None: ...

    @abc.abstractmethod
    def closed(self, stream: int) -> None: ...

    async def write(self, data: bytes) -> None:
        """Send to its stdin, with back-pressure; what comes after its end is thrown away."""
        view = memoryview(data)
        while view and not self.ended.done():
            if not self._credit:
                self._more = asyncio.get_running_loop().create_future()
                await first(self._more, self.ended)
                continue
            await self._link.room()
            piece = view[: min(self._credit, wire.CHUNK)]
            self._credit -= len(piece)
            self._link.send(wire.DATA, self.number, bytes(piece))
            view = view[len(piece) :]

    def end_stdin(self) -> None:
        self._link.send(wire.EOF, self.number)

    async def feed(self, data: bytes) -> None:
        await self.write(data)
        self.end_stdin()

    def ask_to_kill(self) -> None:
        """Ask the helper to kill it and all its descendants."""
        self._link.send(wire.RESET, self.number)

    def credited(self, count: int) -> None:
        self._credit += count
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    def exited(self, returncode: int, stdout_truncated: bool, stderr_truncated: bool) -> None:
        self._end(Ended(returncode, stdout_truncated, stderr_truncated))

    def lost(self, reason: str) -> None:
        self._end(Ended(-9, lost=reason))

    def _end(self, ended: Ended) -> None:
        if not self.ended.done():
            self.ended.set_result(ended)

    def reset(self) -> None:
        raise ProtocolError("a command that resets")


class Collected(Running):
    """A command whose output is kept up to ``limit`` bytes a stream; the helper sends no more than that."""

    def __init__(self, link: Link, payload: bytes, limit: int) -> None:
        self._limit = limit
        self._outputs = (bytearray(), bytearray())
        super().__init__(link, payload)

    def received(self, stream: int, data: bytes) -> None:
        self._link.held -= len(data)
        output = self._outputs[stream & 1]
        if len(output) + len(data) > self._limit + (wire.CHUNK if stream & 1 else 0):
            raise ProtocolError("more output than its limit")
        output += data

    def closed(self, stream: int) -> None:
        raise ProtocolError("the end of an output that has a limit")

    def _end(self, ended: Ended) -> None:
        super()._end(ended)
        self._link.forget(self.number)
        self._link.forget(self.number + 1)

    def output(self) -> tuple[bytes, bytes]:
        """What it wrote to stdout and stderr until now."""
        stdout, stderr = self._outputs
        return bytes(stdout), bytes(stderr)


class HelperProcess(Running, Process):
    """A command with live streams."""

    def __init__(self, link: Link, payload: bytes, stop: Callable[[Running], Awaitable[None]]) -> None:
        self._stop = stop
        self._chunks: deque[tuple[str, bytearray]] = deque()
        self._allowed = [wire.WINDOW, wire.WINDOW]
        self._open = {0, 1}
        self._news = asyncio.Event()
        super().__init__(link, payload)
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def received(self, stream: int, data: bytes) -> None:
        which = stream & 1
        self._allowed[which] -= len(data)
        if self._allowed[which] < 0:
            raise ProtocolError("more output than it had credit for")
        name = ("stdout", "stderr")[which]
        if self._chunks and self._chunks[-1][0] == name and len(self._chunks[-1][1]) < wire.CHUNK:
            self._chunks[-1][1].extend(data)
        elif data:
            self._chunks.append((name, bytearray(data)))
        self._news.set()

    def closed(self, stream: int) -> None:
        self._open.discard(stream & 1)
        self._settle()

    def _end(self, ended: Ended) -> None:
        super()._end(ended)
        if ended.lost:
            self._open.clear()
            self.reset()
        self._settle()

    def reset(self) -> None:
        if not self.gone.done():
            self.gone.set_result(None)
        self._settle()

    def _settle(self) -> None:
        if self.gone.done() and self.ended.done() and not self._open:
            self._link.forget(self.number)
            self._link.forget(self.number + 1)
        self._news.set()

    async def output(self) -> AsyncIterator[tuple[str, bytes]]:
        while True:
            while self._chunks:
                name, data = self._chunks.popleft()
                which = int(name == "stderr")
                self._allowed[which] += len(data)
                self._link.credit(self.number + which, len(data))
                yield name, bytes(data)
            if not self._open:
                return
            self._news.clear()
            await self._news.wait()

    async def close_stdin(self) -> None:
        self.end_stdin()

    async def wait(self) -> int:
        return exit_code((await asyncio.shield(self.ended)).returncode)

    async def kill(self) -> None:
        await self._stop(self)
        self._link.held -= sum(len(data) for _, data in self._chunks)
        self._chunks.clear()
        self._open.clear()
        self._settle()
