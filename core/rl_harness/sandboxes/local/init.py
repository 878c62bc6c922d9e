"""Process 1 of a sandbox: starts commands and file workers on the host's request, reaps, and kills.

It is the trusted part inside. The agent's processes cannot signal it (it is process 1 of their namespace and has no
handlers they could use), trace it or open its memory (it holds capabilities they lack, and is not dumpable). After
the sandbox is set up it imports nothing, so that no file of the agent's is ever loaded.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from rl_harness.sandboxes.local import command, files, protocol
from rl_harness.sandboxes.local import syscalls as sc
from rl_harness.sandboxes.local.mounts import Root

KILL_PASSES = 200
_WORKER = "worker"
_KEEPER = "keeper"


class Job:
    """A keeper or file worker: a child of init that reports on a pipe."""

    def __init__(self, number: int, kind: str, pid: int, report: int) -> None:
        self.number = number
        self.kind = kind
        self.pid = pid
        self.report = report
        self.answered = False


class Init:
    def __init__(self, control: socket.socket, root: Root, links: dict[str, str], rules: command.Rules) -> None:
        self._control = control
        self._root = root
        self._links = links
        self._rules = rules
        self._jobs: dict[int, Job] = {}  # by report descriptor
        self._proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._poll = select.poll()
        self._wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._poll.register(self._wake_read, select.POLLIN)
        self._poll.register(control.fileno(), select.POLLIN)

    def serve(self, lifetime: float) -> NoReturn:
        """Serve until the host is gone or ``lifetime`` seconds have passed; then exit, which kills everything."""
        deadline = time.monotonic() + lifetime
        while (left := deadline - time.monotonic()) > 0:
            for descriptor, _ in self._poll.poll(min(left, 3600) * 1000):
                if descriptor == self._control.fileno():
                    self._receive()
                elif descriptor == self._wake_read:
                    _drain(self._wake_read)
                elif descriptor in self._jobs:
                    self._report(self._jobs[descriptor])
            self._reap()
        self._send({"died": "its lifetime has passed"})
        os._exit(0)

    def _receive(self) -> None:
        received = protocol.receive(self._control, trusted=True)
        if received is None:
            os._exit(0)
        request, descriptors = received
        try:
            self._handle(request, descriptors)
        except OSError as error:
            self._send({"id": request.get("id"), "error": error.strerror, "kind": "busy"})
        finally:
            protocol.close_all(descriptors)

    def _handle(self, request: dict[str, Any], descriptors: list[int]) -> None:
        number, kind = request["id"], request["op"]
        if kind == "exec":
            self._start(number, _KEEPER, lambda report: command.keep(request, descriptors, report, self._rules))
        elif kind == "kill":
            for job in list(self._jobs.values()):
                if job.number == request["job"]:
                    self._kill_job(job)
            self._send({"id": number})
        elif kind == "kill_all":
            self._kill_all()
            self._send({"id": number})
        else:
            self._start(number, _WORKER, lambda report: self._work(request, descriptors, report))

    def _start(self, number: int, kind: str, body: Callable[[int], NoReturn]) -> None:
        reader, writer = os.pipe2(os.O_CLOEXEC)
        try:
            pid = os.fork()
        except OSError:
            os.close(reader)
            os.close(writer)
            raise
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                self._control.close()
                os.close(reader)
                os.close(self._proc)
                for descriptor in self._jobs:
                    os.close(descriptor)
                body(writer)
            finally:
                os._exit(125)
        os.close(writer)
        self._jobs[reader] = Job(number, kind, pid, reader)
        self._poll.register(reader, select.POLLIN)

    def _work(self, request: dict[str, Any], descriptors: list[int], report: int) -> NoReturn:
        answer: dict[str, Any] = {}
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        try:
            data = descriptors[0]
            operation = request["op"]
            path = files.resolve(request.get("path", "/"), self._links)
            if operation == "read":
                files.read(path, data, request["limit"])
            elif operation == "write":
                files.write(path, data, request["mode"])
            elif operation == "pack":
                files.pack(path, data, request["skip_unsafe"])
            elif operation == "unpack":
                files.unpack(path, data)
            elif operation == "changes":
                files.changes(self._root, data)
            else:
                answer = {"error": f"unknown operation {operation}", "kind": "refused"}
        except files.Refused as error:
            answer = {"error": str(error), "kind": error.kind}
        except BrokenPipeError:  # the host stopped reading and knows why
            answer = {"error": "the host stopped reading", "kind": "broken"}
        except OSError as error:
            answer = {"error": f"{request.get('path')}: {error.strerror}", "kind": "refused"}
        os.write(report, json.dumps(answer).encode()[:4000])
        os._exit(0)

    def _report(self, job: Job) -> None:
        data = os.read(job.report, 4096)
        if data and not job.answered:
            job.answered = True
            if job.kind == _KEEPER:
                self._send({"id": job.number, "status": command.STATUS.unpack(data)[0]})
            else:
                answer = json.loads(data)
                self._send({"id": job.number, **answer})
        elif not data:
            self._poll.unregister(job.report)
            os.close(job.report)
            del self._jobs[job.report]
            if not job.answered:
                self._send({"id": job.number, "status": int(signal.SIGKILL), "error": "killed", "kind": "killed"})

    def _send(self, message: dict[str, Any]) -> None:
        try:
            protocol.send(self._control, message)
        except OSError:
            os._exit(0)

    def _reap(self) -> None:
        """Collect the dead. What a killed keeper leaves behind falls to init and has no owner: it is killed."""
        killed = False
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                killed = killed or os.WIFSIGNALED(ended[1])
        except ChildProcessError:
            return
        if killed:
            known = {job.pid for job in self._jobs.values()}
            for pid, parent, state in self._processes():
                if parent == 1 and pid not in known and state != "Z":
                    self._kill_tree(pid)

    def _processes(self) -> list[tuple[int, int, str]]:
        """Pid, parent and state of every process in the sandbox."""
        found = []
        for name in os.listdir(self._proc):
            if name.isdecimal():
                try:
                    descriptor = os.open(f"{name}/stat", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc)
                except OSError:
                    continue
                try:
                    # The name in brackets may hold anything, brackets included.
                    state, parent = os.read(descriptor, 512).rpartition(b")")[2].split()[:2]
                    found.append((int(name), int(parent), state.decode()))
                except (OSError, ValueError):
                    continue
                finally:
                    os.close(descriptor)
        return found

    def _kill_tree(self, root: int) -> None:
        """Kill ``root`` and all its descendants; one that forks faster than it can be listed costs the others."""
        for _ in range(KILL_PASSES):
            living = self._descendants(root)
            if not living:
                break
            for pid in living:
                _kill(pid)
        else:
            self._kill_all()
        _kill(root)

    def _descendants(self, root: int) -> list[int]:
        children: dict[int, list[tuple[int, str]]] = {}
        for pid, parent, state in self._processes():
            children.setdefault(parent, []).append((pid, state))
        found, pending = [], [root]
        while pending:
            for pid, state in children.get(pending.pop(), ()):
                pending.append(pid)
                if state != "Z":
                    found.append(pid)
        return found

    def _kill_job(self, job: Job) -> None:
        self._kill_tree(job.pid)

    def _kill_all(self) -> None:
        """Kill everything but init, in one call that no fork escapes, and wait until it is gone."""
        while True:
            try:
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                pass
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                return


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _drain(descriptor: int) -> None:
    try:
        while os.read(descriptor, 4096):
            pass
    except BlockingIOError:
        pass


def harden(seccomp: bytes) -> None:
    """Shut this process off from the agent, and give up what neither it nor any command needs again.

    From here on nothing is imported, traced or dumped. Init keeps its capabilities, more than any command has.
    """
    sys.meta_path.clear()
    sys.path.clear()
    sys.path_hooks.clear()
    sc.prctl(sc.PR_SET_DUMPABLE, 0)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):  # what Python changed, commands must not inherit
        signal.signal(number, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sc.drop_bounding(command.CAPABILITIES)
    sc.prctl(sc.PR_SET_NO_NEW_PRIVS, 1)
    sc.set_seccomp(seccomp)
