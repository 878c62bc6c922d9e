"""The host's end of one sandbox's control socket: numbered requests, answers as futures, and death.

Everything that arrives is treated as hostile; anything malformed counts as the death of the sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from rl_harness.errors import SandboxError
from rl_harness.sandboxes.local import protocol

KILL_WAIT = 30


class StartFailed(Exception):
    """The sandbox could not be set up; ``step`` is the system call or step that failed with ``number`` (errno)."""

    def __init__(self, step: str, number: int) -> None:
        super().__init__(f"{step}: {os.strerror(number)}")
        self.step = step
        self.number = number


class Channel:
    """Owns the control socket and the pidfd of a sandbox's init."""

    def __init__(self, control: socket.socket, name: str, on_pid: Callable[[int], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._control = control
        self._name = name
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._number = 0
        self._pidfd = -1
        self._reason = "its first process was killed"
        self._closed = False
        self._on_pid = on_pid
        self._outbox: deque[tuple[dict[str, Any], list[int]]] = deque()
        self.started: asyncio.Future[None] = self._loop.create_future()
        self.dead: asyncio.Future[None] = self._loop.create_future()
        control.setblocking(False)
        self._loop.add_reader(control, self._readable)

    @property
    def alive(self) -> bool:
        return not self._closed and not self.dead.done()

    def _readable(self) -> None:
        try:
            received = protocol.receive(self._control, trusted=False)
        except BlockingIOError:
            return
        except protocol.ProtocolError as error:
            self._disconnect(f"its init sent a malformed message ({error})")
            self.kill()
            return
        if received is None:
            self._disconnect(None)
            return
        message, descriptors = received
        if isinstance(message.get("pid"), int) and len(descriptors) == 1 and self._pidfd < 0:
            self._pidfd = descriptors[0]
            self._loop.add_reader(self._pidfd, self._exited)
            try:
                self._on_pid(message["pid"])
            except OSError as error:  # a sandbox without a record would outlive its owner: it must not start
                self._fail_start("write its record", error.errno)
                self.kill()
            return
        protocol.close_all(descriptors)
        if "failed" in message:
            self._fail_start(str(message["failed"])[:200], message.get("errno"))
        elif "ready" in message:
            if not self.started.done():
                self.started.set_result(None)
        elif "died" in message:
            self._reason = str(message["died"])[:200]
        else:
            number = message.get("id")
            answer = self._pending.pop(number, None) if isinstance(number, int) else None
            if answer is not None and not answer.done():
                answer.set_result(message)

    def _fail_start(self, step: str, number: Any) -> None:
        if not self.started.done():
            self.started.set_exception(StartFailed(step, number if isinstance(number, int) else 0))

    def _exited(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        self._disconnect(None)
        if not self.dead.done():
            self.dead.set_result(None)

    def _disconnect(self, reason: str | None) -> None:
        """No more answers will come; a sandbox without a pidfd never got to have a process."""
        if reason:
            self._reason = reason
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._control)
            self._loop.remove_writer(self._control)
            self._control.close()
            for _, descriptors in self._outbox:
                protocol.close_all(descriptors)
            self._outbox.clear()
        self._fail_start("start", 0)
        with contextlib.suppress(asyncio.InvalidStateError):
            self.started.exception()  # retrieved: nobody may be waiting
        if self._pidfd < 0 and not self.dead.done():
            self.dead.set_result(None)
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(self.error())
                answer.exception()
        self._pending.clear()

    def error(self) -> SandboxError:
        return SandboxError(f"sandbox {self._name} is gone: {self._reason}")

    def check(self) -> None:
        """Raises SandboxError when the sandbox is gone, even if the event loop has not noticed yet."""
        while not self._closed:
            try:
                self._control.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                return
            except OSError:
                pass
            self._readable()
        raise self.error()

    def request(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> asyncio.Future[dict[str, Any]]:
        """Send a request; the future of its answer. Raises SandboxError when the sandbox is gone."""
        if self._closed:
            raise self.error()
        self._number += 1
        answer: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._pending[self._number] = answer
        self._send({"id": self._number, **message}, descriptors)
        return answer

    def _send(self, message: dict[str, Any], descriptors: Sequence[int]) -> None:
        """Send now, or, behind others while init is busy, later."""
        if not self._outbox:
            try:
                protocol.send(self._control, message, descriptors)
                return
            except BlockingIOError:
                self._loop.add_writer(self._control, self._writable)
            except OSError:
                self._disconnect(None)
                return
        self._outbox.append((message, [os.dup(descriptor) for descriptor in descriptors]))

    def _writable(self) -> None:
        try:
            while self._outbox:
                protocol.send(self._control, *self._outbox[0])
                protocol.close_all(self._outbox.popleft()[1])
        except BlockingIOError:
            return
        except OSError:
            self._disconnect(None)
            return
        self._loop.remove_writer(self._control)

    def close(self, reason: str) -> None:
        """Stop talking to the sandbox; its init exits when it sees the socket close."""
        self._disconnect(reason)

    def kill(self) -> None:
        """Kill init, and with it every process of the sandbox."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def kill_and_wait(self) -> None:
        """Kill init and block until every process of the sandbox is gone."""
        self.kill()
        if self._pidfd >= 0:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            poll.poll(KILL_WAIT * 1000)
            self._exited()
