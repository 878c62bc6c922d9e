"""Process 1 of a sandbox: forks workers on the host's request, reaps, and kills.

It is the trusted part inside. The agent's processes cannot signal it (it is process 1 of their namespace and has no
handlers they could use), trace it or open its memory (it holds capabilities they lack, and is not dumpable). After
the sandbox is set up it imports nothing, so that no file of the agent's is ever loaded.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import sys
import time
from typing import Any, NoReturn

from rl_harness.sandboxes.local import command, protocol
from rl_harness.sandboxes.local import syscalls as sc
from rl_harness.sandboxes.local.mounts import Root
from rl_harness.sandboxes.local.worker import Worker

KILL_PASSES = 200
KILL_SECONDS = 10


class Init:
    def __init__(self, control: socket.socket, root: Root, links: dict[str, str], rules: command.Rules) -> None:
        self._control = control
        self._root = root
        self._links = links
        self._rules = rules
        self._workers: dict[int, int] = {}  # pids by the host's numbers
        self._proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self, lifetime: float) -> NoReturn:
        """Serve until the host is gone or ``lifetime`` seconds have passed; then exit, which kills everything."""
        deadline = time.monotonic() + lifetime
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        poll.register(self._control.fileno(), select.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            for descriptor, _ in poll.poll(min(left, 3600) * 1000):
                if descriptor == self._control.fileno():
                    self._receive()
                else:
                    _drain(descriptor)
                    self._reap()
        self._send({"died": "its lifetime has passed"})
        os._exit(0)

    def _receive(self) -> None:
        received = protocol.receive(self._control, trusted=True)
        if received is None:
            os._exit(0)
        request, descriptors = received
        answer: dict[str, Any] = {"id": request["id"]}  # to a ping, the whole answer
        try:
            if request["op"] == "worker":
                self._start_worker(request["worker"], descriptors[0])
            elif request["op"] == "kill" and request["worker"] in self._workers:
                self._kill_tree(self._workers[request["worker"]])
            elif request["op"] == "kill_all":
                self._kill_all()
        except OSError as error:
            answer["error"] = error.strerror
        finally:
            protocol.close_all(descriptors)
        self._send(answer)

    def _start_worker(self, number: int, descriptor: int) -> None:
        pid = os.fork()
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                self._control.close()
                os.close(self._proc)
                Worker(socket.socket(fileno=descriptor), self._root, self._links, self._rules).serve()
            finally:
                os._exit(125)
        self._workers[number] = pid

    def _send(self, message: dict[str, Any]) -> None:
        try:
            protocol.send(self._control, message)
        except OSError:
            os._exit(0)

    def _reap(self) -> None:
        """Collect the dead. What a killed worker leaves behind falls to init and has no owner: it is killed."""
        ended, killed = set(), False
        try:
            while (child := os.waitpid(-1, os.WNOHANG))[0]:
                ended.add(child[0])
                killed = killed or os.WIFSIGNALED(child[1])
        except ChildProcessError:
            pass
        self._workers = {number: pid for number, pid in self._workers.items() if pid not in ended}
        if killed:
            workers = set(self._workers.values())
            for pid, parent, state in self._processes():
                if parent == 1 and pid not in workers and state != "Z":
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
        seen: set[int] = set()
        passes = 0
        deadline = time.monotonic() + KILL_SECONDS
        while living := self._descendants(root):
            for pid in living:
                _kill(pid)
            if seen.issuperset(living):
                time.sleep(0.001)  # killed, but not yet dead
            else:
                passes += 1
                seen.update(living)
            if passes > KILL_PASSES or time.monotonic() > deadline:
                self._kill_all()
                return
        _kill(root)

    def _descendants(self, root: int) -> list[int]:
        """The living descendants of ``root``, itself not included."""
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
                self._workers.clear()
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
