"""Runs inside the sandbox, in the working directory, with nothing but Python's standard library.

The agent's module is code that runs while it is graded, so it must not be able to write the grade. It runs in a
process of its own that answers calls with plain data; the tests run here, where it can neither read them (they are
deleted before it starts, and this process cannot be traced) nor compare anything with objects of its own. The reward
is written last, when no process the module started is alive.

Anything that keeps this from working ends without a reward, which is not a score of 0.
"""

import contextlib
import ctypes
import inspect
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

TESTS = Path(__file__).absolute().parent
LOGS = Path(os.environ.get("RL_HARNESS_LOGS", "/logs/verifier"))
SECONDS = 20.0
LARGEST_REPLY = 4 << 20
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36


def encode(value):
    """As JSON with tags. What it can say is data only, so neither side can hand the other an object of its own."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return {"int": str(int(value))} if abs(value) > 1 << 53 else int(value)
    if isinstance(value, float):
        return {"float": float(value).hex()}
    if isinstance(value, (list, tuple, set)):
        kind = "tuple" if isinstance(value, tuple) else "set" if isinstance(value, set) else "list"
        return {kind: [encode(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    raise TypeError("a result of type " + type(value).__name__ + " is no plain data")


def decode(data):
    if not isinstance(data, dict):
        return data
    ((kind, body),) = data.items()
    if kind == "int":
        return int(body)
    if kind == "float":
        return float.fromhex(body)
    if kind == "dict":
        return {decode(key): decode(item) for key, item in body}
    return {"list": list, "tuple": tuple, "set": set}[kind](decode(item) for item in body)


def confine():
    """No signal leaves this process, by any system call that sends one or has the kernel send one.

    Otherwise what is graded could kill its grader, and a killed grader has not graded. Where there are no filters the
    module goes without.
    """
    import ctypes
    import os
    import struct

    # kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_send_signal, prlimit64; fcntl; ioctl
    machines = {
        "x86_64": (0xC000003E, (62, 200, 234, 129, 297, 424, 302), 72, 16),
        "aarch64": (0xC00000B7, (129, 130, 131, 138, 240, 424, 261), 25, 29),
    }
    if os.uname().machine not in machines:
        return
    architecture, senders, fcntl, ioctl = machines[os.uname().machine]
    load, equal, at_least, end = 0x20, 0x15, 0x35, 0x06
    allow, refuse = (end, 0, 0, 0x7FFF0000), (end, 0, 0, 0x00050001)
    program = [(load, 0, 0, 4), (equal, 1, 0, architecture), refuse]
    program += [(load, 0, 0, 0), (at_least, 0, 1, 0x40000000), refuse]  # x86's second table of system calls
    for number in senders:
        program += [(equal, 0, 1, number), refuse]
    for number, commands in ((fcntl, (8, 15)), (ioctl, (0x8901, 0x8902))):  # who is told of input
        program += [(equal, 0, 2 + 2 * len(commands), number), (load, 0, 0, 24)]
        for command in commands:
            program += [(equal, 0, 1, command), refuse]
        program += [allow]
    program += [allow]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    filters = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None)
    libc.prctl(38, 1, 0, 0, 0)  # no new privileges, which a filter asks for
    libc.prctl(22, 2, ctypes.create_string_buffer(filters))


def serve():
    """The other process: loads the module and answers calls. Its output goes nowhere and it can write no file."""
    import json
    import os
    import pathlib
    import resource
    import sys

    reads, writes = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    confine()
    sys.set_int_max_str_digits(0)
    start = json.loads(reads.readline())
    module = {"__name__": "solution"}
    exec(compile(start["preamble"], "preamble", "exec"), module)
    exec(compile(pathlib.Path(start["path"]).read_text(encoding="utf-8"), start["path"], "exec"), module)
    for line in reads:
        try:
            reply = {"result": encode(module[start["entry_point"]](*decode(json.loads(line))))}
        except Exception as error:
            reply = {"error": type(error).__name__ + ": " + str(error)[:500]}
        writes.write(json.dumps(reply) + "\n")
        writes.flush()


WORKER = "".join(map(inspect.getsource, (encode, decode, confine, serve))) + "serve()"


class Failed(Exception):
    """The candidate did not do what the tests ask for."""


class Candidate:
    """The agent's function, behind a pipe."""

    def __init__(self, start, deadline):
        self.deadline = deadline
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self.buffer = b""
        self.send(start)

    def send(self, data):
        try:
            self.process.stdin.write(json.dumps(data).encode() + b"\n")
        except OSError:
            raise Failed("the module could not be loaded, or ended itself") from None

    def __call__(self, *arguments):
        self.send(encode(tuple(arguments)))
        reply = json.loads(self.line())
        if "error" in reply:
            raise Failed(str(reply["error"])[:500])
        return decode(reply["result"])

    def line(self):
        while b"\n" not in self.buffer:
            left = self.deadline - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                raise Failed(f"not done within {SECONDS:g} seconds")
            chunk = os.read(self.process.stdout.fileno(), 1 << 16)
            if not chunk:
                raise Failed("the module could not be loaded, or ended itself")
            self.buffer += chunk
            if len(self.buffer) > LARGEST_REPLY:
                raise Failed("a result is too large")
        line, self.buffer = self.buffer.split(b"\n", 1)
        return line


def protect():
    """No other process may trace this one or read its memory, and orphans of descendants become its children."""
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value in ((PR_SET_DUMPABLE, 0), (PR_SET_CHILD_SUBREAPER, 1)):
        if libc.prctl(option, value, 0, 0, 0):
            sys.exit("prctl failed: " + os.strerror(ctypes.get_errno()))


def descendants():
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
    found, new = set(), {os.getpid()}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new} - found
        found |= new
    return found


def kill_descendants():
    """Until none is left: stopped first, so that none can fork while the others die."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in descendants():
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.005)
    sys.exit("processes of the candidate could not be killed")


def write_reward(reward):
    """Whatever the module made of the folder is moved away: it may be a file, a link, or too deep to remove."""
    for path in (LOGS.parent, LOGS):
        if path == LOGS or path.is_symlink() or not path.is_dir():
            with contextlib.suppress(FileNotFoundError):
                path.rename(path.with_name(f".{secrets.token_hex(16)}"))
            path.mkdir()
    with (LOGS / "reward.txt").open("x") as file:
        file.write(f"{reward}\n")


def main():
    problem = json.loads((TESTS / "problem.json").read_text(encoding="utf-8"))
    # The tests run on the reference first: it proves them, and imports everything while this root is untouched.
    tests = {"__name__": "tests"}
    exec(compile(problem["reference"], "reference", "exec"), tests)
    reference = tests[problem["entry_point"]]
    exec(compile(problem["test"], "test", "exec"), tests)
    tests["check"](reference)

    path = Path("solution.py").absolute()
    if not path.is_file() or path.is_symlink():
        print("there is no solution.py")
        write_reward(0)
        return
    protect()
    shutil.rmtree(TESTS)
    start = {"preamble": problem["preamble"], "path": str(path), "entry_point": problem["entry_point"]}
    passed = 0
    try:
        candidate = Candidate(start, time.monotonic() + SECONDS)
        tests["check"](candidate)
        passed = 1
    except Exception as error:  # whatever a test trips over in what the function returned
        print(f"{type(error).__name__}: {str(error)[:500]}")
    kill_descendants()
    write_reward(passed)


if __name__ == "__main__":
    main()
