from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from rl_harness.contracts import AgentTask, Endpoint, ExecResult, HarnessContext, Process, Sandbox


class DirectorySandbox(Sandbox):
    """Runs commands in a directory of this machine."""

    id = "directory"

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "app").mkdir()

    def _path(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    async def exec(self, command, *, cwd=None, env=None, user=None, stdin=b"", timeout=None, output_limit=1 << 20):
        argv = ["bash", "-c", command] if isinstance(command, str) else list(command)
        argv = [str(self._path(a)) if a.startswith("/solution") else a for a in argv]
        process = await asyncio.create_subprocess_exec(
            *argv,
            cwd=self._path(cwd or "/app"),
            env={**os.environ, **(env or {})},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        collect = asyncio.ensure_future(process.communicate())
        timed_out = False
        try:
            await asyncio.wait_for(asyncio.shield(collect), timeout)
        except TimeoutError:
            timed_out = True
            os.killpg(process.pid, signal.SIGKILL)
        out, err = await collect
        code = process.returncode if process.returncode >= 0 else 128 - process.returncode
        return ExecResult(
            exit_code=code,
            signal=-process.returncode if process.returncode < 0 else None,
            stdout=out[:output_limit],
            stderr=err,
            timed_out=timed_out,
            stdout_truncated=len(out) > output_limit,
        )

    async def spawn(self, command, *, cwd=None, env=None, user=None) -> Process:
        raise NotImplementedError

    async def write_file(self, path, data, *, mode=0o644):
        self._path(path).write_bytes(data)

    async def read_file(self, path, *, limit=None):
        return self._path(path).read_bytes()

    async def upload(self, source, target):
        shutil.copytree(source, self._path(target))

    async def download(self, source, target):
        raise NotImplementedError

    async def kill_processes(self):
        raise NotImplementedError

    async def alive(self):
        return True

    async def close(self):
        pass


@asynccontextmanager
async def open_sandbox() -> AsyncIterator[Sandbox]:
    with tempfile.TemporaryDirectory() as root:
        yield DirectorySandbox(Path(root))


@pytest.fixture(scope="session")
def new_sandbox() -> Callable[[], AbstractAsyncContextManager[Sandbox]]:
    return open_sandbox


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    async with open_sandbox() as opened:
        yield opened


@pytest.fixture
def events() -> list[tuple[str, Mapping[str, Any]]]:
    return []


@pytest.fixture
def make_context(events) -> Callable[..., HarnessContext]:
    def make(
        endpoint: Endpoint | None = None,
        sandbox: Sandbox | None = None,
        *,
        seconds: float = 30.0,
        solution: Path | None = None,
        solution_env: Mapping[str, str] | None = None,
        **task: Any,
    ) -> HarnessContext:
        values: dict[str, Any] = {"name": "task", "instruction": "Do it.", "time_limit": seconds, **task}
        return HarnessContext(
            task=AgentTask(**values),
            sandbox=sandbox,
            endpoint=endpoint,
            deadline=time.monotonic() + seconds,
            solution=solution,
            solution_env=solution_env or {},
            on_event=lambda kind, data: events.append((kind, data)),
        )

    return make
