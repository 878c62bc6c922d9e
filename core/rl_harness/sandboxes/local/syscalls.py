"""The Linux calls that Python 3.11 lacks, through ctypes: namespaces, mounts, capabilities, openat2.

Shared by everything inside the sandbox; imports nothing heavy, because each sandbox is a fork of this process.
"""

from __future__ import annotations

import ctypes
import os

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
ALL_NAMESPACES = (
    CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWNET | CLONE_NEWCGROUP
)

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MNT_DETACH = 2

PR_SET_DUMPABLE = 4
PR_SET_KEEPCAPS = 8
PR_CAPBSET_DROP = 24
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04

# These numbers are the same on every architecture with the unified table (x86_64, aarch64, riscv64, ...).
_SYS_OPEN_TREE = 428
_SYS_MOVE_MOUNT = 429
_SYS_OPENAT2 = 437
_SYS_MOUNT_SETATTR = 442

_OPEN_TREE_CLONE = 1
_OPEN_TREE_CLOEXEC = os.O_CLOEXEC
_AT_EMPTY_PATH = 0x1000
_AT_RECURSIVE = 0x8000
_AT_FDCWD = -100
_MOVE_MOUNT_F_EMPTY_PATH = 0x4
_MOUNT_ATTR_RDONLY = 0x1
_MOUNT_ATTR_NOSUID = 0x2
_MOUNT_ATTR_NODEV = 0x4
_MOUNT_ATTR_IDMAP = 0x100000

_libc = ctypes.CDLL(None, use_errno=True)


class StepError(OSError):
    """A system call failed; ``step`` names what was being done, for the diagnosis shown to the user."""

    def __init__(self, step: str, number: int) -> None:
        super().__init__(number, os.strerror(number))
        self.step = step


def _check(step: str, result: int) -> int:
    if result < 0:
        raise StepError(step, ctypes.get_errno())
    return result


def _bytes(value: str | None) -> bytes | None:
    return None if value is None else value.encode("utf-8", "surrogateescape")


def unshare(flags: int, step: str = "unshare") -> None:
    _check(step, _libc.unshare(ctypes.c_int(flags)))


def mount(source: str | None, target: str, kind: str | None, flags: int = 0, data: str | None = None) -> None:
    step = f"mount {kind or 'bind'}"
    _check(step, _libc.mount(_bytes(source), _bytes(target), _bytes(kind), ctypes.c_ulong(flags), _bytes(data)))


def umount(target: str, flags: int = MNT_DETACH) -> None:
    _check("umount", _libc.umount2(_bytes(target), ctypes.c_int(flags)))


def pivot_root(new: str, old: str) -> None:
    _check("pivot_root", _libc.pivot_root(_bytes(new), _bytes(old)))


def sync_file_system(descriptor: int) -> None:
    """Have everything written to the file system of ``descriptor`` on its disk."""
    _check("syncfs", _libc.syncfs(ctypes.c_int(descriptor)))


def prctl(option: int, value: int = 0, step: str = "prctl") -> None:
    zero = ctypes.c_ulong(0)
    _check(step, _libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), zero, zero, zero))


def set_seccomp(program: bytes) -> None:
    """Install a seccomp filter (an array of ``struct sock_filter``) for this process and all it starts."""

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]

    filter_ = Program(len(program) // 8, program)
    _check(
        "seccomp",
        _libc.prctl(ctypes.c_int(PR_SET_SECCOMP), ctypes.c_ulong(2), ctypes.byref(filter_), ctypes.c_ulong(0)),
    )


def raise_capabilities() -> None:
    """Make every permitted capability effective again."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    _check("capget", _libc.capget(header, data))
    data[0], data[3] = data[1], data[4]
    _check("capset", _libc.capset(header, data))


def drop_bounding(keep: int) -> None:
    """Drop every capability outside the bit mask ``keep`` from the bounding set."""
    for capability in range(64):
        if not keep >> capability & 1:
            try:
                prctl(PR_CAPBSET_DROP, capability)
            except StepError:
                if capability > 35:  # beyond this kernel's last capability
                    break
                raise


def open_beneath_root(path: str, flags: int, mode: int = 0, *, directory: int = _AT_FDCWD) -> int:
    """``open`` that fails with ELOOP where any component of ``path`` is a symbolic link."""

    class How(ctypes.Structure):
        _fields_ = [("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64)]

    how = How(flags | os.O_CLOEXEC, mode, RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS)
    result = _libc.syscall(
        ctypes.c_long(_SYS_OPENAT2), ctypes.c_int(directory), _bytes(path), ctypes.byref(how), ctypes.sizeof(how)
    )
    return _check("openat2", int(result))


def copy_of_mounts(path: str, *, directory: int = _AT_FDCWD, submounts: bool = False) -> int:
    """A descriptor of the mount at ``path`` (from ``directory``, and with what is mounted below it on demand) that is
    attached nowhere."""
    flags = _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC | (_AT_RECURSIVE if submounts else 0)
    tree = _libc.syscall(ctypes.c_long(_SYS_OPEN_TREE), ctypes.c_int(directory), _bytes(path), ctypes.c_uint(flags))
    return _check("open_tree", int(tree))


def restrict_mounts(tree: int, *, user_namespace: int | None = None, submounts: bool = False) -> None:
    """Make what :func:`copy_of_mounts` gave read-only, without set-user-id programs and devices; its owners translated
    by ``user_namespace`` (a descriptor) if there is one."""

    class Attributes(ctypes.Structure):
        _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]

    flags = _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV
    if user_namespace is not None:
        flags |= _MOUNT_ATTR_IDMAP
    attributes = Attributes(flags, 0, 0, user_namespace or 0)
    result = _libc.syscall(
        ctypes.c_long(_SYS_MOUNT_SETATTR),
        ctypes.c_int(tree),
        b"",
        ctypes.c_uint(_AT_EMPTY_PATH | (_AT_RECURSIVE if submounts else 0)),
        ctypes.byref(attributes),
        ctypes.c_size_t(ctypes.sizeof(attributes)),
    )
    _check("mount_setattr", int(result))


def attach_mounts(tree: int, target: str) -> None:
    """Mount what :func:`copy_of_mounts` gave, also in another mount namespace than it was taken from."""
    result = _libc.syscall(
        ctypes.c_long(_SYS_MOVE_MOUNT),
        ctypes.c_int(tree),
        b"",
        ctypes.c_int(_AT_FDCWD),
        _bytes(target),
        ctypes.c_uint(_MOVE_MOUNT_F_EMPTY_PATH),
    )
    _check("move_mount", int(result))


def bind_idmapped(source: str, target: str, user_namespace: int) -> None:
    """Bind ``source`` read-only on ``target`` with its owners translated by ``user_namespace`` (a descriptor)."""
    tree = copy_of_mounts(source)
    try:
        restrict_mounts(tree, user_namespace=user_namespace)
        attach_mounts(tree, target)
    finally:
        os.close(tree)
