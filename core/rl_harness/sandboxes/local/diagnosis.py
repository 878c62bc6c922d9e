"""From a failed step of starting a sandbox to what the user can do about it on this distribution."""

from __future__ import annotations

from pathlib import Path

from rl_harness.sandboxes.local.channel import StartFailed

#: `process` is named with what it costs; which others there are depends on what is installed.
OTHER_SANDBOX = "choose another sandbox (rl-harness plugins list; --sandbox process does not isolate)"
_OTHER = f"or {OTHER_SANDBOX}"


def remedy(error: StartFailed) -> str:
    """The exact command where the cause can be read from this machine, otherwise where to look."""
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


def _setting(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _in_container() -> bool:
    return any(Path(path).exists() for path in ("/.dockerenv", "/run/.containerenv"))
