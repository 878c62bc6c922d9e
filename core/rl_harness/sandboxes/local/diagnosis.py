"""From a failed step of starting a sandbox to what the user can do about it on this distribution."""

from __future__ import annotations

import errno
from pathlib import Path

from rl_harness.sandboxes.local.channel import StartFailed
from rl_harness.shortages import SHORT, shortage

#: `process` is named with what it costs; which others there are depends on what is installed.
OTHER_SANDBOX = "choose another sandbox (rl-harness plugins list; --sandbox process does not isolate)"
_OTHER = f"or {OTHER_SANDBOX}"


#: How to have another folder for the state.
STATE_DIR = "-o sandbox.state_dir=DIR"
#: What these fail at with ENOSPC is a limit on namespaces or mounts, and not a disk.
_COUNTED = ("unshare", "mount", "fork", "map users")
#: What fails here is written elsewhere than in the state folder.
_ELSEWHERE = ("make control groups", "map users")


def remedy(error: StartFailed, state: Path) -> str:
    """The exact command where the cause can be read from this machine, otherwise where to look."""
    if (short := _short(error, state)) is not None:
        return short
    if _setting("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1":
        return (
            "AppArmor restricts user namespaces here: "
            f"sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0, {_OTHER}"
        )
    if _setting("/proc/sys/kernel/unprivileged_userns_clone") == "0":
        return f"user namespaces are off for users: sudo sysctl kernel.unprivileged_userns_clone=1, {_OTHER}"
    if _setting("/proc/sys/user/max_user_namespaces") == "0":
        return f"user namespaces are off: sudo sysctl user.max_user_namespaces=15000, {_OTHER}"
    if _in_container():
        return (
            "this looks like a container, whose seccomp profile forbids namespaces: start it with "
            "--security-opt seccomp=unconfined --security-opt systempaths=unconfined --cap-add SYS_ADMIN, "
            f"{_OTHER}"
        )
    if error.step.startswith("mount overlay"):
        return (
            "overlayfs needs a state folder on ext4, xfs, btrfs or tmpfs: "
            f"-o sandbox.state_dir=DIR or -o sandbox.storage=memory, {_OTHER}"
        )
    return f"the local sandbox needs user namespaces and overlayfs, {_OTHER}"


def _short(error: StartFailed, state: Path) -> str | None:
    """What ran out, told before anything that this machine also forbids: it started sandboxes until then."""
    if error.number == errno.EAGAIN:
        return "too many processes: raise the limit of this user (ulimit -u), or lower the concurrency"
    if error.number not in SHORT or error.step.startswith(_ELSEWHERE):
        return None
    if error.number == errno.ENOSPC and error.step.startswith(_COUNTED):
        return None
    found = shortage(error.number, state, STATE_DIR)
    return None if found is None else f"{found.what}: {found.remedy}"


def _setting(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _in_container() -> bool:
    return any(Path(path).exists() for path in ("/.dockerenv", "/run/.containerenv"))
