"""The provider passes the kit, through the real SDK, against the stand-in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rl_harness.contracts.sandbox import Sandbox
from rl_harness.testing.sandbox import BROKEN_CHECKS, CHECKS, Check, Rig
from rl_harness_e2b.provider import E2BProvider

pytestmark = [pytest.mark.needs("root", "userns", "e2b"), pytest.mark.long]


@pytest.mark.parametrize("check", [*CHECKS, *BROKEN_CHECKS], ids=str)
async def test_e2b(check: Check, provider: E2BProvider, stand_in, listeners: dict[str, Any], tmp_path: Path) -> None:
    async def crash(sandbox: Sandbox) -> None:
        stand_in.ask("end", sandbox=sandbox.id)

    async def disk(size: int | None) -> None:
        stand_in.ask("disk", size=size)

    rig = Rig(options=E2BProvider.Options(patience=20), crash=crash, disk=disk, **listeners)
    if reason := check.inapplicable(provider.capabilities, rig):
        pytest.skip(reason)
    folder = tmp_path / "host"
    folder.mkdir()
    await check.run(provider, folder, rig)
