"""Carries artifacts from the agent's sandbox to the verifier's, through a folder on this machine.

What an agent leaves behind is hostile: pipes, links out of its tree, sparse terabytes, folders nobody may open, a
thousand levels of directories. None of it may stop the grading, stay on this machine, or pass for a failure of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import fnmatch
import functools
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec

from rl_harness.contracts.sandbox import Sandbox
from rl_harness.errors import SandboxError, UnsafeFiles
from rl_harness.shortages import shortage
from rl_harness.tasks.task import Artifact

#: Carried whenever the agent made it, as in Harbor.
CONVENTION = Artifact(source="/logs/artifacts")
#: Directories within directories; deeper trees are refused.
MAX_DEPTH = 200
_PREFIX = "rl-harness-artifacts"

# Directories on which something is mounted, such as an image's volumes, cannot be removed; they can be empty.
_CLEAR = """
holds() {
  for at in "$1"/* "$1"/.[!.]* "$1"/..?*; do
    if [ -d "$at" ] && [ ! -L "$at" ]; then (holds "$at") && return 0
    elif [ -e "$at" ] || [ -L "$at" ]; then return 0
    fi
  done
  return 1
}
for path; do
  rm -rf -- "$path" || { [ -d "$path" ] && ! holds "$path"; } || exit 1
done
"""


class Carried(msgspec.Struct):
    """One artifact on this machine. ``path`` is None when the agent has no such file. ``modes`` are permissions that
    had to be widened for the owner to read it here, by path inside."""

    artifact: Artifact
    path: Path | None = None
    size: int = 0
    modes: dict[str, int] = {}


@contextlib.asynccontextmanager
async def collect(sandbox: Sandbox, artifacts: Sequence[Artifact], limit: int) -> AsyncIterator[list[Carried]]:
    """Download every artifact; on leaving, nothing of them remains on this machine.

    Raises ``UnsafeFiles`` for more than ``limit`` bytes in all, or a tree too deep; ``SandboxError`` where this machine
    has no room for them, which is nothing that the agent is graded by.
    """
    try:
        folder, lock = await asyncio.to_thread(_make_folder)
    except OSError as error:
        raise _not_kept(error, os.environ.get("TMPDIR") or "/tmp") from None
    try:
        carried = []
        for number, artifact in enumerate((*artifacts, CONVENTION)):
            item = Carried(artifact=artifact)
            try:
                target = folder / str(number)
                await sandbox.download(artifact.source, target, limit=limit, skip_unsafe=True)
                await asyncio.to_thread(_examine, item, target)
            except FileNotFoundError:
                pass
            except UnsafeFiles:
                if artifact is not CONVENTION:
                    raise
                item = Carried(artifact=artifact)  # nobody declared it, so it is not missed
            except OSError as error:
                raise _not_kept(error, folder) from None
            limit -= item.size
            if artifact is not CONVENTION or item.path is not None:
                carried.append(item)
        yield carried
    finally:
        await asyncio.shield(asyncio.to_thread(_remove_folder, folder, lock))


def _not_kept(error: OSError, folder: str | Path) -> SandboxError:
    short = shortage(error.errno, folder, "set TMPDIR to another folder")
    return SandboxError(
        f"what the agent made cannot be kept for its verifier: {short.what if short else f'{folder}: {error}'}",
        remedy=short.remedy if short else "set TMPDIR to a folder that can be written",
    )


def _make_folder() -> tuple[Path, int]:
    """A folder on this machine and the lock that says its process lives. It has its final name once it is locked."""
    _remove_abandoned(tempfile.gettempdir())
    made = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}."))
    lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return made.rename(made.with_name(made.name.replace(".", "-", 1))), lock


def _remove_folder(folder: Path, lock: int) -> None:
    remove_tree(folder)
    os.close(lock)


@functools.cache
def _remove_abandoned(parent: str) -> None:
    """Once a process: what killed ones left, which an agent filled."""
    for folder in Path(parent).glob(f"{_PREFIX}-*"):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # another user's, or gone
        try:
            if os.fstat(lock).st_uid == os.geteuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_tree(folder)
        except OSError:
            pass  # its process lives
        finally:
            os.close(lock)


async def place(carried: Sequence[Carried], fresh: Sandbox, *, clean: bool) -> None:
    """Upload to the same paths of another sandbox. ``clean``: what its image has there goes first."""
    stale = [item.artifact.source for item in carried if clean or (item.path is not None and item.path.is_file())]
    if stale:
        argv = ["/bin/sh", "-c", _CLEAR, "sh", *map(fresh.native_path, stale)]
        await _must(fresh, argv, b"", "clear the artifacts' places")
    for item in carried:
        if item.path is None:
            continue
        try:
            await fresh.upload(item.path, item.artifact.source)
        except UnsafeFiles as error:
            if not error.full:
                raise
            # What the agent's sandbox had room for; it could do nothing about this one.
            raise SandboxError(
                f"the verifier's sandbox has no room for what the agent made: {error.message}",
                remedy="free some space, also with rl-harness sandbox prune, or raise [environment] storage_mb",
            ) from None
        by_mode: dict[int, list[str]] = {}
        for inside, mode in reversed(item.modes.items()):  # what is in a folder before the folder
            path = f"{item.artifact.source}/{inside}" if inside else item.artifact.source
            by_mode.setdefault(mode, []).append(fresh.native_path(path))
        for mode, paths in by_mode.items():
            names = b"\0".join(os.fsencode(path) for path in paths)
            await _must(fresh, ["xargs", "-0", "chmod", "--", f"{mode:o}"], names, "set permissions")


async def _must(fresh: Sandbox, argv: list[str], stdin: bytes, what: str) -> None:
    result = await fresh.exec(argv, cwd="/", stdin=stdin)
    if not result.ok:
        said = (result.stdout + result.stderr)[-300:].decode("utf-8", "replace").strip()
        raise SandboxError(f"cannot {what} in the verifier's sandbox: {said}")


def _examine(item: Carried, root: Path) -> None:
    """Drop what the artifact excludes, measure the rest, and make it readable for its owner."""
    try:
        info = root.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISLNK(info.st_mode):
        return  # a link in place of the artifact would be followed when it is uploaded: as good as absent
    item.path = root
    _widen(item, "", info, str(root), None)
    if stat.S_ISREG(info.st_mode):
        item.size = info.st_size
        return
    for path, folders, files, directory in os.fwalk(root):
        within = Path(path).relative_to(root)
        if len(within.parts) > MAX_DEPTH:
            raise UnsafeFiles(f"{item.artifact.source}: more than {MAX_DEPTH} directories within each other")
        for name in [*folders, *files]:
            inside = (within / name).as_posix()
            info = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if any(fnmatch.fnmatch(inside, rule) or fnmatch.fnmatch(name, rule) for rule in item.artifact.exclude):
                if stat.S_ISDIR(info.st_mode):
                    folders.remove(name)
                    remove_tree(root / inside)
                else:
                    os.unlink(name, dir_fd=directory)
                continue
            if stat.S_ISREG(info.st_mode):
                item.size += info.st_size
            if not stat.S_ISLNK(info.st_mode):
                _widen(item, inside, info, name, directory)


def _widen(item: Carried, inside: str, info: os.stat_result, name: str, directory: int | None) -> None:
    needed = 0o700 if stat.S_ISDIR(info.st_mode) else 0o400
    mode = stat.S_IMODE(info.st_mode)
    if os.geteuid() != 0 and mode & needed != needed:
        os.chmod(name, mode | needed, dir_fd=directory)
        item.modes[inside] = mode


def remove_tree(path: Path) -> None:
    """Remove a folder of ours, whatever is in it."""
    try:
        shutil.rmtree(path)
    except (OSError, RecursionError):
        # Closed folders, or more levels than Python's own removal can follow.
        for command in ("chmod -R u+rwX", "rm -rf"):
            subprocess.run([*command.split(), "--", str(path)], check=False, capture_output=True)
