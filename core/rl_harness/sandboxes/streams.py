"""Pipes of commands on the event loop: collecting output up to a limit, live reading, feeding stdin."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping

CHUNK = 1 << 18
_DRAIN = 1 << 21


class Collector:
    """Reads a pipe as data arrives, keeps the first ``limit`` bytes and throws the rest away.

    It owns the descriptor. After :meth:`finish` it goes on reading, so that a background process that holds the
    other end is neither blocked nor killed by a closed pipe, until :meth:`close` or end of file.
    """

    def __init__(self, descriptor: int, limit: int) -> None:
        self._descriptor = descriptor
        self._limit = limit
        self._data = bytearray()
        self._finished = False
        self.truncated = False
        self.ended = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        os.set_blocking(descriptor, False)
        self._loop.add_reader(descriptor, self._read)

    def _read(self) -> int:
        try:
            chunk = os.read(self._descriptor, CHUNK)
        except BlockingIOError:
            return 0
        except OSError:
            chunk = b""
        if not chunk:
            self.close()
            return 0
        if not self._finished:
            room = self._limit - len(self._data)
            self._data += chunk[:room] if room < len(chunk) else chunk
            self.truncated = self.truncated or len(chunk) > room
        return len(chunk)

    def finish(self) -> bytes:
        """What the command wrote until now; call when it has exited."""
        drained = 0
        while self._descriptor >= 0 and drained < _DRAIN and (count := self._read()):
            drained += count
        self._finished = True
        data, self._data = bytes(self._data), bytearray()
        return data

    def close(self) -> None:
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1
            if not self.ended.done():
                self.ended.set_result(None)


class Reader:
    """Reads a pipe on demand: nothing is read ahead, so a slow consumer slows the command."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        os.set_blocking(descriptor, False)

    async def read(self) -> bytes:
        """The next bytes; empty at the end of the stream."""
        while self._descriptor >= 0:
            try:
                chunk = os.read(self._descriptor, CHUNK)
            except BlockingIOError:
                await self._readable()
                continue
            except OSError:
                chunk = b""
            if not chunk:
                self.close()
            return chunk
        return b""

    async def _readable(self) -> None:
        self._waiter = self._loop.create_future()
        self._loop.add_reader(self._descriptor, _wake, self._waiter)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if self._descriptor >= 0:
                self._loop.remove_reader(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1
            if self._waiter is not None:
                _wake(self._waiter)


class Writer:
    """Writes to a pipe with back-pressure. A closed other end is not an error: programs may ignore their stdin."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        os.set_blocking(descriptor, False)

    @property
    def closed(self) -> bool:
        """Closed here, or found closed at the other end."""
        return self._descriptor < 0

    async def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view and self._descriptor >= 0:
            try:
                view = view[os.write(self._descriptor, view) :]
            except BlockingIOError:
                await self._writable()
            except OSError:
                self.close()

    async def _writable(self) -> None:
        self._waiter = self._loop.create_future()
        self._loop.add_writer(self._descriptor, _wake, self._waiter)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if self._descriptor >= 0:
                self._loop.remove_writer(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            self._loop.remove_writer(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1
            if self._waiter is not None:
                _wake(self._waiter)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


async def feed(writer: Writer, data: bytes) -> None:
    """Write all of ``data`` and close."""
    try:
        await writer.write(data)
    finally:
        writer.close()


async def merge(readers: Mapping[str, Reader]) -> AsyncIterator[tuple[str, bytes]]:
    """``(name, chunk)`` of several readers as they arrive, until all have ended."""
    reads = {asyncio.create_task(reader.read()): name for name, reader in readers.items()}
    try:
        while reads:
            done, _ = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                name = reads.pop(task)
                if chunk := task.result():
                    reads[asyncio.create_task(readers[name].read())] = name
                    yield name, chunk
    finally:
        for task in reads:
            task.cancel()
