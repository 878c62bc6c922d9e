"""The host's ends of a sandbox's workers: one request a worker at a time, idle ones kept for the next.

A worker that dies while it runs a request has been killed, by the agent or on our demand: the answer is the status
of a command killed by SIGKILL. When the whole sandbox is gone instead, the answer is its SandboxError.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Sequence
from typing import Any

from rl_harness.errors import SandboxError
from rl_harness.sandboxes.local import protocol
from rl_harness.sandboxes.local.channel import Channel

MAX_IDLE = 3

Answer = asyncio.Future[dict[str, Any]]


class Job:
    """A request given to a worker; ``answer`` is its result."""

    def __init__(self, worker: Worker, answer: Answer) -> None:
        self.worker = worker
        self.answer = answer


class Workers:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._number = 0
        self._idle: list[Worker] = []
        self._all: set[Worker] = set()

    def submit(self, message: dict[str, Any], descriptors: Sequence[int]) -> Job:
        """Give a request to an idle worker, or to a new one. Raises SandboxError when the sandbox is gone."""
        self._channel.check()
        while self._idle:
            worker = self._idle.pop()
            if worker.responsive():
                break
        else:
            worker = self._start()
        job = worker.job = Job(worker, worker.send(message, descriptors))
        return job

    def _start(self) -> Worker:
        self._number += 1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        worker = Worker(ours, self._number, self)
        self._all.add(worker)
        with theirs:
            started = self._channel.request({"op": "worker", "worker": self._number}, (theirs.fileno(),))
        started.add_done_callback(worker.started)
        return worker

    def kill(self, job: Job) -> Answer | None:
        """Have the job's command and its descendants killed, and its worker with them.

        The future is done when none is alive any more; None when there is nothing to kill. The job's own answer may
        come earlier, when its command is dead and descendants are not.
        """
        if job.worker.job is not job:
            return None  # it and all it started have ended
        job.worker.doomed = True
        try:
            killed = self._channel.request({"op": "kill", "worker": job.worker.number})
        except SandboxError:
            return None
        killed.add_done_callback(_retrieve)
        return killed

    def idle(self, worker: Worker) -> None:
        if len(self._idle) < MAX_IDLE:
            self._idle.append(worker)
        else:
            worker.close()

    def gone(self, worker: Worker) -> None:
        self._all.discard(worker)
        if worker in self._idle:
            self._idle.remove(worker)

    def death(self) -> BaseException | None:
        """Why no worker can answer any more, or None while the sandbox lives."""
        try:
            self._channel.check()
        except SandboxError as error:
            return error
        return None

    def close(self) -> None:
        for worker in list(self._all):
            worker.close()


class Worker:
    """The host's end of one worker."""

    def __init__(self, control: socket.socket, number: int, pool: Workers) -> None:
        self.number = number
        self._control = control
        self._pool = pool
        self._answer: Answer | None = None
        self.doomed = False
        self.job: Job | None = None
        self._loop = asyncio.get_running_loop()
        control.setblocking(False)
        self._loop.add_reader(control, self._readable)

    def responsive(self) -> bool:
        """False when it was killed and that has not been noticed yet."""
        try:
            return bool(self._control.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def send(self, message: dict[str, Any], descriptors: Sequence[int]) -> Answer:
        answer: Answer = self._loop.create_future()
        self._answer = answer
        try:
            protocol.send(self._control, message, descriptors)
        except OSError:
            self._lost()
        return answer

    def started(self, outcome: Answer) -> None:
        """Init's word on the worker: an error when it could not be forked."""
        if outcome.cancelled() or outcome.exception() is not None:
            return
        error = outcome.result().get("error")
        if error is not None:
            self._settle({"error": str(error)[:200]})

    def _settle(self, message: dict[str, Any]) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_result(message)

    def _readable(self) -> None:
        try:
            received = protocol.receive(self._control, trusted=False)
        except BlockingIOError:
            return
        except protocol.ProtocolError as error:
            self._settle({"error": f"malformed answer ({error})", "kind": "malformed"})
            self.close()
            return
        if received is None:
            self._lost()
            return
        message, descriptors = received
        protocol.close_all(descriptors)
        if "status" in message or "error" in message or self._answer is not None:
            self._settle(message)
        if message.get("idle") is True and not self.doomed:
            self.job = None
            self._pool.idle(self)

    def _lost(self) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            death = self._pool.death()
            if death is not None:
                answer.set_exception(death)
                answer.exception()  # retrieved: nobody may be waiting
            else:
                answer.set_result({"status": int(signal.SIGKILL), "error": "killed", "kind": "killed"})
        self.close()

    def close(self) -> None:
        if self._control.fileno() >= 0:
            self._loop.remove_reader(self._control)
            self._control.close()
            self._pool.gone(self)
            self._lost()


def _retrieve(future: Answer) -> None:
    if not future.cancelled():
        future.exception()
