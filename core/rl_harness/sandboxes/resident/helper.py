"""The resident helper: the one program of ours that runs INSIDE a sandbox.

Over its stdin and stdout it carries connections from a loopback port in the sandbox to the host, and runs the agent's
commands. The host sends this file as text and trusts nothing it answers. Standard library only, any Python from 3.6
on, no heavy import: no pathlib, typing or subprocess.

Frames are ``HEADER`` (kind, stream, payload length) and a payload. A stream id with the top bit set is a relayed
connection, any other a command: its even id is stdin and stdout, the id after that stderr. A side sends ``DATA`` on a
stream only as far as it has credit: ``WINDOW`` bytes at first, then what ``CREDIT`` frames add. The output of a
command with a limit has that limit as its only credit; what comes after it is read and thrown away. ``RESET`` breaks a
connection; to the helper it means to kill a command, from it that nothing is left of one without a limit.
"""

import errno
import os
import select
import signal
import socket
import struct
import sys
import time

MYPY = False  # what type checkers take for true, without the cost of importing typing
if MYPY:
    from typing import Callable

MAGIC = b"rl-harness"
VERSION = 1
HEADER = struct.Struct("!BII")
HELLO_BODY = struct.Struct("!10sBIB")  # magic, version, uid, whether it can run commands
PORT = struct.Struct("!HI")  # port, errno
COUNT = struct.Struct("!I")
EXIT_BODY = struct.Struct("!iBB")  # return code as subprocess has it, stdout truncated, stderr truncated

HELLO, LISTEN, LISTENING, EXEC, OPEN, DATA, CREDIT, EOF, RESET, EXIT = range(10)
CHUNK = 1 << 16
WINDOW = 1 << 18
CONNECTION = 1 << 31

_CONGESTED = 1 << 20  # bytes waiting for the host beyond which no source is read
_BACKLOG = 1024
_DRAIN = 1 << 21
_IDLE_WORKERS = 4
_KILL_SECONDS = 8.0
_WORD = struct.Struct("!BI")  # to a worker: RUN and the length of a command, or KILL
_RUN, _KILL = 1, 2
_STATUS = struct.Struct("!iB")  # from a worker: return code, whether it has children left
_PR_SET_CHILD_SUBREAPER = 36
_TO_DEFAULT = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT)  # what Python or we ignore, commands must not
# Added by the shell that started us, or by a sandbox to tell our own process from others.
_OURS = (b"PWD", b"OLDPWD", b"SHLVL", b"_", b"RL_HARNESS_COMMAND")


def pack(fields: "list[bytes]") -> bytes:
    """Byte strings as one."""
    parts = [COUNT.pack(len(fields))]
    for field in fields:
        parts += [COUNT.pack(len(field)), field]
    return b"".join(parts)


def unpack(data: bytes) -> "list[bytes]":
    at, fields = COUNT.size, []
    for _ in range(COUNT.unpack_from(data)[0]):
        start = at + COUNT.size
        at = start + COUNT.unpack_from(data, at)[0]
        fields.append(data[start:at])
    return fields


class Source:
    """Reads a descriptor, which it owns, into ``DATA`` frames as far as its credit goes.

    ``limited``: there will be no more credit, and what goes beyond it is dropped.
    """

    def __init__(self, helper: "Helper", fd: int, stream: int, credit: int, limited: bool) -> None:
        self.helper, self.fd, self.stream = helper, fd, stream
        self.credit, self.limited = credit, limited
        self.dropping = False
        self.truncated = False
        self.ended = False
        self.on_end = self.close
        self.on_broken = None  # type: Callable[[], object] | None  # the end otherwise
        os.set_blocking(fd, False)
        helper.sources[stream] = self
        helper.watch_read(fd, self.readable)

    def readable(self) -> None:
        if len(self.helper.out) > _CONGESTED and not self.dropping:
            self.helper.watch_read(self.fd, None)
            self.helper.parked.add(self)
        else:
            self.read()

    def read(self) -> int:
        """Read once; how many bytes came."""
        spill = self.dropping or (self.limited and self.credit == 0)
        try:
            data = os.read(self.fd, CHUNK if spill else min(CHUNK, self.credit))
        except BlockingIOError:
            return 0
        except OSError:
            if self.on_broken is not None:
                self.on_broken()
                return 0
            data = b""
        if not data:
            self.ended = True
            self.helper.watch_read(self.fd, None)
            if not self.dropping and not self.limited:
                self.helper.send(EOF, self.stream)
            self.on_end()
        elif spill:
            self.truncated = True
        else:
            self.credit -= len(data)
            self.helper.send(DATA, self.stream, data)
            if self.credit == 0 and not self.limited:
                self.helper.watch_read(self.fd, None)
        return len(data)

    def resume(self) -> None:
        if not self.ended and (self.credit or self.limited or self.dropping):
            self.helper.watch_read(self.fd, self.readable)

    def add_credit(self, count: int) -> None:
        self.credit += count
        self.resume()

    def finish(self) -> None:
        """The command has exited: send what it wrote until now. What its children write later is dropped."""
        drained = 0
        while not self.ended and drained < _DRAIN:
            count = self.read()
            if not count:
                break
            drained += count
        self.drop()

    def drop(self) -> None:
        """From now on read only so that nobody who writes is held up."""
        self.dropping = True
        self.resume()

    def close(self) -> None:
        self.ended = True
        if self.fd >= 0:
            self.helper.forget(self.fd)
            self.helper.parked.discard(self)
            self.helper.sources.pop(self.stream, None)
            os.close(self.fd)
            self.fd = -1


class Sink:
    """Writes the ``DATA`` frames of a stream to a descriptor, which it owns, and gives credit for what is written."""

    def __init__(self, helper: "Helper", fd: int, stream: int) -> None:
        self.helper, self.fd, self.stream = helper, fd, stream
        self.buffer = bytearray()
        self.owed = 0
        self.ending = False
        self.on_end = self.close
        self.on_broken = None  # type: Callable[[], object] | None  # nobody reads; else whoever writes need not know
        os.set_blocking(fd, False)
        helper.sinks[stream] = self

    def write(self, data: bytes) -> None:
        if not self.buffer:
            try:
                count = os.write(self.fd, data)
            except OSError:
                count = 0
            self.credit(count)
            if count == len(data):
                return
            data = data[count:]
        self.buffer += data
        if len(self.buffer) == len(data):
            self.flush()

    def flush(self) -> None:
        try:
            while self.buffer:
                count = os.write(self.fd, memoryview(self.buffer)[:CHUNK])
                del self.buffer[:count]
                self.credit(count)
        except BlockingIOError:
            self.helper.watch_write(self.fd, self.flush)
            return
        except OSError:
            if self.on_broken is not None:
                self.on_broken()
                return
            self.credit(len(self.buffer))
            self.buffer.clear()
        self.helper.watch_write(self.fd, None)
        if self.ending:
            self.on_end()

    def credit(self, count: int) -> None:
        self.owed += count
        if self.owed >= WINDOW // 4:
            self.helper.send(CREDIT, self.stream, COUNT.pack(self.owed))
            self.owed = 0

    def end(self) -> None:
        """No more will come."""
        self.ending = True
        if not self.buffer:
            self.on_end()

    def close(self) -> None:
        if self.fd >= 0:
            self.helper.forget(self.fd)
            self.helper.sinks.pop(self.stream, None)
            os.close(self.fd)
            self.fd = -1


class Connection:
    """A connection that somebody in the sandbox made to one of our ports."""

    def __init__(self, helper: "Helper", sock: socket.socket, stream: int) -> None:
        self.helper, self.sock = helper, sock
        self.open = 2
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.source = Source(helper, sock.fileno(), stream, WINDOW, False)
        self.sink = Sink(helper, sock.fileno(), stream)
        self.source.on_end = self.half_closed
        self.sink.on_end = self.written
        self.source.on_broken = self.sink.on_broken = self.broken
        helper.connections[stream] = self

    def written(self) -> None:
        try:
            self.sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        self.half_closed()

    def half_closed(self) -> None:
        self.open -= 1
        if self.open == 0:
            self.close()

    def broken(self) -> None:
        """Who made it is gone: the host must not go on answering, which for a stream without end is for ever."""
        self.helper.send(RESET, self.source.stream)
        self.close()

    def reset(self) -> None:
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        helper, stream = self.helper, self.source.stream
        self.source.ended = True
        helper.forget(self.sock.fileno())
        helper.parked.discard(self.source)
        for table in (helper.sources, helper.sinks, helper.connections):
            table.pop(stream, None)
        self.sock.close()


class Command:
    """A command of the host's, run by a worker. Raises OSError when this machine cannot start another process."""

    def __init__(self, helper: "Helper", stream: int, request: bytes) -> None:
        _, _, _, limit, has_stdin = unpack(request)[:5]
        self.helper, self.stream = helper, stream
        self.limited = bool(limit)
        opened = []  # type: list[int]
        try:
            opened += os.pipe() if has_stdin else (os.open(os.devnull, os.O_RDONLY), -1)
            opened += os.pipe()
            opened += os.pipe()
            self.worker = helper.worker()
        except OSError:
            for fd in opened:
                if fd >= 0:
                    os.close(fd)
            raise
        stdin, stdin_write, stdout_read, stdout, stderr_read, stderr = opened
        self.sink = Sink(helper, stdin_write, stream) if has_stdin else None
        credit = int(limit) if limit else WINDOW
        self.outputs = (
            Source(helper, stdout_read, stream, credit, self.limited),
            Source(helper, stderr_read, stream + 1, credit, self.limited),
        )
        helper.commands[stream] = self
        self.worker.run(self, request, [stdin, stdout, stderr])
        for fd in (stdin, stdout, stderr):
            os.close(fd)

    def exited(self, returncode: int) -> None:
        if self.limited:
            for output in self.outputs:
                output.finish()
        if self.sink is not None:
            self.sink.close()
        truncated = [output.truncated and self.limited for output in self.outputs]
        self.helper.send(EXIT, self.stream, EXIT_BODY.pack(returncode, *truncated))


class Worker:
    """The helper's side of a worker process, which runs one command at a time."""

    def __init__(self, helper: "Helper", pid: int, sock: socket.socket) -> None:
        self.helper, self.pid, self.sock = helper, pid, sock
        self.command = None  # type: Command | None
        self.running = False
        helper.watch_read(sock.fileno(), self.readable)

    def run(self, command: Command, request: bytes, descriptors: "list[int]") -> None:
        self.command, self.running = command, True
        rights = struct.pack("%di" % len(descriptors), *descriptors)
        try:
            self.sock.sendmsg([_WORD.pack(_RUN, len(request))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            self.sock.sendall(request)
        except OSError:
            pass  # it is dead, which shows when its socket is read

    def kill(self) -> None:
        """Kill the command, and whatever it left when it exited."""
        try:
            self.sock.send(_WORD.pack(_KILL, 0))
        except OSError:
            pass

    def readable(self) -> None:
        try:
            data = self.sock.recv(_STATUS.size, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        returncode, left = _STATUS.unpack(data) if len(data) == _STATUS.size else (-signal.SIGKILL, False)
        command, running, self.running = self.command, self.running, False
        if command is not None and running:
            command.exited(returncode)
        if command is not None and not left:
            self.helper.commands.pop(command.stream, None)
            self.command = None
            if not command.limited:
                self.helper.send(RESET, command.stream)
        if not data:
            self.stop()
            self.helper.bury(self)
        elif not left:
            self.helper.rest(self)

    def stop(self) -> None:
        self.helper.forget(self.sock.fileno())
        self.sock.close()


class Helper:
    """Serves the host until stdin ends."""

    def __init__(self, commands: bool) -> None:
        self.poll = select.poll()
        self.watched = {}  # type: dict[int, list[Callable[[], object] | None]]  # reader and writer of each descriptor
        self.inp, self.out = b"", bytearray()
        self.sources = {}  # type: dict[int, Source]
        self.sinks = {}  # type: dict[int, Sink]
        self.connections = {}  # type: dict[int, Connection]
        self.commands = {}  # type: dict[int, Command]
        self.parked = set()  # type: set[Source]
        self.listeners = {}  # type: dict[int, socket.socket]
        self.workers = {}  # type: dict[int, Worker]
        self.resting = []  # type: list[Worker]
        self.next = CONNECTION
        self.reserve = os.open(os.devnull, os.O_RDONLY)
        able = commands and become_subreaper()
        self.send(HELLO, 0, HELLO_BODY.pack(MAGIC, VERSION, os.getuid(), able))
        for fd in (0, 1):
            os.set_blocking(fd, False)
        self.watch_read(0, self.receive)
        self.flush()
        if able:
            self.rest(self.worker())

    def serve(self) -> None:
        while True:
            for fd, events in self.poll.poll():
                reader, writer = self.watched.get(fd, (None, None))
                if reader is not None and events & ~select.POLLOUT:
                    reader()
                    writer = self.watched.get(fd, (None, None))[1]
                if writer is not None and events & ~select.POLLIN:
                    writer()
            self.flush()

    # What the loop waits for

    def watch_read(self, fd: int, reader: "Callable[[], object] | None") -> None:
        self._watch(fd, 0, reader)

    def watch_write(self, fd: int, writer: "Callable[[], object] | None") -> None:
        self._watch(fd, 1, writer)

    def _watch(self, fd: int, which: int, callback: "Callable[[], object] | None") -> None:
        entry = self.watched.setdefault(fd, [None, None])
        if (entry[which] is None) == (callback is None):
            entry[which] = callback
            return
        entry[which] = callback
        mask = (select.POLLIN if entry[0] else 0) | (select.POLLOUT if entry[1] else 0)
        if mask:
            self.poll.register(fd, mask)
        else:
            self.forget(fd)

    def forget(self, fd: int) -> None:
        if self.watched.pop(fd, None) is not None:
            try:
                self.poll.unregister(fd)
            except KeyError:
                pass

    # The host

    def send(self, kind: int, stream: int, payload: bytes = b"") -> None:
        self.out += HEADER.pack(kind, stream, len(payload))
        self.out += payload

    def flush(self) -> None:
        try:
            while self.out:
                count = os.write(1, memoryview(self.out)[: CHUNK * 4])
                del self.out[:count]
        except BlockingIOError:
            pass
        except OSError:
            self.end()
        self.watch_write(1, self.flush if self.out else None)
        if self.parked and len(self.out) <= _CONGESTED // 2:
            parked, self.parked = self.parked, set()
            for source in parked:
                source.resume()

    def receive(self) -> None:
        try:
            data = os.read(0, CHUNK * 4)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.end()
        if self.inp:
            data = self.inp + data
        at = 0
        while len(data) - at >= HEADER.size:
            kind, stream, length = HEADER.unpack_from(data, at)
            if len(data) - at - HEADER.size < length:
                break
            start = at + HEADER.size
            at = start + length
            self.handle(kind, stream, data[start:at])
        self.inp = data[at:]

    def handle(self, kind: int, stream: int, payload: bytes) -> None:
        if kind == DATA and stream in self.sinks:
            self.sinks[stream].write(payload)
        elif kind == CREDIT and stream in self.sources:
            self.sources[stream].add_credit(COUNT.unpack(payload)[0])
        elif kind == EOF and stream in self.sinks:
            self.sinks[stream].end()
        elif kind == RESET and stream in self.connections:
            self.connections[stream].reset()
        elif kind == RESET:
            self.kill(stream)
        elif kind == EXEC:
            self.execute(stream, payload)
        elif kind == LISTEN:
            self.listen(stream, PORT.unpack(payload)[0])

    def end(self) -> None:
        """The host is gone. Workers see it, and kill what still runs; what a finished command left goes on."""
        os._exit(0)

    # Connections

    def listen(self, number: int, port: int) -> None:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            self.send(LISTENING, number, PORT.pack(port, error.errno or 1))
            return
        listener.setblocking(False)
        self.listeners[number] = listener
        self.watch_read(listener.fileno(), lambda: self.accept(number))
        self.send(LISTENING, number, PORT.pack(listener.getsockname()[1], 0))

    def accept(self, number: int) -> None:
        while True:
            try:
                sock, _ = self.listeners[number].accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    return
                # Out of descriptors: let one go to close the connection at once, instead of finding it for ever.
                os.close(self.reserve)
                try:
                    self.listeners[number].accept()[0].close()
                except OSError:
                    return
                finally:
                    self.reserve = os.open(os.devnull, os.O_RDONLY)
                continue
            stream, self.next = self.next, CONNECTION | ((self.next + 1) % CONNECTION)
            self.send(OPEN, stream, COUNT.pack(number))
            Connection(self, sock, stream)

    # Commands

    def execute(self, stream: int, request: bytes) -> None:
        try:
            Command(self, stream, request)
        except OSError as error:
            reason = b"cannot start the command: %s\n" % str(error.strerror).encode()
            self.send(DATA, stream + 1, reason)
            if not unpack(request)[3]:
                self.send(EOF, stream)
                self.send(EOF, stream + 1)
            self.send(EXIT, stream, EXIT_BODY.pack(126, False, False))
            self.send(RESET, stream)

    def kill(self, stream: int) -> None:
        """Kill a command with all that it left. Whoever does that to one without a limit reads no more output."""
        if stream in self.commands:
            self.commands[stream].worker.kill()
        for each in (stream, stream + 1):
            if each in self.sources and not self.sources[each].limited:
                self.sources[each].drop()

    def worker(self) -> Worker:
        if self.resting:
            return self.resting.pop()
        reap()
        ours, theirs = socket.socketpair()
        try:
            pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            raise
        if pid == 0:
            try:
                WorkerProcess(theirs).serve()
            finally:
                os._exit(125)
        theirs.close()
        self.workers[pid] = Worker(self, pid, ours)
        return self.workers[pid]

    def rest(self, worker: Worker) -> None:
        if len(self.resting) < _IDLE_WORKERS:
            self.resting.append(worker)
        else:
            worker.stop()
            del self.workers[worker.pid]

    def bury(self, worker: Worker) -> None:
        """A worker has ended. What one that was killed leaves to us is anybody's and so nobody's: it is killed."""
        self.workers.pop(worker.pid, None)
        if worker in self.resting:
            self.resting.remove(worker)
        try:
            clean = os.waitpid(worker.pid, 0)[1] == 0
        except ChildProcessError:
            clean = False
        if not clean:
            for pid, parent in processes():
                if parent == os.getpid() and pid not in self.workers:
                    kill_descendants(pid)
                    kill(pid)
            reap()


class WorkerProcess:
    """Runs commands, one at a time, and is the parent of whatever a command leaves behind, so that it can be killed."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.command = 0
        self.leftovers = False
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) != sock.fileno():
                try:
                    os.close(int(name))
                except OSError:
                    pass
        become_subreaper()
        self.wake, wake_write = os.pipe()
        for fd in (self.wake, wake_write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        poll = select.poll()
        poll.register(self.sock.fileno(), select.POLLIN)
        poll.register(self.wake, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self.wake:
                    os.read(self.wake, 4096)
                    self.reap()
                else:
                    self.receive()

    def receive(self) -> None:
        space = socket.CMSG_SPACE(3 * 4)
        try:
            data, ancillary, _, _ = self.sock.recvmsg(_WORD.size, space, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            data = b""
        if len(data) < _WORD.size:  # the helper is gone
            if self.command:
                kill_descendants(os.getpid())
            os._exit(0)
        word, length = _WORD.unpack(data)
        if word == _KILL:
            if self.command or self.leftovers:
                kill_descendants(os.getpid())
            return
        request = bytearray()
        while len(request) < length:
            request += self.sock.recv(length - len(request))
        descriptors = struct.unpack("3i", ancillary[0][2])
        try:
            self.command = start(unpack(bytes(request)), descriptors)
        except CannotStart as error:
            os.write(descriptors[2], b"cannot start the command: %s\n" % str(error).encode("utf-8", "replace"))
            self.sock.send(_STATUS.pack(error.code, False))
        for fd in descriptors:
            os.close(fd)

    def reap(self) -> None:
        status = None
        left = True
        try:
            while True:
                pid, ended = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid == self.command:
                    status = ended
        except ChildProcessError:
            left = False
        if status is not None:
            self.command, self.leftovers = 0, left
            code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
            self.sock.send(_STATUS.pack(code, left))
        elif self.leftovers and not left:
            os._exit(0)


class CannotStart(Exception):
    """Why a command cannot be started, and the exit code that says so."""

    def __init__(self, what: bytes, why: object, code: int = 126) -> None:
        super().__init__("%s: %s" % (what.decode("utf-8", "replace"), why))
        self.code = code


def start(fields: "list[bytes]", descriptors: "tuple[int, ...]") -> int:
    """Start a command in a session of its own; its pid. Raises :class:`CannotStart`.

    Spawning copies no page table, which halves the time; a process that must change its user first is forked.
    """
    mode, cwd, user, count = fields[0], fields[1], fields[2], int(fields[5])
    argv, variables = fields[6 : 6 + count], fields[6 + count :]
    if mode == b"shell":
        argv = [b"/bin/bash" if os.access("/bin/bash", os.X_OK) else b"/bin/sh", b"-c", *argv]
    env = dict(BASE_ENVIRONMENT)
    pairs = list(zip(variables[::2], variables[1::2]))
    if user or not hasattr(os, "posix_spawn"):
        return fork(cwd, user, argv, env, pairs, descriptors)
    env.update(pairs)
    enter(cwd)
    actions = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(descriptors)]

    def spawn(path: bytes) -> int:
        return os.posix_spawn(path, argv, env, file_actions=actions, setsid=True, setsigdef=_TO_DEFAULT)

    try:
        return launch(argv[0], env, spawn)
    except NotImplementedError:
        return fork(cwd, user, argv, env, [], descriptors)


def fork(
    cwd: bytes,
    user: bytes,
    argv: "list[bytes]",
    env: "dict[bytes, bytes]",
    pairs: "list[tuple[bytes, bytes]]",
    descriptors: "tuple[int, ...]",
) -> int:
    try:
        pid = os.fork()
    except OSError as error:
        raise CannotStart(argv[0], error.strerror) from None
    if pid:
        return pid
    code = 126
    try:
        signal.set_wakeup_fd(-1)
        os.setsid()
        for number, fd in enumerate(descriptors):
            os.dup2(fd, number)
        for number in _TO_DEFAULT:
            signal.signal(number, signal.SIG_DFL)
        if user:
            env.update(switch_user(user))
        env.update(pairs)
        enter(cwd)
        launch(argv[0], env, lambda path: os.execve(path, argv, env))
    except CannotStart as error:
        os.write(2, b"cannot start the command: %s\n" % str(error).encode("utf-8", "replace"))
        code = error.code
    finally:
        os._exit(code)


def enter(cwd: bytes) -> None:
    try:
        os.chdir(cwd or DEFAULT_DIRECTORY)
    except (OSError, ValueError) as error:
        raise CannotStart(b"working directory " + cwd, getattr(error, "strerror", error)) from None


def launch(name: bytes, env: "dict[bytes, bytes]", run: "Callable[[bytes], int]") -> int:
    """``run`` the program called ``name``, looked for in the command's own ``PATH``."""
    folders = [b""] if b"/" in name else env.get(b"PATH", os.defpath.encode()).split(b":")
    refused, code = "not found", 127
    for folder in folders:
        try:
            return run(name if b"/" in name else (folder or b".") + b"/" + name)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError as error:
            refused, code = str(error.strerror), 126
        except (OSError, ValueError) as error:  # too long, an embedded NUL, no process to be had
            raise CannotStart(name, getattr(error, "strerror", None) or error) from None
    raise CannotStart(name, refused, code)


def switch_user(user: bytes) -> "dict[bytes, bytes]":
    """Become ``user``, a name or a number; the variables that tell who one is."""
    what = b"user " + user
    uid, gid, name, home = -1, -1, user, b"/"
    for fields in _lines("/etc/passwd", 7):
        if user in (fields[0], fields[2]):
            uid, gid, name, home = int(fields[2]), int(fields[3]), fields[0], fields[5]
            break
    if uid < 0:
        if not user.isdigit():
            raise CannotStart(what, "unknown")
        uid = gid = int(user)
    if uid != os.getuid():
        groups = [int(fields[2]) for fields in _lines("/etc/group", 4) if name in fields[3].split(b",")]
        try:
            os.setgroups(groups)
            os.setgid(gid)
            os.setuid(uid)
        except (OSError, OverflowError) as error:
            raise CannotStart(what, error) from None
    return {b"HOME": home, b"USER": name, b"LOGNAME": name}


def _lines(path: str, count: int) -> "list[list[bytes]]":
    try:
        with open(path, "rb") as file:
            rows = [line.rstrip(b"\n").split(b":") for line in file.read(1 << 20).split(b"\n")]
    except OSError:
        return []
    return [row for row in rows if len(row) == count and row[2].isdigit()]


def base_environment() -> "dict[bytes, bytes]":
    """What the sandbox gave us, without what our own start added: the shell's variables, Python's in a C locale."""
    env = {name: value for name, value in os.environb.items() if name not in _OURS}
    try:
        with open("/proc/self/environ", "rb") as file:
            if b"\0LC_CTYPE=" not in b"\0" + file.read():
                env.pop(b"LC_CTYPE", None)
    except OSError:
        pass
    return env


def default_directory() -> bytes:
    try:
        return os.getcwdb()
    except OSError:
        return b"/"


BASE_ENVIRONMENT = base_environment()
DEFAULT_DIRECTORY = default_directory()


def become_subreaper() -> bool:
    """Be the parent of every orphaned descendant. False where that, or a /proc to list them, is not to be had."""
    try:
        import ctypes

        done = ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    except (ImportError, OSError, AttributeError, TypeError):
        return False
    return done and os.path.exists("/proc/self/stat")


def processes() -> "list[tuple[int, int]]":
    """Pid and parent of every living process."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open("/proc/" + name + "/stat", "rb", 0) as file:
                    state, parent = file.read(512).rpartition(b")")[2].split()[:2]
            except (OSError, ValueError):
                continue
            if state not in (b"Z", b"X"):
                found.append((int(name), int(parent)))
    return found


def descendants(root: int) -> "list[int]":
    children = {}  # type: dict[int, list[int]]
    for pid, parent in processes():
        children.setdefault(parent, []).append(pid)
    found, pending = [], [root]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found


def kill_descendants(root: int) -> None:
    """Kill until none is left. One that forks faster than it can be listed is left to the host's own kill."""
    deadline = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < deadline:
        living = descendants(root)
        if not living:
            return
        for pid in living:
            kill(pid)
        time.sleep(0.001)


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass


def reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Helper(sys.argv[1:] == ["commands"]).serve()
