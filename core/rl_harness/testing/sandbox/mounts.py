"""Checks of directories of this machine that a sandbox is shown."""

from __future__ import annotations

from pathlib import Path

from rl_harness.contracts.sandbox import HostMount, SandboxCapabilities
from rl_harness.errors import SandboxError, Unsupported
from rl_harness.testing.sandbox.kit import (
    Checks,
    Context,
    Rig,
    equal,
    refused,
    succeeded,
    without,
    without_snapshots,
)

checks = Checks()

_TARGET = "/opt/shown/here"


def _has_mounts(capabilities: SandboxCapabilities, _: Rig) -> str | None:
    return "has the capability mounts" if capabilities.mounts else None


def _shown(folder: Path) -> HostMount:
    """A directory that every user may read, with a program in it."""
    source = folder / "shown"
    source.mkdir()
    source.chmod(0o755)
    program = source / "program"
    program.write_text("#!/bin/sh\necho it runs\n")
    program.chmod(0o4755)
    return HostMount(source=source, target=_TARGET)


@checks.check_if(without("mounts"))
async def a_shown_directory_is_read_only(context: Context) -> None:
    mount = _shown(context.folder)
    sandbox = await context.sandbox(mounts=(mount,))
    equal(succeeded(await sandbox.exec([f"{_TARGET}/program"])), b"it runs\n")
    for command in (f"echo x > {_TARGET}/new", f"echo x >> {_TARGET}/program", f"rm -f {_TARGET}/program"):
        assert not (await sandbox.exec(command)).ok, f"it could be changed: {command}"
    equal(sorted(path.name for path in mount.source.iterdir()), ["program"], "what the directory holds")
    options = succeeded(await sandbox.exec(f"grep ' {_TARGET} ' /proc/self/mounts")).split()[3].split(b",")
    assert {b"ro", b"nosuid", b"nodev"} <= set(options), f"it is mounted with {options!r}"


@checks.check_if(without("mounts"))
async def what_the_host_adds_to_a_shown_directory_is_seen(context: Context) -> None:
    mount = _shown(context.folder)
    sandbox = await context.sandbox(mounts=(mount,))
    (mount.source / "later").write_text("more\n")
    (mount.source / "later").chmod(0o644)
    equal(succeeded(await sandbox.exec(["cat", f"{_TARGET}/later"])), b"more\n")


@checks.check_if(without("mounts"), without_snapshots)
async def a_shown_directory_is_in_no_snapshot(context: Context) -> None:
    sandbox = await context.sandbox(mounts=(_shown(context.folder),))
    snapshot = await context.snapshot(sandbox)
    other = await context.sandbox(snapshot=snapshot)
    assert not (await other.exec(["test", "-e", f"{_TARGET}/program"])).ok, "what was shown came along in a snapshot"


@checks.check_if(without("mounts"), without("fork"))
async def a_fork_is_shown_the_same(context: Context) -> None:
    sandbox = await context.sandbox(mounts=(_shown(context.folder),))
    for fork in await sandbox.fork(1):
        context.keep(fork)
        equal(succeeded(await fork.exec([f"{_TARGET}/program"])), b"it runs\n")


@checks.check_if(without("mounts"))
async def showing_what_is_not_there_is_refused(context: Context) -> None:
    missing = HostMount(source=context.folder / "missing", target=_TARGET)
    await refused(context.sandbox(mounts=(missing,)), SandboxError, "a directory that does not exist")


@checks.check_if(_has_mounts)
async def showing_directories_is_refused(context: Context) -> None:
    await refused(context.sandbox(mounts=(_shown(context.folder),)), Unsupported, "a directory to show")
