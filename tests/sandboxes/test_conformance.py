"""Both built-in providers pass the kit that plugin authors run."""

from __future__ import annotations

from pathlib import Path

import pytest
from rl_harness.sandboxes.local import LocalProvider
from rl_harness.sandboxes.process import ProcessProvider
from rl_harness.testing.sandbox import BROKEN_CHECKS, CHECKS, Check, Rig


@pytest.mark.needs("userns")
@pytest.mark.parametrize("check", [*CHECKS, *BROKEN_CHECKS], ids=str)
async def test_local(check: Check, local: LocalProvider, local_rig: Rig, tmp_path: Path) -> None:
    if reason := check.inapplicable(local.capabilities, local_rig):
        pytest.skip(reason)
    folder = tmp_path / "host"
    folder.mkdir()
    await check.run(local, folder, local_rig)


@pytest.mark.parametrize("check", CHECKS, ids=str)
async def test_process(check: Check, process: ProcessProvider, process_rig: Rig, tmp_path: Path) -> None:
    if reason := check.inapplicable(process.capabilities, process_rig):
        pytest.skip(reason)
    folder = tmp_path / "host"
    folder.mkdir()
    await check.run(process, folder, process_rig)
