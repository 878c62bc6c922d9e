"""The way to a container's first process: it lives as long as this is open, and unpacks what is sent to it.

The engine starts a program of its own to unpack an archive, which takes longer than all else about a small one. The
first process was there before any command, and is one of the agent's processes like others once there are any: after
these were killed, on behalf of a verifier, it is not used any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rl_harness_docker.engine import Connection

#: What is sent at once: larger archives gain nothing.
LARGEST = 8 << 20

# How long the first process may take for an archive, before the engine is asked instead.
_PATIENCE = 10.0

FIRST = """
work='while read -r count; do head -c "$count" | tar -x -p -f - -C / 2>/dev/null; echo $?; done'
if command -v timeout >/dev/null; then exec timeout -s KILL "$0" /bin/sh -c "$work"; fi
exec /bin/sh -c "$work"
"""
"""The script of the first process, called with the lifetime in seconds. It ends with its input, which the engine closes
when this side is gone, however it went."""


class Channel:
    """One for each start of a container; ``connection`` is attached to its first process."""

    def __init__(self, connection: Connection) -> None:
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
            try:
                async with asyncio.timeout(_PATIENCE):
                    await self._connection.write(b"%d\n" % sum(map(len, pieces)))
                    for piece in pieces:
                        await self._connection.write(piece)
                    self._usable = await self._answer() == b"0\n"
            except (OSError, TimeoutError, asyncio.IncompleteReadError):
                return False
            return self._usable

    async def _answer(self) -> bytes:
        """One frame of the multiplexed output: kind, three zeros, length, content."""
        header = await self._connection.reader.readexactly(8)
        return await self._connection.reader.readexactly(int.from_bytes(header[4:], "big"))

    def close(self) -> None:
        self._usable = False
        self.closed = True
        self._connection.close()
