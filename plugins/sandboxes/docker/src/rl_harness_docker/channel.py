"""The way to a container's first process: it lives as long as this is open, and unpacks what is sent to it.

The engine starts a program of its own to unpack an archive, which takes longer than all else about a small one. The
first process was there before any command, and is one of the agent's processes like others once there are any: after
these were killed, on behalf of a verifier, it is not used any more.

What it prints is listened to only while an answer of it is awaited. Otherwise the engine throws it away: a connection
that nobody reads would fill, and the engine ends no container whose output it cannot pass on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from rl_harness_docker.engine import Connection, Engine, EngineError

#: What is sent at once: larger archives gain nothing.
LARGEST = 8 << 20

# How long the first process may take for an archive, before the engine is asked instead: an agent may have taken its
# input away. In seconds, and in seconds for each byte.
_PATIENCE, _PATIENCE_PER_BYTE = 2.0, 0.5 / (1 << 20)

FIRST = """
work='while read -r count; do head -c "$count" | tar -x -p -f - -C / 2>/dev/null; echo $?; done'
if command -v timeout >/dev/null; then exec timeout -s KILL "$0" /bin/sh -c "$work"; fi
exec /bin/sh -c "$work"
"""
"""The script of the first process, called with the lifetime in seconds. It ends with its input, which the engine closes
when this side is gone, however it went."""


class Channel:
    """One for each start of a container; ``connection`` is attached to the input of its first process."""

    def __init__(self, engine: Engine, container: str, connection: Connection) -> None:
        self._engine = engine
        self._container = container
        self._connection = connection
        self._busy = asyncio.Lock()
        self._usable = True
        self.closed = False

    async def unpack(self, pieces: Sequence[bytes]) -> bool:
        """Unpack a tar archive at the root. False when that cannot be done this way, and may have been in part."""
        async with self._busy:
            if not self._usable:
                return False
            self._usable = False  # unless all goes well: what was sent in part cannot be taken back
            size = sum(map(len, pieces))
            try:
                async with asyncio.timeout(_PATIENCE + size * _PATIENCE_PER_BYTE), self._output() as output:
                    await self._connection.write(b"%d\n" % size)
                    for piece in pieces:
                        await self._connection.write(piece)
                    # One frame of the multiplexed output: kind, three zeros, length, content.
                    header = await output.readexactly(8)
                    self._usable = await output.readexactly(int.from_bytes(header[4:], "big")) == b"0\n"
            except (EngineError, OSError, TimeoutError, asyncio.IncompleteReadError):
                return False
            return self._usable

    @contextlib.asynccontextmanager
    async def _output(self) -> AsyncIterator[asyncio.StreamReader]:
        path = f"/containers/{self._container}/attach"
        connection = await self._engine.hijack(path, params={"stream": 1, "stdout": 1})
        try:
            yield connection.reader
        finally:
            connection.close()

    def close(self) -> None:
        self._usable = False
        self.closed = True
        self._connection.close()
