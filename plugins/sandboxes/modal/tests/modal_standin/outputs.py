"""What commands have said, for whoever reads it when and from where they like."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator

CHUNK = 1 << 20


class Output:
    """One output stream of a command: kept in a file, so that it can be read again from any offset."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 -- it lives as long as this object
        self._size = 0
        self._ended = False
        self._changed = asyncio.Event()

    def append(self, data: bytes) -> None:
        self._file.seek(self._size)
        self._file.write(data)
        self._size += len(data)
        self._wake()

    def end(self) -> None:
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def read(self, offset: int) -> AsyncIterator[bytes]:
        while True:
            if offset < self._size:
                self._file.seek(offset)
                data = self._file.read(min(CHUNK, self._size - offset))
                offset += len(data)
                yield data
            elif self._ended:
                return
            else:
                await self._changed.wait()
