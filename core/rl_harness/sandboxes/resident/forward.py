"""A relay's target that passes connections on to an address which the host can reach."""

from __future__ import annotations

import asyncio
import logging
from typing import cast

from rl_harness.sandboxes.resident.relay import Target

log = logging.getLogger("rl_harness.sandboxes.resident")


def tcp(host: str, port: int) -> Target:
    """Connects to ``port`` of ``host`` for each connection made inside."""

    def target() -> asyncio.Protocol:
        end = _End()
        end.connecting = asyncio.get_running_loop().create_task(_connect(end, host, port))
        return end

    return target


class _End(asyncio.Protocol):
    """One end of a forwarded connection: what arrives at it leaves by the ``other``, as fast as that takes it."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: _End | None = None
        self.connecting: asyncio.Task[None] | None = None
        self._ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if self.other is None:
            self.transport.pause_reading()

    def meet(self, other: _End) -> None:
        self.other = other
        if self.transport is not None:
            self.transport.resume_reading()

    def _beyond(self) -> asyncio.Transport | None:
        return self.other.transport if self.other is not None else None

    def data_received(self, data: bytes) -> None:
        if (beyond := self._beyond()) is not None:
            beyond.write(data)

    def eof_received(self) -> bool:
        self._ended = True
        beyond = self._beyond()
        if beyond is not None and not beyond.is_closing():
            beyond.write_eof()
        if self.other is not None and self.other._ended:
            self._close_both()
        return True

    def _close_both(self) -> None:
        for transport in (self.transport, self._beyond()):
            if transport is not None:
                transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if self.connecting is not None:
            self.connecting.cancel()
        if (beyond := self._beyond()) is not None:
            if error is None:
                beyond.close()
            else:
                beyond.abort()

    def pause_writing(self) -> None:
        if (beyond := self._beyond()) is not None:
            beyond.pause_reading()

    def resume_writing(self) -> None:
        if (beyond := self._beyond()) is not None:
            beyond.resume_reading()


async def _connect(inside: _End, host: str, port: int) -> None:
    outside = _End()
    outside.other = inside
    try:
        await asyncio.get_running_loop().create_connection(lambda: outside, host, port)
    except OSError as error:
        log.debug("the relay's target does not answer: %s", error)
        if inside.transport is not None:
            inside.transport.abort()
        return
    inside.meet(outside)
