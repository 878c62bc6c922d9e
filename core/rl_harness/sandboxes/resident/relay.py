"""Carries connections made in a sandbox to a place of the host's choice, with back-pressure both ways."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import cast

from rl_harness.sandboxes.resident import helper as wire
from rl_harness.sandboxes.resident.frames import ProtocolError
from rl_harness.sandboxes.resident.link import Link

log = logging.getLogger("rl_harness.sandboxes.resident")

Connect = Callable[[], Awaitable[socket.socket]]
"""Opens a connection to what the relay exposes. Called once for each connection made inside."""

MAX_CONNECTIONS = 1024


def tcp(host: str, port: int) -> Connect:
    """Connects to an address that the host can reach."""

    async def connect() -> socket.socket:
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, (host, port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except BaseException:
            sock.close()
            raise
        return sock

    return connect


class Relay:
    """A port of the sandbox's loopback behind which the host's target answers."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._connections: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
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
        connection = Connection(link, stream, self._connections.discard)
        self._connections.add(connection)
        link.streams[stream] = connection
        task = asyncio.create_task(connection.open(self._connect))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        for connection in list(self._connections):
            connection.abort()


class Connection(asyncio.Protocol):
    """One connection: a stream of the link on one side, a socket to the target on the other."""

    def __init__(self, link: Link, stream: int, done: Callable[[Connection], None]) -> None:
        self._link = link
        self._stream = stream
        self._done = done
        self._transport: asyncio.Transport | None = None
        self._early = bytearray()  # from the sandbox, before the target was reached
        self._late = bytearray()  # from the target, waiting for credit
        self._credit = wire.WINDOW
        self._allowed = wire.WINDOW  # what the helper may still send
        self._owed = 0
        self._slow = self._queued = False
        self._inside_ended = self._target_ended = self._told = self._finished = False

    async def open(self, connect: Connect) -> None:
        try:
            sock = await connect()
            if self._finished:
                sock.close()
                return
            await asyncio.get_running_loop().create_connection(lambda: self, sock=sock)
        except OSError as error:
            log.debug("the relay's target does not answer: %s", error)
            self.abort()
        except BaseException:
            self.abort()
            raise

    # The target's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=wire.CHUNK)
        if self._finished:
            self._transport.abort()
            return
        if self._early:
            early, self._early = bytes(self._early), bytearray()
            self._forward(early)
        if self._inside_ended:
            self._end_writing()

    def data_received(self, data: bytes) -> None:
        if self._late or len(data) > self._credit or self._link.congested:
            self._late += data
            self._pump()
        else:
            self._send(data)

    def _send(self, data: bytes) -> None:
        self._credit -= len(data)
        for at in range(0, len(data), wire.CHUNK):
            self._link.send(wire.DATA, self._stream, data[at : at + wire.CHUNK])

    def _pump(self) -> None:
        """Send what waits as far as credit and the link allow; read on only when nothing waits."""
        if self._finished:
            return
        while self._late and self._credit and not self._link.congested:
            data = bytes(self._late[: min(self._credit, wire.CHUNK)])
            del self._late[: len(data)]
            self._send(data)
        if self._late and self._credit and not self._queued:
            self._queued = True
            self._link.when_roomy(self._roomy)
        if self._transport is not None and not self._target_ended:
            if self._late:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()
        if self._target_ended and not self._late:
            self._tell_end()

    def _roomy(self) -> None:
        self._queued = False
        self._pump()

    def eof_received(self) -> bool:
        self._target_ended = True
        if not self._late:
            self._tell_end()
        return True

    def _tell_end(self) -> None:
        if not self._told:
            self._told = True
            self._link.send(wire.EOF, self._stream)
            self._end_when_both_did()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if error is not None:
            self.abort()
        elif not self._finished:
            self._target_ended = True
            self._inside_ended = True
            self._pump()

    def pause_writing(self) -> None:
        self._slow = True

    def resume_writing(self) -> None:
        self._slow = False
        self._repay()

    # The sandbox's side

    def received(self, stream: int, data: bytes) -> None:
        self._allowed -= len(data)
        if self._allowed < 0:
            raise ProtocolError("more data than it had credit for")
        if self._transport is None:
            self._early += data
        else:
            self._forward(data)

    def _forward(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)
        self._owed += len(data)
        self._repay()

    def _repay(self) -> None:
        if self._owed >= wire.WINDOW // 4 and not self._slow and not self._finished:
            owed, self._owed = self._owed, 0
            self._allowed += owed
            self._link.credit(self._stream, owed)

    def credited(self, count: int) -> None:
        self._credit += count
        self._pump()

    def closed(self, stream: int) -> None:
        self._inside_ended = True
        self._end_writing()

    def _end_writing(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write_eof()
        self._end_when_both_did()

    def exited(self, returncode: int, stdout_truncated: bool, stderr_truncated: bool) -> None:
        raise ProtocolError("the exit of a connection")

    def reset(self) -> None:
        self._end(abort=True)

    def lost(self, reason: str) -> None:
        self._end(abort=True)

    def abort(self) -> None:
        """Break it on both sides."""
        if not self._finished:
            self._link.send(wire.RESET, self._stream)
            self._end(abort=True)

    def _end_when_both_did(self) -> None:
        if self._told and self._inside_ended:
            self._end(abort=False)

    def _end(self, *, abort: bool) -> None:
        if self._finished:
            return
        self._finished = True
        self._link.forget(self._stream)
        self._link.held -= wire.WINDOW - self._allowed
        self._done(self)
        if self._transport is not None:
            if abort:
                self._transport.abort()
            else:
                self._transport.close()
