"""What a sandbox's file system is made of: the host's system directories and a synthetic rest, copy-on-write.

``Stage`` is prepared once, in the helper's private mount namespace, below ``/tmp`` there: the read-only layers.
``enter_root`` runs in each sandbox: it stacks the layers, mounts proc and dev, and pivots into the result.

Owners: a file of the host's root has an owner that does not exist inside a user namespace, so nobody there may
change it. As root, the layers are bound through an id-mapped mount and root inside owns them. Otherwise a skeleton
of directories that root inside owns is laid over each system directory: files can be added, removed and replaced
there, while a host file's content, mode or name cannot be changed in place (it can be removed and written anew).
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Any, NamedTuple

from rl_harness.sandboxes.local import syscalls as sc

STAGE = "/tmp"
SYSTEM_DIRECTORIES = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
EMPTY_DIRECTORIES = {
    "dev": 0o755,
    "etc": 0o755,
    "home": 0o755,
    "logs": 0o777,
    "media": 0o755,
    "mnt": 0o755,
    "opt": 0o755,
    "proc": 0o555,
    "root": 0o700,
    "run": 0o755,
    "run/lock": 0o1777,
    "srv": 0o755,
    "tmp": 0o1777,
    "var": 0o755,
    "var/cache": 0o755,
    "var/lib": 0o755,
    "var/log": 0o755,
    "var/tmp": 0o1777,
}
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
SKELETON_DEPTH = 4

# Copied from the host where they exist: what programs need to start, and nothing about the host's users or services.
ETC_FROM_HOST = (
    "alternatives",
    "bash.bashrc",
    "ca-certificates.conf",
    "debian_version",
    "ethertypes",
    "fonts",
    "gai.conf",
    "host.conf",
    "inputrc",
    "java",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "locale.alias",
    "localtime",
    "login.defs",
    "magic",
    "magic.mime",
    "mime.types",
    "networks",
    "os-release",
    "perl",
    "profile",
    "protocols",
    "python3",
    "python3.11",
    "python3.12",
    "python3.13",
    "python3.14",
    "rpc",
    "services",
    "shells",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
    "timezone",
    "vim",
)
ETC_SYNTHETIC = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\n"
    "daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin\n"
    "agent:x:1000:1000:agent:/home/agent:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\ndaemon:x:1:\ntty:x:5:\nutmp:x:43:\nstaff:x:50:\nagent:x:1000:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "hostname": "sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\n",
    "resolv.conf": "",
}


class Layer:
    """One overlay of the sandbox: mounted at ``target`` ("" is the root) from ``lower`` (an overlayfs list)."""

    def __init__(self, name: str, target: str, lower: list[str]) -> None:
        self.name = name
        self.target = target
        self.lower = lower


class Stage:
    """The layers every sandbox of one helper shares; building it needs a private mount namespace."""

    def __init__(self, state: str, root: str | None, user_namespace: int | None, owner: int) -> None:
        """``state``: the state directory. ``root``: a given root file system or None for the host's system
        directories. ``user_namespace``: for id-mapped mounts, or None. ``owner``: the uid, seen from here, that
        is root inside."""
        self.owner = owner
        self.links: dict[str, str] = {}
        self.idmapped = False
        sc.mount(None, "/", None, sc.MS_REC | sc.MS_PRIVATE)
        state_fd = os.open(state, os.O_PATH | os.O_DIRECTORY)
        # What the stage is about to cover.
        self._covered = os.open(STAGE, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        root_fd = os.open(root, os.O_PATH | os.O_DIRECTORY) if root else -1
        sc.mount("stage", STAGE, "tmpfs", sc.MS_NOSUID | sc.MS_NODEV, "mode=755,size=256m")
        for name in ("state", "lower", "skeleton", "base", "dev", "root"):
            os.mkdir(f"{STAGE}/{name}")
        sc.mount(f"/proc/self/fd/{state_fd}", f"{STAGE}/state", None, sc.MS_BIND | sc.MS_REC)
        os.close(state_fd)
        self._build_dev()
        if root_fd >= 0:
            self.layers = [self._system_layer("root", f"/proc/self/fd/{root_fd}", "", user_namespace)]
            os.close(root_fd)
        else:
            self.layers = [Layer("root", "", [f"{STAGE}/base"])]
            for name in SYSTEM_DIRECTORIES:
                source = f"/{name}"
                if os.path.islink(source):
                    self.links[name] = os.readlink(source)
                elif os.path.isdir(source):
                    self.layers.append(self._system_layer(name, source, name, user_namespace))
            self._build_base()

    def host_directory(self, source: str) -> int:
        """A descriptor of the mounts at ``source``, an absolute path of the host without links, read-only."""
        if (source + "/").startswith(STAGE + "/"):
            tree = sc.copy_of_mounts(source[len(STAGE) + 1 :] or ".", directory=self._covered, submounts=True)
        else:
            tree = sc.copy_of_mounts(source, submounts=True)
        try:
            sc.restrict_mounts(tree, submounts=True)
        except OSError:
            os.close(tree)
            raise
        return tree

    def forget_host(self) -> None:
        """Close what only :meth:`host_directory` needs: a sandbox must hold nothing of the host."""
        os.close(self._covered)

    def _system_layer(self, name: str, source: str, target: str, user_namespace: int | None) -> Layer:
        bound = f"{STAGE}/lower/{name}"
        os.mkdir(bound)
        if user_namespace is not None and _overlay_takes_idmapped_layers():
            try:
                sc.bind_idmapped(source, bound, user_namespace)
                self.idmapped = True
                return Layer(name, target, [bound])
            except sc.StepError:
                pass  # this file system has no id-mapped mounts: the skeleton serves
        sc.mount(source, bound, None, sc.MS_BIND | sc.MS_REC)
        skeleton = f"{STAGE}/skeleton/{name}"
        self._directory(skeleton, 0o755)
        self._copy_directories(bound, skeleton, SKELETON_DEPTH)
        return Layer(name, target, [skeleton, bound])

    def _directory(self, path: str, mode: int) -> None:
        os.mkdir(path)
        os.chmod(path, mode)
        os.chown(path, self.owner, self.owner)

    def _copy_directories(self, source: str, target: str, depth: int) -> None:
        try:
            entries = list(os.scandir(source))
        except OSError:
            return
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                mode = stat.S_IMODE(entry.stat(follow_symlinks=False).st_mode)
                self._directory(f"{target}/{entry.name}", mode | 0o700)
                if depth > 1:
                    self._copy_directories(entry.path, f"{target}/{entry.name}", depth - 1)

    def _build_base(self) -> None:
        base = f"{STAGE}/base"
        os.chown(base, self.owner, self.owner)
        for name, mode in EMPTY_DIRECTORIES.items():
            self._directory(f"{base}/{name}", mode)
        for layer in self.layers:
            if layer.target:
                self._directory(f"{base}/{layer.target}", 0o755)
        for name, link in self.links.items():
            self._link(link, f"{base}/{name}")
        self._link("/run", f"{base}/var/run")
        self._link("/run/lock", f"{base}/var/lock")
        self._directory(f"{base}/home/agent", 0o755)
        os.chown(f"{base}/home/agent", self.owner + 1000 if self.owner else 0, self.owner + 1000 if self.owner else 0)
        for name in ETC_FROM_HOST:
            self._copy(f"/etc/{name}", f"{base}/etc/{name}")
        for name, text in ETC_SYNTHETIC.items():
            self._file(f"{base}/etc/{name}", text.encode())
        self._link("/proc/self/mounts", f"{base}/etc/mtab")

    def _link(self, link: str, path: str) -> None:
        os.symlink(link, path)
        os.chown(path, self.owner, self.owner, follow_symlinks=False)

    def _file(self, path: str, data: bytes, mode: int = 0o644) -> None:
        with open(path, "wb") as file:
            file.write(data)
        os.chmod(path, mode)
        os.chown(path, self.owner, self.owner)

    def _copy(self, source: str, target: str) -> None:
        """Copy what is readable of a small tree; parents that are missing are made."""
        try:
            status = os.lstat(source)
            parent = os.path.dirname(target)
            if not os.path.isdir(parent):
                self._directory(parent, 0o755)
            if stat.S_ISLNK(status.st_mode):
                self._link(os.readlink(source), target)
            elif stat.S_ISDIR(status.st_mode):
                self._directory(target, stat.S_IMODE(status.st_mode) | 0o700)
                for name in os.listdir(source):
                    self._copy(f"{source}/{name}", f"{target}/{name}")
            elif stat.S_ISREG(status.st_mode):
                with open(source, "rb") as file:
                    self._file(target, file.read(), stat.S_IMODE(status.st_mode) & 0o755)
        except OSError:
            return  # unreadable for this user, or gone: the sandbox does without it

    def _build_dev(self) -> None:
        dev = f"{STAGE}/dev"
        sc.mount("dev", dev, "tmpfs", sc.MS_NOSUID, "mode=755,size=64k")
        for name in DEVICES:
            if os.path.exists(f"/dev/{name}"):
                self._file(f"{dev}/{name}", b"")
                sc.mount(f"/dev/{name}", f"{dev}/{name}", None, sc.MS_BIND | sc.MS_REC)
        os.symlink("pts/ptmx", f"{dev}/ptmx")
        os.symlink("/proc/self/fd", f"{dev}/fd")
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            os.symlink(f"/proc/self/fd/{number}", f"{dev}/{name}")
        for name in ("pts", "shm"):
            os.mkdir(f"{dev}/{name}")
        sc.mount(None, dev, None, sc.MS_REMOUNT | sc.MS_BIND | sc.MS_RDONLY | sc.MS_NOSUID)


class Mounted(NamedTuple):
    """A layer of a running sandbox: descriptors of its writable part and of what lies below, newest first, of which
    the ``frozen`` first are those of snapshots."""

    name: str
    target: str
    upper: int
    lowers: list[int]
    frozen: int


class Root:
    """What init keeps of the mounted sandbox, to find what changed and to freeze it."""

    def __init__(self) -> None:
        self.layers: list[Mounted] = []


def enter_root(
    stage: Stage,
    sandbox: str,
    disk: int | None,
    snapshots: list[str],
    extra: dict[str, Any],
    shown: list[tuple[int, str]],
) -> Root:
    """Mount the file system of the sandbox whose state folder is ``sandbox`` and pivot into it.

    ``disk``: bytes, then the writable layer is a tmpfs of that size instead of the state folder. ``snapshots``: state
    folders whose layers lie between it and the stage's, newest first. ``extra`` maps absolute directories to create
    (the working directory). ``shown``: descriptors of directories of the host, which are closed, and where each goes.
    """
    root = Root()
    target = f"{STAGE}/root"
    writable = f"{STAGE}/state/{sandbox}/fs"
    if disk is not None:
        sc.mount("disk", writable, "tmpfs", sc.MS_NOSUID | sc.MS_NODEV, f"mode=700,size={disk}")
    for layer in stage.layers:
        upper, work = f"{writable}/{layer.name}", f"{writable}/{layer.name}.work"
        os.mkdir(upper, 0o755)
        os.mkdir(work, 0o755)
        at = f"{target}/{layer.target}" if layer.target else target
        lower = [*(f"{STAGE}/state/{name}/fs/{layer.name}" for name in snapshots), *layer.lower]
        _mirror(upper, lower[0], owner=bool(snapshots))
        options = f"lowerdir={':'.join(lower)},upperdir={upper},workdir={work},userxattr,volatile"
        sc.mount("sandbox", at, "overlay", sc.MS_NOSUID | sc.MS_NODEV, options)
        flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
        lowers = [os.open(path, flags) for path in lower]
        root.layers.append(Mounted(layer.name, layer.target, os.open(upper, flags), lowers, len(snapshots)))
    for name in ("proc", "dev"):
        _plain_directory(f"{target}/{name}")
    sc.mount("proc", f"{target}/proc", "proc", sc.MS_NOSUID | sc.MS_NODEV | sc.MS_NOEXEC)
    sc.mount(f"{STAGE}/dev", f"{target}/dev", None, sc.MS_BIND | sc.MS_REC)
    sc.mount("devpts", f"{target}/dev/pts", "devpts", sc.MS_NOSUID | sc.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")
    sc.mount("shm", f"{target}/dev/shm", "tmpfs", sc.MS_NOSUID | sc.MS_NODEV, "mode=1777,size=64m")
    os.chdir(target)
    sc.pivot_root(".", ".")
    sc.umount(".")
    os.chdir("/")
    for path in extra:
        os.makedirs(path, exist_ok=True)
    for tree, path in shown:
        os.makedirs(path, exist_ok=True)
        sc.attach_mounts(tree, path)
        os.close(tree)
    return root


def _overlay_takes_idmapped_layers() -> bool:
    major, minor = os.uname().release.split(".")[:2]
    return (int(major), int(minor.split("-")[0])) >= (5, 19)


def _plain_directory(path: str) -> None:
    """Make sure of a mount point; in a given root file system a link there would lead out of it."""
    try:
        os.mkdir(path, 0o755)
    except FileExistsError:
        if os.path.islink(path):
            raise sc.StepError(f"mount on {os.path.basename(path)}", errno.ELOOP) from None


def _mirror(upper: str, lower: str, *, owner: bool) -> None:
    status = os.stat(lower)
    if owner:
        os.chown(upper, status.st_uid, status.st_gid)
    os.chmod(upper, stat.S_IMODE(status.st_mode))
