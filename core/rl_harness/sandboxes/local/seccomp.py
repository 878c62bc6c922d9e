"""The seccomp filter under which every process of the agent runs.

It refuses what reaches beyond a container (mounts, namespaces, tracing, keys, bpf, kernel modules, clocks) with
EPERM, so that ordinary programs see an ordinary refusal. Built once, by the helper.
"""

from __future__ import annotations

import errno
import os
import struct

_ALLOW = 0x7FFF0000
_KILL_PROCESS = 0x80000000
_ERRNO = 0x00050000

_LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_AT_LEAST = 0x35  # BPF_JMP | BPF_JGE | BPF_K
_ANY_BIT = 0x45  # BPF_JMP | BPF_JSET | BPF_K
_RETURN = 0x06  # BPF_RET | BPF_K

_NR, _ARCH, _ARG0, _ARG1 = 0, 4, 16, 24  # offsets in struct seccomp_data, low words (little endian)

_NEW_NAMESPACES = 0x7E020000
_FAMILIES = (1, 2, 10, 16)  # unix, inet, inet6, netlink; vsock in particular is not bound to a namespace
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C

# Numbers from 424 on are common to all architectures.
_COMMON = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "mount_setattr": 442,
    "quotactl_fd": 443,
}

_DENIED = {
    "x86_64": _COMMON
    | {
        "ptrace": 101,
        "syslog": 103,
        "vhangup": 153,
        "pivot_root": 155,
        "adjtimex": 159,
        "acct": 163,
        "settimeofday": 164,
        "mount": 165,
        "umount2": 166,
        "swapon": 167,
        "swapoff": 168,
        "reboot": 169,
        "sethostname": 170,
        "setdomainname": 171,
        "iopl": 172,
        "ioperm": 173,
        "init_module": 175,
        "delete_module": 176,
        "quotactl": 179,
        "lookup_dcookie": 212,
        "clock_settime": 227,
        "kexec_load": 246,
        "add_key": 248,
        "request_key": 249,
        "keyctl": 250,
        "unshare": 272,
        "perf_event_open": 298,
        "fanotify_init": 300,
        "name_to_handle_at": 303,
        "open_by_handle_at": 304,
        "clock_adjtime": 305,
        "setns": 308,
        "process_vm_readv": 310,
        "process_vm_writev": 311,
        "kcmp": 312,
        "finit_module": 313,
        "kexec_file_load": 320,
        "bpf": 321,
        "userfaultfd": 323,
    },
    "aarch64": _COMMON
    | {
        "lookup_dcookie": 18,
        "umount2": 39,
        "mount": 40,
        "pivot_root": 41,
        "vhangup": 58,
        "quotactl": 60,
        "acct": 89,
        "unshare": 97,
        "kexec_load": 104,
        "init_module": 105,
        "delete_module": 106,
        "clock_settime": 112,
        "syslog": 116,
        "ptrace": 117,
        "reboot": 142,
        "sethostname": 161,
        "setdomainname": 162,
        "settimeofday": 170,
        "adjtimex": 171,
        "add_key": 217,
        "request_key": 218,
        "keyctl": 219,
        "swapon": 224,
        "swapoff": 225,
        "perf_event_open": 241,
        "fanotify_init": 262,
        "name_to_handle_at": 264,
        "open_by_handle_at": 265,
        "clock_adjtime": 266,
        "setns": 268,
        "process_vm_readv": 270,
        "process_vm_writev": 271,
        "kcmp": 272,
        "finit_module": 273,
        "bpf": 280,
        "userfaultfd": 282,
        "kexec_file_load": 294,
    },
}

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE = {"x86_64": 56, "aarch64": 220}
_SOCKET = {"x86_64": 41, "aarch64": 198}
_SOCKETPAIR = {"x86_64": 53, "aarch64": 199}
_IOCTL = {"x86_64": 16, "aarch64": 29}
_PRLIMIT = {"x86_64": 302, "aarch64": 261}
_SETPRIORITY = {"x86_64": 141, "aarch64": 140}
# sched_setparam, sched_setscheduler, sched_setaffinity, sched_setattr
_SCHEDULING = {"x86_64": (142, 144, 203, 314), "aarch64": (118, 119, 122, 274)}
_CLONE3 = 435
_X32_BIT = 0x40000000

MACHINES = frozenset(_AUDIT_ARCH)


def build(machine: str | None = None) -> bytes:
    """The filter for ``machine`` (default: this one) as an array of ``struct sock_filter``."""
    machine = machine or os.uname().machine
    program: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NR),
    ]

    def refuse(number: int, error: int) -> None:
        program.append((_EQUAL, 0, 1, number))
        program.append((_RETURN, 0, 0, _ERRNO | error))

    if machine == "x86_64":
        program += [(_AT_LEAST, 0, 1, _X32_BIT), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    for number in sorted(_DENIED[machine].values()):
        refuse(number, errno.EPERM)
    # The C library falls back to clone, whose flags can be seen here.
    refuse(_CLONE3, errno.ENOSYS)
    # Same user as init, the agent could starve it or have the kernel kill it: limits and priorities only of oneself,
    # scheduling not of process 1.
    program += [
        (_EQUAL, 0, 4, _PRLIMIT[machine]),
        (_LOAD, 0, 0, _ARG0),
        (_EQUAL, 1, 0, 0),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
        (_EQUAL, 0, 6, _SETPRIORITY[machine]),
        (_LOAD, 0, 0, _ARG0),
        (_EQUAL, 0, 2, 0),
        (_LOAD, 0, 0, _ARG1),
        (_EQUAL, 1, 0, 0),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    for number in _SCHEDULING[machine]:
        program += [
            (_EQUAL, 0, 4, number),
            (_LOAD, 0, 0, _ARG0),
            (_EQUAL, 0, 1, 1),
            (_RETURN, 0, 0, _ERRNO | errno.EPERM),
            (_RETURN, 0, 0, _ALLOW),
        ]
    program += [
        (_EQUAL, 0, 4, _CLONE[machine]),
        (_LOAD, 0, 0, _ARG0),
        (_ANY_BIT, 0, 1, _NEW_NAMESPACES),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
        (_EQUAL, 0, 5, _IOCTL[machine]),
        (_LOAD, 0, 0, _ARG1),
        (_EQUAL, 1, 0, _TIOCSTI),
        (_EQUAL, 0, 1, _TIOCLINUX),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
        (_EQUAL, 1, 0, _SOCKET[machine]),
        (_EQUAL, 0, len(_FAMILIES) + 2, _SOCKETPAIR[machine]),
        (_LOAD, 0, 0, _ARG0),
    ]
    for index, family in enumerate(_FAMILIES):
        program.append((_EQUAL, len(_FAMILIES) - index, 0, family))
    program += [(_RETURN, 0, 0, _ERRNO | errno.EAFNOSUPPORT), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
