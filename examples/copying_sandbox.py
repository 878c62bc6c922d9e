"""A sandbox plugin in one file: plain processes in a folder, with snapshots that are copies of that folder.

    rl-harness run TASK -p examples/copying_sandbox.py --sandbox copying

It isolates NOTHING: agents, graders and a task's set-up run as you on this machine, with all of its files. Tasks with a
set-up are therefore refused unless you add ``-o snapshots.allow_unisolated=true``.

It shows what a provider gives so that the core can prepare environments once: ``snapshot``, ``snapshots``,
``delete_snapshot``, and ``create`` from a snapshot's id. Set-up steps, keys, reuse and the pool are the core's.
"""

from __future__ import annotations

import asyncio
import builtins
import json
import os
import secrets
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
from rl_harness.contracts import (
    Sandbox,
    SandboxCapabilities,
    SandboxInfo,
    SandboxSpec,
    SnapshotInfo,
    SnapshotLevel,
)
from rl_harness.errors import SandboxError
from rl_harness.hookspecs import Extension, hookimpl
from rl_harness.sandboxes.process import ProcessProvider, ProcessSandbox
from rl_harness.sandboxes.processes import process_start


@hookimpl
def rl_harness_sandboxes() -> list[Extension]:
    return [Extension("copying", f"{__name__}:CopyingProvider", "plain processes whose snapshots are copied folders")]


class CopyingSandbox(ProcessSandbox):
    async def snapshot(self, *, key: str = "", labels: Mapping[str, str] | None = None) -> str:
        self.check_open()
        state = self.folder.parent
        name = f"snapshot-{secrets.token_hex(8)}"
        # Under another name until it is whole; the name tells whose it is, so that a dead owner's can be removed.
        half = state / f"half-made-{os.getpid()}-{name}"
        record = {"key": key, "labels": dict(labels or {}), "created_at": time.time()}
        try:
            await asyncio.to_thread(shutil.copytree, self.root, half / "root", symlinks=True)
            (half / "snapshot.json").write_text(json.dumps(record))
            half.rename(state / name)
        except BaseException as error:
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, half, ignore_errors=True))
            if isinstance(error, OSError):
                raise SandboxError(f"sandbox {self.id} cannot be copied: {error}") from None
            raise
        return name


class CopyingProvider(ProcessProvider):
    @property
    def sandbox_class(self) -> type[ProcessSandbox]:
        return CopyingSandbox

    @property
    def capabilities(self) -> SandboxCapabilities:
        return msgspec.structs.replace(super().capabilities, snapshot=SnapshotLevel.FILESYSTEM)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        if spec.snapshot is None:
            return await super().create(spec)
        source = self.state / spec.snapshot / "root"
        if not source.is_dir():
            raise SandboxError(f"there is no snapshot {spec.snapshot}")
        bare = msgspec.structs.replace(spec.environment, directory=None)
        sandbox = await super().create(msgspec.structs.replace(spec, snapshot=None, environment=bare))
        assert isinstance(sandbox, CopyingSandbox)
        try:
            (sandbox.folder / "started-from").write_text(spec.snapshot)
            await asyncio.to_thread(shutil.copytree, source, sandbox.root, symlinks=True, dirs_exist_ok=True)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def list(self, labels: Mapping[str, str] | None = None) -> builtins.list[SandboxInfo]:
        return [
            msgspec.structs.replace(info, provider="copying", snapshot=_read(self.state / info.id / "started-from"))
            for info in await super().list(labels)
        ]

    async def snapshots(self, labels: Mapping[str, str] | None = None) -> builtins.list[SnapshotInfo]:
        found = []
        for path in sorted(self.state.glob("snapshot-*/snapshot.json")):
            text = _read(path)
            if text is None:
                continue  # deleted since it was listed
            record = json.loads(text)
            if (labels or {}).items() <= record["labels"].items():
                found.append(SnapshotInfo(id=path.parent.name, provider="copying", **record))
        return found

    async def delete_snapshot(self, snapshot: str) -> None:
        # Renamed first: from then on it is not a snapshot, however far the removal gets.
        gone = self.state / f"half-made-0-{snapshot}"
        try:
            (self.state / snapshot).rename(gone)
        except FileNotFoundError:
            return
        await asyncio.to_thread(shutil.rmtree, gone)

    async def reap(self, labels: Mapping[str, str] | None = None, *, force: bool = False) -> int:
        count = await super().reap(labels, force=force)
        for path in self.state.glob("half-made-*"):
            owner = int(path.name.split("-")[2])
            if process_start(owner) is None:
                await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
                count += 1
        return count


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except FileNotFoundError:
        return None
