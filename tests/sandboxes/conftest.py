"""Providers under test, each with a state folder of its own, and what the kit wants to know of them."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from rl_harness.contracts import SandboxProvider
from rl_harness.contracts.sandbox import Sandbox
from rl_harness.plugins import load_registry
from rl_harness.sandboxes.local import LocalProvider
from rl_harness.sandboxes.process import ProcessProvider
from rl_harness.testing.sandbox import Rig


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[LocalProvider]:
    provider = LocalProvider(LocalProvider.Options(state_dir=tmp_path / "state"))
    yield provider
    await provider.close()


@pytest.fixture
def local_rig(tmp_path: Path) -> Rig:
    state = tmp_path / "state"

    async def crash(sandbox: Sandbox) -> None:
        os.kill(json.loads((state / sandbox.id / "init.json").read_text())["pid"], signal.SIGKILL)

    return Rig(options=LocalProvider.Options(state_dir=state), crash=crash)


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[ProcessProvider]:
    provider = ProcessProvider(ProcessProvider.Options(state_dir=tmp_path / "state"))
    yield provider
    await provider.close()


@pytest.fixture
async def copying(tmp_path: Path) -> AsyncIterator[SandboxProvider]:
    """Processes in a folder, whose snapshots are copies of it: the example of a provider in one file."""
    example = Path(__file__).parents[2] / "examples/copying_sandbox.py"
    provider = load_registry([example]).create("sandboxes", "copying", {"state_dir": tmp_path / "state"})
    assert isinstance(provider, SandboxProvider)
    yield provider
    await provider.close()


@pytest.fixture
def process_rig(tmp_path: Path) -> Iterator[Rig]:
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.2", 0)) as second:
        options = ProcessProvider.Options(state_dir=tmp_path / "state")
        yield Rig(options=options, reachable=first.getsockname(), unlisted=second.getsockname())
