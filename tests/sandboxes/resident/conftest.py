"""Sandboxes seen through a helper."""

from __future__ import annotations

import builtins
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import ClassVar

import pytest
from rl_harness.contracts.sandbox import (
    Sandbox,
    SandboxCapabilities,
    SandboxInfo,
    SandboxProvider,
    SandboxSpec,
    SnapshotInfo,
)
from rl_harness.sandboxes.local import LocalProvider
from rl_harness.sandboxes.process import ProcessProvider
from rl_harness.sandboxes.resident import ResidentSandbox


class ResidentProvider(SandboxProvider):
    """Sandboxes of ``inner``, each as its agent sees it through a helper."""

    api: ClassVar[int] = 1

    def __init__(self, inner: SandboxProvider) -> None:
        super().__init__(LocalProvider.Options())
        self.inner = inner

    @property
    def capabilities(self) -> SandboxCapabilities:
        return self.inner.capabilities

    async def create(self, spec: SandboxSpec) -> Sandbox:
        sandbox = await self.inner.create(spec)
        try:
            return await ResidentSandbox.start(sandbox)
        except BaseException:
            await sandbox.close()
            raise

    async def list(self, labels: Mapping[str, str] | None = None) -> builtins.list[SandboxInfo]:
        return await self.inner.list(labels)

    async def reap(self, labels: Mapping[str, str] | None = None, *, force: bool = False) -> int:
        return await self.inner.reap(labels, force=force)

    async def snapshots(self, labels: Mapping[str, str] | None = None) -> builtins.list[SnapshotInfo]:
        return await self.inner.snapshots(labels)

    async def delete_snapshot(self, snapshot: str) -> None:
        await self.inner.delete_snapshot(snapshot)

    async def close(self) -> None:
        await self.inner.close()


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[LocalProvider]:
    provider = LocalProvider(LocalProvider.Options(state_dir=tmp_path / "state"))
    yield provider
    await provider.close()


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[ProcessProvider]:
    provider = ProcessProvider(ProcessProvider.Options(state_dir=tmp_path / "state"))
    yield provider
    await provider.close()


@pytest.fixture
def crash(tmp_path: Path) -> Callable[[Sandbox], None]:
    """Kills a local sandbox's first process, as running out of memory would."""

    def kill(sandbox: Sandbox) -> None:
        os.kill(json.loads((tmp_path / "state" / sandbox.id / "init.json").read_text())["pid"], signal.SIGKILL)

    return kill


@pytest.fixture
def resident(local: LocalProvider) -> ResidentProvider:
    return ResidentProvider(local)
