"""A worker of init: runs one command at a time, or handles files, for the host at the other end of its socket.

It is a subreaper, so whatever a command starts, daemons included, stays below it in the process tree, where init can
find and kill it. While such a child lives the worker takes no other request. Like init it is out of the agent's
reach, except that the agent can kill it: then its descendants die too, and the host is told so by the closed socket.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
from typing import Any, NoReturn

from rl_harness.sandboxes.local import command, files, layers, protocol
from rl_harness.sandboxes.local import syscalls as sc
from rl_harness.sandboxes.local.mounts import Root
from rl_harness.shortages import NO_ROOM


class Worker:
    def __init__(self, control: socket.socket, root: Root, links: dict[str, str], rules: command.Rules) -> None:
        self._control = control
        self._root = root
        self._links = links
        self._rules = rules

    def serve(self) -> NoReturn:
        """Serve until the host closes the socket."""
        sc.prctl(sc.PR_SET_CHILD_SUBREAPER, 1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # For what it starts; in case it meets the limit itself, the command cannot be started.
        resource.setrlimit(resource.RLIMIT_NPROC, (self._rules.processes, self._rules.processes))
        while (received := protocol.receive(self._control, trusted=True)) is not None:
            request, descriptors = received
            if request["op"] == "exec":
                self._run(request, descriptors)
            else:
                answer = self._handle_files(request, descriptors)
                protocol.close_all(descriptors)
                protocol.send(self._control, {**answer, "idle": True})
        os._exit(0)

    def _run(self, request: dict[str, Any], descriptors: list[int]) -> None:
        """Run a command; answer with its status when it ends, and once more when its last descendant has."""
        try:
            process = command.start(request, descriptors, self._rules)
        except command.CannotStart as error:
            _complain(descriptors[2], str(error))
            protocol.send(self._control, {"status": error.code << 8, "idle": True})
            return
        finally:
            protocol.close_all(descriptors)
        status = -1
        while status < 0:
            ended, code = os.waitpid(-1, 0)
            if ended == process.pid:
                status = process.returncode = code
        idle = self._childless(os.WNOHANG)
        protocol.send(self._control, {"status": status, "idle": idle})
        if not idle:
            self._childless(0)
            protocol.send(self._control, {"idle": True})

    def _childless(self, options: int) -> bool:
        """Reap; whether there are no children left. With no options, wait until that is so."""
        try:
            while os.waitpid(-1, options)[0]:
                pass
        except ChildProcessError:
            return True
        return False

    def _handle_files(self, request: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        operation = request["op"]
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        try:
            data = descriptors[0]
            path = files.resolve(request.get("path", "/"), self._links)
            if operation == "read":
                files.read(path, data, request["limit"])
            elif operation == "write":
                files.write(path, data, request["mode"])
            elif operation == "pack":
                files.pack(path, data, request["skip_unsafe"])
            elif operation == "unpack":
                files.unpack(path, data)
            elif operation == "freeze":
                return {"size": layers.freeze(self._root, data, request["merge"])}
            else:
                files.changes(self._root, data)
        except files.Refused as error:
            return {"error": str(error)[:2000], "kind": error.kind}
        except layers.TooDeep as error:
            return {"error": str(error)[:2000], "kind": "refused"}
        except BrokenPipeError:  # the host stopped reading and knows why
            return {"error": "the host stopped reading", "kind": "broken"}
        except OSError as error:
            reason = f"{request.get('path', operation)}: {error.strerror}"[:2000]
            return {"error": reason, "kind": "full" if error.errno in NO_ROOM else "refused"}
        finally:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        return {}


def _complain(stderr: int, reason: str) -> None:
    try:
        os.set_blocking(stderr, False)
        os.write(stderr, f"cannot start the command: {reason}\n".encode("utf-8", "replace"))
    except OSError:
        pass  # nobody reads it
