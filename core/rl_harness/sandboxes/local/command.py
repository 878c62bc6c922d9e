"""One command of the agent: from a request to a running process.

The process is made with vfork, which costs nothing for the size of this one. It runs as root with the capabilities of
the bounding set, which ``execve`` reduces it to, or as another user with none.
"""

from __future__ import annotations

import os
import resource
import subprocess
import warnings  # noqa: F401 - os.get_exec_path imports it, and nothing can be imported once init is hardened
from typing import Any, NamedTuple

_KEPT = (0, 1, 3, 4, 5, 6, 7, 10, 18)  # chown, dac_override, fowner, fsetid, kill, setgid, setuid, bind, chroot
CAPABILITIES = sum(1 << number for number in _KEPT)

_MAX_ACCOUNTS = 1 << 20


class CannotStart(Exception):
    """The command cannot be started; the reason goes to its stderr and the exit code is 126 or 127."""

    def __init__(self, reason: str, code: int = 126) -> None:
        super().__init__(reason)
        self.code = code


class Rules:
    """What holds for every command of one sandbox: most processes, bytes of address space, whether it has users."""

    def __init__(self, *, processes: int, memory: int | None, users: bool) -> None:
        self.processes = processes
        self.memory = memory
        self.users = users


class Account(NamedTuple):
    uid: int
    gid: int
    name: str
    home: str


_ROOT = Account(0, 0, "root", "/root")


def start(request: dict[str, Any], descriptors: list[int], rules: Rules) -> subprocess.Popen[bytes]:
    """Start the command with ``descriptors`` as its stdin, stdout and stderr. Raises :class:`CannotStart`."""
    account = _account(request.get("user"), rules)
    arguments = _arguments(request)
    options: dict[str, Any] = {}
    if account.uid != 0:
        options.update(user=account.uid, group=account.gid, extra_groups=[])
    if rules.memory is not None:
        limit = (rules.memory, rules.memory)
        options["preexec_fn"] = lambda: resource.setrlimit(resource.RLIMIT_AS, limit)
    try:
        return subprocess.Popen(
            arguments,
            stdin=descriptors[0],
            stdout=descriptors[1],
            stderr=descriptors[2],
            cwd=request["cwd"],
            env={"HOME": account.home, "USER": account.name, **request["env"]},
            start_new_session=True,
            **options,
        )
    except OSError as error:
        if error.filename == request["cwd"]:
            raise CannotStart(f"working directory {request['cwd']}: {error.strerror}") from None
        code = 127 if isinstance(error, FileNotFoundError | NotADirectoryError) else 126
        reason = "not found" if code == 127 else error.strerror
        raise CannotStart(f"{arguments[0]}: {reason}", code) from None
    except (ValueError, OverflowError, subprocess.SubprocessError) as error:  # an embedded NUL, for example
        raise CannotStart(str(error)) from None


def _arguments(request: dict[str, Any]) -> list[str]:
    if "shell" in request:
        return ["/bin/bash" if os.access("/bin/bash", os.X_OK) else "/bin/sh", "-c", request["shell"]]
    arguments: list[str] = request["argv"]
    return arguments


def _account(user: str | None, rules: Rules) -> Account:
    """The account of ``user``: in the sandbox's ``/etc/passwd``, or a number, or None for root."""
    if user in (None, "root", "0"):
        return _ROOT
    assert user is not None
    if not rules.users:
        raise CannotStart(f"user {user}: only root exists in this sandbox")
    for line in _account_lines():
        fields = line.split(":")
        if len(fields) == 7 and user in (fields[0], fields[2]) and fields[2].isdecimal() and fields[3].isdecimal():
            return Account(int(fields[2]), int(fields[3]), fields[0], fields[5])
    if user.isdecimal():
        return Account(int(user), int(user), user, "/")
    raise CannotStart(f"user {user}: unknown")


def _account_lines() -> list[str]:
    try:
        descriptor = os.open("/etc/passwd", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        return os.read(descriptor, _MAX_ACCOUNTS).decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    finally:
        os.close(descriptor)
