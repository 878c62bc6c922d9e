"""Agents installed once on this machine, for all runs: each in a folder of its own that is there whole or not at all.

Invariants: a folder appears under its final name only when its installation has succeeded, and is never changed after;
of any number of processes that want one at the same time, one installs it and the others wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import MappingProxyType

from rl_harness.errors import Unavailable

_log = logging.getLogger(__name__)

_TIMEOUT = 900.0
_LOOK = 0.2
_KEPT_OUTPUT = 2000


def agents_folder() -> Path:
    """``$XDG_CACHE_HOME/rl-harness/agents``, in ``~/.cache`` unless the variable says otherwise."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "rl-harness" / "agents"


async def install(folder: Path, script: str, env: Mapping[str, str] = MappingProxyType({})) -> None:
    """Have ``folder`` made by a shell script that fills ``$PREFIX``, with ``env`` on top of this process's variables.
    Raises ``Unavailable`` with what that said."""
    if _is_there(folder):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    async with _alone(folder.with_name(f".{folder.name}.lock")):
        if _is_there(folder):
            return
        _log.info("installing %s", folder.name)
        partial = folder.with_name(f".{folder.name}.partial")
        await asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True)
        partial.mkdir()
        try:
            with tempfile.TemporaryDirectory(prefix="rl-harness-") as downloads:
                await _run(script, partial, downloads, folder.name, env)
            await asyncio.to_thread(_make_readable, partial)
            partial.rename(folder)
        finally:
            await asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True)


def _is_there(folder: Path) -> bool:
    return folder.is_dir()


@contextlib.asynccontextmanager
async def _alone(path: Path) -> AsyncIterator[None]:
    """Hold the lock, which ends with this process at the latest."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(_LOOK)
        yield
    finally:
        os.close(descriptor)


async def _run(script: str, prefix: Path, downloads: str, name: str, env: Mapping[str, str]) -> None:
    process = await asyncio.create_subprocess_exec(
        "/bin/sh",
        "-euc",
        f"umask 022\n{script}",
        cwd=prefix,
        env={
            **os.environ,
            **env,
            "PREFIX": str(prefix),
            # What is downloaded is of no use a second time, and is as large as what is installed.
            "npm_config_cache": downloads,
            "PIP_NO_CACHE_DIR": "1",
        },
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(_TIMEOUT):
            output, _ = await process.communicate()
    except TimeoutError:
        raise Unavailable(f"installing {name} did not end within {_TIMEOUT:g} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode:
        said = output.decode("utf-8", "replace").strip()[-_KEPT_OUTPUT:]
        raise Unavailable(
            f"{name} cannot be installed; its installation failed with exit code {process.returncode}:\n{said}",
            remedy="installing needs the network once; harness.version chooses another version",
        )


def _make_readable(folder: Path) -> None:
    """The sandbox's users are others than this one."""
    for directory, _, files in os.walk(folder):
        path = Path(directory)
        path.chmod(path.stat().st_mode | 0o555)
        for name in files:
            file = path / name
            if not file.is_symlink():
                mode = file.stat().st_mode
                file.chmod(mode | (0o555 if mode & 0o100 else 0o444))
