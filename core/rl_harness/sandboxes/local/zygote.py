"""The helper: a small process that prepares the shared layers once and forks the init of every sandbox.

It runs with no imports but these modules, so that a fork is quick and an init is small. When the host goes away,
however it died, the inits see their sockets close and exit, and the helper removes what they left on disk.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import resource
import signal
import socket
import struct
import sys
from typing import Any, NoReturn

from rl_harness.sandboxes.local import cgroups, command, init, mounts, protocol, seccomp, snapshots, storage
from rl_harness.sandboxes.local import syscalls as sc

UID_COUNT = 65_536
PROCESS_HEADROOM = 64  # init and workers


class Zygote:
    def __init__(self, control: socket.socket, settings: dict[str, Any]) -> None:
        self._control = control
        self._privileged: bool = settings["privileged"]
        self._owner: str = settings["owner"]
        self._state = os.open(settings["state"], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        sc.prctl(sc.PR_SET_CHILD_SUBREAPER, 1)
        user_namespace: int | None = None
        if self._privileged:
            user_namespace = _user_namespace()
            sc.unshare(sc.CLONE_NEWNS)
        else:
            uid, gid = os.geteuid(), os.getegid()
            sc.unshare(sc.CLONE_NEWUSER | sc.CLONE_NEWNS, "unshare user namespace")
            _map_single(uid, gid)
        owner = storage.UID_BASE if self._privileged else 0
        self._stage = mounts.Stage(settings["state"], settings["root"], user_namespace, owner)
        if user_namespace is not None:
            os.close(user_namespace)
        self._seccomp = seccomp.build()
        gc.collect()
        gc.disable()
        gc.freeze()  # no collector writes to the pages that every init and worker shares with this process

    @property
    def layers(self) -> list[str]:
        """What distinguishes the layers of this stage from those of another: names and places."""
        return [f"{layer.name}:{layer.target}" for layer in self._stage.layers]

    def serve(self) -> None:
        """Fork a sandbox for each request until the host is gone, then clean up after it."""
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # inits and their forerunners are reaped by the kernel
        while True:
            try:
                received = protocol.receive(self._control, trusted=True)
            except protocol.ProtocolError:
                continue
            if received is None:
                break
            request, descriptors = received
            try:
                self._fork(request, descriptors)
            finally:
                protocol.close_all(descriptors)
        self._wait_for_inits()
        storage.remove_owned(self._state, self._owner)
        snapshots.remove_owned(self._state, self._owner)
        snapshots.collect(self._state)

    def _wait_for_inits(self) -> None:
        try:
            os.waitpid(-1, 0)  # with SIGCHLD ignored this returns when the last child is gone
        except ChildProcessError:
            pass

    def _fork(self, request: dict[str, Any], descriptors: list[int]) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            with socket.socket(fileno=os.dup(descriptors[0])) as control:
                _try_send(control, {"failed": "fork", "errno": error.errno})
            return
        if pid == 0:
            self._control.close()
            control = socket.socket(fileno=descriptors[0])
            try:
                self._launch(request, control)
            except OSError as error:
                step = getattr(error, "step", "start")
                _try_send(control, {"failed": step, "errno": error.errno})
            finally:
                os._exit(0)

    def _launch(self, request: dict[str, Any], control: socket.socket) -> None:
        """Enter fresh namespaces, fork init there, tell the host its pid and pidfd, and leave."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # While this is still who may read them, and where they are.
        shown = [(self._stage.host_directory(source), target) for source, target in request["mounts"]]
        self._stage.forget_host()
        writable = f"{request['sandbox']}/fs"
        if self._privileged:
            os.chown(writable, storage.UID_BASE, storage.UID_BASE, dir_fd=self._state)
        ready_read, ready_write = os.pipe2(os.O_CLOEXEC)
        mapper = _fork_mapper(os.getpid(), ready_read) if self._privileged else 0
        cgroups.join(request["cgroups"])
        # When this machine's memory runs out, what ran in a sandbox is the first to go. Nobody inside can lower it.
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
        if self._privileged:
            _limit_processes(request["processes"])
        sc.unshare(sc.ALL_NAMESPACES)
        if self._privileged:
            os.write(ready_write, b"x")
            if os.waitpid(mapper, 0)[1]:
                raise sc.StepError("map users", 1)
            os.setgroups([])
            os.setresgid(0, 0, 0)
            os.setresuid(0, 0, 0)
        else:
            _map_single(0, 0)
        os.close(ready_read)
        os.close(ready_write)
        pid = os.fork()
        if pid == 0:
            self._init(request, control, shown)
        pidfd = os.pidfd_open(pid)
        protocol.send(control, {"pid": pid}, [pidfd])

    def _init(self, request: dict[str, Any], control: socket.socket, shown: list[tuple[int, str]]) -> NoReturn:
        try:
            os.close(self._state)
            os.setsid()
            os.umask(0o022)
            directories = {request["workdir"]: None}
            root = mounts.enter_root(
                self._stage, request["sandbox"], request["disk"], request["snapshots"], directories, shown
            )
            socket.sethostname("sandbox")
            _loopback_up()
            init.harden(self._seccomp)
            rules = command.Rules(processes=request["processes"], memory=request["memory"], users=self._privileged)
            process = init.Init(control, root, self._stage.links, rules)
            protocol.send(control, {"ready": True})
            process.serve(request["lifetime"])
        except OSError as error:
            _try_send(control, {"failed": getattr(error, "step", "set up"), "errno": error.errno})
        finally:
            os._exit(1)


def _limit_processes(processes: int) -> None:
    """Bound the processes of all users of the namespace about to be made, together.

    Its processes are charged to whoever makes it, against the maker's limit at this moment. So become a user that
    no other sandbox has, with the rights of root, which every user of the sandbox will then share.
    """
    maximum = processes + PROCESS_HEADROOM
    resource.setrlimit(resource.RLIMIT_NPROC, (maximum, maximum))
    sc.prctl(sc.PR_SET_KEEPCAPS, 1)
    alone = storage.UID_BASE + UID_COUNT + os.getpid()
    os.setresuid(alone, alone, alone)
    sc.prctl(sc.PR_SET_KEEPCAPS, 0)
    sc.raise_capabilities()


def _try_send(control: socket.socket, message: dict[str, Any]) -> None:
    try:
        protocol.send(control, message)
    except OSError:
        pass


def _user_namespace() -> int:
    """A descriptor of a user namespace with the sandboxes' range, for id-mapped mounts."""
    ready_read, ready_write = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        try:
            sc.unshare(sc.CLONE_NEWUSER)
            os.write(ready_write, b"x")
            signal.pause()
        finally:
            os._exit(1)
    os.close(ready_write)
    try:
        if not os.read(ready_read, 1):
            raise sc.StepError("unshare user namespace", 1)
        _map_range(child)
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(ready_read)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _fork_mapper(target: int, ready: int) -> int:
    """A child that stays in the parent user namespace and maps ``target``'s users once ``ready`` has a byte."""
    mapper = os.fork()
    if mapper == 0:
        try:
            if os.read(ready, 1):
                _map_range(target)
                os._exit(0)
        finally:
            os._exit(1)
    return mapper


def _map_range(pid: int) -> None:
    for name in ("uid_map", "gid_map"):
        _write(f"/proc/{pid}/{name}", f"0 {storage.UID_BASE} {UID_COUNT}")


def _map_single(uid: int, gid: int) -> None:
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"0 {uid} 1")
    _write("/proc/self/gid_map", f"0 {gid} 1")


def _write(path: str, text: str) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        raise sc.StepError("map users", error.errno or 0) from None


def _loopback_up() -> None:
    siocsifflags, up, running = 0x8914, 0x1, 0x40
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, siocsifflags, struct.pack("16sh14x", b"lo", up | running))


def _hide_arguments() -> None:
    """Blank this process's command line, which holds paths of the host and is readable in every sandbox."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, b"sandbox", min(7, end - start - 1))


def main() -> None:
    """Entry point: descriptor 0 is the control socket; the first message holds the settings."""
    control = socket.socket(fileno=os.dup(0))
    control.set_inheritable(False)
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.setsid()
    _hide_arguments()
    first = protocol.receive(control, trusted=True)
    if first is None:
        sys.exit(0)
    try:
        zygote = Zygote(control, first[0])
    except OSError as error:
        _try_send(control, {"failed": getattr(error, "step", "prepare"), "errno": error.errno})
        sys.exit(1)
    # An owner that died meanwhile ends serve.
    _try_send(control, {"ready": True, "idmapped": zygote._stage.idmapped, "layers": zygote.layers})
    zygote.serve()
