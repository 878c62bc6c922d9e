"""One command of the agent: from a request to ``execve``, giving up on the way what only init and workers hold."""

from __future__ import annotations

import os
import resource
from typing import Any, NoReturn

from rl_harness.sandboxes.local import syscalls as sc

_KEPT = (0, 1, 3, 4, 5, 6, 7, 10, 18)  # chown, dac_override, fowner, fsetid, kill, setgid, setuid, bind, chroot
CAPABILITIES = sum(1 << number for number in _KEPT)

_MAX_ACCOUNTS = 1 << 20


class CannotStart(Exception):
    """The command cannot be started; the reason goes to its stderr and the exit code is 126 or 127."""

    def __init__(self, reason: str, code: int = 126) -> None:
        super().__init__(reason)
        self.code = code


class Rules:
    """What holds for every command of one sandbox."""

    def __init__(self, *, processes: int, memory: int | None, users: bool) -> None:
        self.processes = processes
        self.memory = memory
        self.users = users


def start(request: dict[str, Any], descriptors: list[int], rules: Rules) -> int:
    """Fork the command with ``descriptors`` as its stdin, stdout and stderr; returns its pid."""
    pid = os.fork()
    if pid == 0:
        _become(request, descriptors, rules)
    return pid


def _become(request: dict[str, Any], descriptors: list[int], rules: Rules) -> NoReturn:
    code = 126
    try:
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        _restrict(request, rules)
        _execute(request)
    except CannotStart as error:
        reason, code = str(error), error.code
    except OSError as error:
        reason = error.strerror or str(error)
    except ValueError as error:  # an embedded NUL
        reason = str(error)
    try:
        os.write(2, f"cannot start the command: {reason}\n".encode("utf-8", "replace"))
    finally:
        os._exit(code)


def _restrict(request: dict[str, Any], rules: Rules) -> None:
    """Give up what init holds and the agent must not; the rest was given up in ``init.harden``, once for all."""
    os.setsid()
    uid, gid, name, home = _user(request.get("user"), rules)
    request["env"] = {"HOME": home, "USER": name, **request["env"]}
    if (uid, gid) != (0, 0):
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    sc.keep_capabilities(CAPABILITIES if uid == 0 else 0)
    try:
        os.chdir(request["cwd"])
    except OSError as error:
        raise CannotStart(f"working directory {request['cwd']}: {error.strerror}") from None
    resource.setrlimit(resource.RLIMIT_NPROC, (rules.processes, rules.processes))
    if rules.memory is not None:
        resource.setrlimit(resource.RLIMIT_AS, (rules.memory, rules.memory))


def _execute(request: dict[str, Any]) -> NoReturn:
    environment = {_encode(name): _encode(value) for name, value in request["env"].items()}
    if "shell" in request:
        shell = b"/bin/bash" if os.access("/bin/bash", os.X_OK) else b"/bin/sh"
        arguments = [shell, b"-c", _encode(request["shell"])]
        paths = [shell]
    else:
        arguments = [_encode(argument) for argument in request["argv"]]
        name = arguments[0]
        search = environment.get(b"PATH", b"/usr/bin:/bin").split(b":")
        paths = [name] if b"/" in name else [directory + b"/" + name for directory in search if directory]
    failure = CannotStart(f"{arguments[0].decode('utf-8', 'replace')}: not found", 127)
    for path in paths:
        try:
            os.execve(path, arguments, environment)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            failure = CannotStart(f"{path.decode('utf-8', 'replace')}: {error.strerror}")
    raise failure


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _user(user: str | None, rules: Rules) -> tuple[int, int, str, str]:
    """Uid, gid, name and home of ``user``: in the sandbox's ``/etc/passwd``, or a number, or None for root."""
    if user in (None, "root", "0"):
        return 0, 0, "root", "/root"
    assert user is not None
    if not rules.users:
        raise CannotStart(f"user {user}: only root exists in this sandbox")
    for line in _accounts():
        fields = line.split(":")
        if len(fields) == 7 and user in (fields[0], fields[2]) and fields[2].isdecimal() and fields[3].isdecimal():
            return int(fields[2]), int(fields[3]), fields[0], fields[5]
    if user.isdecimal():
        return int(user), int(user), user, "/"
    raise CannotStart(f"user {user}: unknown")


def _accounts() -> list[str]:
    descriptor = os.open("/etc/passwd", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.read(descriptor, _MAX_ACCOUNTS).decode("utf-8", "replace").splitlines()
    finally:
        os.close(descriptor)
