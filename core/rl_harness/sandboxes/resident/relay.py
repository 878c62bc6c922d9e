"""Connections made in a sandbox, handed to a protocol of the host as if they had been accepted here.

No socket and no descriptor of the host is spent on one, so that an agent which opens many takes nothing from others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from rl_harness.sandboxes.resident import helper as wire
from rl_harness.sandboxes.resident.frames import ProtocolError
from rl_harness.sandboxes.resident.link import Link

log = logging.getLogger("rl_harness.sandboxes.resident")

Target = Callable[[], asyncio.Protocol]
"""Makes what answers one connection. Called once for each that is made inside; an ``OSError`` refuses it."""

MAX_CONNECTIONS = 512
#: Bytes of an answer waiting to be sent beyond which its writer is asked to pause.
_HIGH = wire.CHUNK


class Relay:
    """A port of the sandbox's loopback behind which the host's target answers."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._connections: set[Connection] = set()
        self.port = 0

    @property
    def url(self) -> str:
        """As the agent reaches it, without a path."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def connections(self) -> int:
        return len(self._connections)

    def accept(self, link: Link, stream: int) -> None:
        """A connection was made inside."""
        if len(self._connections) >= MAX_CONNECTIONS:
            link.send(wire.RESET, stream)
            return
        try:
            protocol = self._target()
        except OSError as error:
            log.debug("the relay's target refuses: %s", error)
            link.send(wire.RESET, stream)
            return
        connection = Connection(link, stream, protocol, self._connections.discard)
        self._connections.add(connection)
        link.streams[stream] = connection
        connection.begin()

    def close(self) -> None:
        for connection in list(self._connections):
            connection.abort()


class Connection(asyncio.Transport):
    """A stream of the link as the transport of ``protocol``, with the semantics of a socket's."""

    def __init__(
        self, link: Link, stream: int, protocol: asyncio.BaseProtocol, done: Callable[[Connection], None]
    ) -> None:
        super().__init__()
        self._link = link
        self._stream = stream
        self._protocol = protocol
        self._done = done
        self._loop = asyncio.get_running_loop()
        self._incoming = bytearray()  # while reading is paused
        self._allowed = wire.WINDOW  # what the helper may still send
        self._owed = 0
        self._reading = True
        self._inside_ended = self._told_inside_ended = False
        self._outgoing = bytearray()  # waiting for credit
        self._credit = wire.WINDOW
        self._paused_writer = self._waiting = False
        self._ending = self._ended = False  # no more will be written; the inside knows
        self._closing = self._finished = False

    def begin(self) -> None:
        self._call(self._protocol.connection_made, self)

    def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """A protocol that raises costs its own connection."""
        try:
            return method(*arguments)
        except Exception:
            log.exception("the relay's target failed")
            self.abort()
            return None

    # What the protocol sees

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def is_closing(self) -> bool:
        return self._closing

    def is_reading(self) -> bool:
        return self._reading and not self._closing

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        if not self._reading:
            self._reading = True
            self._loop.call_soon(self._deliver)

    def get_write_buffer_size(self) -> int:
        return len(self._outgoing)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._closing or self._ending:
            return
        if self._outgoing or len(data) > self._credit or self._link.congested:
            self._outgoing += data
            self._pump()
        else:
            self._send(bytes(data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self._ending = True
        self._pump()

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._incoming.clear()
            self._pump()

    def abort(self) -> None:
        if not self._finished:
            self._link.send(wire.RESET, self._stream)
            self._finish(None)

    # Outwards from the host

    def _send(self, data: bytes) -> None:
        self._credit -= len(data)
        for at in range(0, len(data), wire.CHUNK):
            self._link.send(wire.DATA, self._stream, data[at : at + wire.CHUNK])

    def _pump(self) -> None:
        """Send what waits as far as credit and the link allow, and the end after it."""
        if self._finished:
            return
        while self._outgoing and self._credit and not self._link.congested:
            data = bytes(self._outgoing[: min(self._credit, wire.CHUNK)])
            del self._outgoing[: len(data)]
            self._send(data)
        if self._outgoing and self._credit and not self._waiting:
            self._waiting = True
            self._link.when_roomy(self._roomy)
        if self._paused_writer and len(self._outgoing) <= _HIGH // 2:
            self._paused_writer = False
            self._call(self._protocol.resume_writing)
        elif not self._paused_writer and len(self._outgoing) > _HIGH:
            self._paused_writer = True
            self._call(self._protocol.pause_writing)
        if not self._outgoing and (self._ending or self._closing) and not self._ended:
            self._ended = True
            self._link.send(wire.EOF, self._stream)
        if self._ended and (self._closing or self._told_inside_ended):
            self._finish(None)

    def _roomy(self) -> None:
        self._waiting = False
        self._pump()

    def credited(self, count: int) -> None:
        self._credit += count
        self._pump()

    # Inwards to the host

    def received(self, stream: int, data: bytes) -> None:
        self._allowed -= len(data)
        if self._allowed < 0:
            raise ProtocolError("more data than it had credit for")
        self._incoming += data
        self._deliver()

    def closed(self, stream: int) -> None:
        self._inside_ended = True
        self._deliver()

    def _deliver(self) -> None:
        if not self.is_reading() or self._finished:
            return
        if self._incoming:
            data = bytes(self._incoming)
            self._incoming.clear()
            self._repay(len(data))
            assert isinstance(self._protocol, asyncio.Protocol)
            self._call(self._protocol.data_received, data)
        if self._inside_ended and self._reading and not self._told_inside_ended and not self._closing:
            self._told_inside_ended = True
            assert isinstance(self._protocol, asyncio.Protocol)
            if self._call(self._protocol.eof_received):
                self._pump()
            else:
                self.close()

    def _repay(self, count: int) -> None:
        self._owed += count
        if self._owed >= wire.WINDOW // 4:
            self._allowed += self._owed
            self._link.credit(self._stream, self._owed)
            self._owed = 0

    # Its end

    def reset(self) -> None:
        self._finish(ConnectionResetError("the connection was reset in the sandbox"))

    def lost(self, reason: str) -> None:
        self._finish(ConnectionResetError(f"the helper in the sandbox is lost: {reason}"))

    def exited(self, returncode: int, stdout_truncated: bool, stderr_truncated: bool) -> None:
        raise ProtocolError("the exit of a connection")

    def _finish(self, error: Exception | None) -> None:
        if self._finished:
            return
        self._finished = self._closing = True
        self._incoming.clear()
        self._outgoing.clear()
        self._link.forget(self._stream)
        self._link.held -= wire.WINDOW - self._allowed
        self._done(self)
        self._loop.call_soon(self._call, self._protocol.connection_lost, error)
