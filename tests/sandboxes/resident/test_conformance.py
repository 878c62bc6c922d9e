"""A sandbox seen through a helper keeps the contract: the kit that plugin authors run."""

from __future__ import annotations

from pathlib import Path

import pytest
from rl_harness.contracts.sandbox import SandboxProvider
from rl_harness.testing.sandbox import CHECKS, Check

pytestmark = pytest.mark.needs("userns")


@pytest.mark.parametrize("check", CHECKS, ids=str)
async def test_local(check: Check, resident: SandboxProvider, tmp_path: Path) -> None:
    if reason := check.inapplicable(resident.capabilities):
        pytest.skip(reason)
    folder = tmp_path / "host"
    folder.mkdir()
    await check.run(resident, folder)
