"""Outlive the agent and leave nothing behind.

The supervisor waits until the agent ends or its own standard input closes, because the harness closed it or died.
Then it kills every descendant. Orphans become its children (it is a subreaper), so it also finds those that moved
into sessions of their own, which killing the agent's process group would miss.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Descendants whose parent ended become children of this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Be killed when the supervisor is; end at once if it is gone already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def supervise(agent: int) -> int:
    """Wait for the end, whoever decides it; kill what is left; return the agent's wait status."""
    with contextlib.suppress(OSError):
        os.setpgid(agent, agent)  # the agent does it too: whichever of the two processes runs first
    status = _wait(agent)
    with contextlib.suppress(OSError):
        os.killpg(agent, signal.SIGKILL)
    rest = _kill_children(agent)
    return status if status is not None else rest if rest is not None else signal.SIGKILL


def _wait(agent: int) -> int | None:
    """The agent's wait status, or None when standard input closed first."""
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    while True:
        status = _reap(agent)
        if status is not None:
            return status
        ready, _, _ = select.select([wake_read, 0], [], [])
        if wake_read in ready:
            os.read(wake_read, 4096)
        if 0 in ready and not os.read(0, 4096):
            return None


def _reap(agent: int) -> int | None:
    """Collect the children that have ended; the agent's status if it is among them."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == agent:
                found = status
            if pid == 0:
                break
    return found


def _kill_children(agent: int) -> int | None:
    """Kill children until there are none: those of a killed child come here and are next."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while True:
            for child in _children():
                with contextlib.suppress(OSError):
                    os.kill(child, signal.SIGKILL)
            pid, status = os.waitpid(-1, 0)
            if pid == agent:
                found = status
    return found


def _children() -> list[int]:
    """Pids of this process's children from /proc; where there is none, ending the group has to do."""
    own, found = str(os.getpid()).encode(), []
    try:
        entries = os.listdir("/proc")  # noqa: PTH208  pathlib would double the start-up time
    except OSError:
        return []
    for entry in filter(str.isdigit, entries):
        with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:  # noqa: PTH123  see above
            # The command's name, in brackets, may itself hold brackets and spaces: state and parent follow it.
            if file.read().rpartition(b")")[2].split()[1] == own:
                found.append(int(entry))
    return found


def _prctl(option: int, value: int) -> None:
    """Linux only. Elsewhere a process that left the agent's group can be missed."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
