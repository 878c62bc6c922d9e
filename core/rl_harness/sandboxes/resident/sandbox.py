"""The agent's view of a sandbox whose own ``exec`` is slow: its commands go through a resident helper, no more."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from rl_harness.contracts.sandbox import DEFAULT_OUTPUT_LIMIT, Command, ExecResult, Process, Sandbox
from rl_harness.sandboxes.resident.resident import Resident


class ResidentSandbox(Sandbox):
    """``inner`` with ``exec`` and ``spawn`` through a helper inside. For an agent only: what a command answers here
    can be forged by the agent. Closing it closes ``inner``."""

    def __init__(self, inner: Sandbox, resident: Resident) -> None:
        self.id = inner.id
        self.inner = inner
        self.resident = resident
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, inner: Sandbox) -> ResidentSandbox:
        return cls(inner, await Resident.start(inner))

    async def exec(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bytes = b"",
        timeout: float | None = None,
        output_limit: int = DEFAULT_OUTPUT_LIMIT,
    ) -> ExecResult:
        return await self.resident.exec(
            command, cwd=cwd, env=env, user=user, stdin=stdin, timeout=timeout, output_limit=output_limit
        )

    async def spawn(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> Process:
        return await self.resident.spawn(command, cwd=cwd, env=env, user=user)

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        await self.inner.write_file(path, data, mode=mode)

    async def read_file(self, path: str, *, limit: int | None = None) -> bytes:
        return await self.inner.read_file(path, limit=limit)

    async def upload(self, source: Path, target: str) -> None:
        await self.inner.upload(source, target)

    async def download(
        self, source: str, target: Path, *, limit: int | None = None, skip_unsafe: bool = False
    ) -> list[str]:
        return await self.inner.download(source, target, limit=limit, skip_unsafe=skip_unsafe)

    async def kill_processes(self) -> None:
        """The helper is among them; another is started for the next command."""
        await self.resident.kill_processes()

    def native_path(self, path: str) -> str:
        return self.inner.native_path(path)

    async def changes(self) -> list[str]:
        return await self.inner.changes()

    async def snapshot(self, *, key: str = "", labels: Mapping[str, str] | None = None) -> str:
        return await self.inner.snapshot(key=key, labels=labels)

    async def fork(self, count: int) -> list[Sandbox]:
        return await self.inner.fork(count)

    async def pause(self) -> None:
        await self.inner.pause()

    async def resume(self) -> None:
        await self.inner.resume()

    async def died(self) -> str:
        return await self.inner.died()

    async def alive(self) -> bool:
        return await self.inner.alive()

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            await self.resident.close()
        finally:
            await self.inner.close()
