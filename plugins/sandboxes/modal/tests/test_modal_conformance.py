"""The provider passes the kit, through the real SDK, against the stand-in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rl_harness.contracts.sandbox import Sandbox
from rl_harness.testing.sandbox import BROKEN_CHECKS, CHECKS, Check, Rig
from rl_harness_modal.provider import ModalProvider

pytestmark = [pytest.mark.needs("root", "userns", "modal"), pytest.mark.long]


@pytest.mark.parametrize("check", [*CHECKS, *BROKEN_CHECKS], ids=str)
async def test_modal(check: Check, stand_in, listeners: dict[str, Any], tmp_path: Path) -> None:
    async def crash(sandbox: Sandbox) -> None:
        stand_in.ask("end", sandbox=sandbox.id, status="GENERIC_STATUS_INTERNAL_FAILURE", exitcode=1)

    async def disk(size: int | None) -> None:
        stand_in.ask("disk", size=size)

    options = ModalProvider.Options(patience=20, state_dir=tmp_path / "state")
    rig = Rig(options=options, crash=crash, disk=disk, **listeners)
    provider = ModalProvider(options)
    if reason := check.inapplicable(provider.capabilities, rig):
        pytest.skip(reason)
    folder = tmp_path / "host"
    folder.mkdir()
    try:
        await check.run(provider, folder, rig)
    finally:
        await provider.close()
