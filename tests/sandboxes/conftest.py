"""Providers under test, each with a state folder of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rl_harness.contracts import SandboxProvider
from rl_harness.plugins import load_registry
from rl_harness.sandboxes.local import LocalProvider
from rl_harness.sandboxes.process import ProcessProvider


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
async def copying(tmp_path: Path) -> AsyncIterator[SandboxProvider]:
    """Processes in a folder, whose snapshots are copies of it: the example of a provider in one file."""
    example = Path(__file__).parents[2] / "examples/copying_sandbox.py"
    provider = load_registry([example]).create("sandboxes", "copying", {"state_dir": tmp_path / "state"})
    assert isinstance(provider, SandboxProvider)
    yield provider
    await provider.close()
