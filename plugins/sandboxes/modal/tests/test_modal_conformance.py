"""The provider passes the kit, through the real SDK, against the stand-in."""

from __future__ import annotations

from pathlib import Path

import pytest
from rl_harness.testing.sandbox import CHECKS, Check
from rl_harness_modal.provider import ModalProvider

pytestmark = pytest.mark.needs("root", "userns", "modal")


@pytest.mark.parametrize("check", CHECKS, ids=str)
async def test_modal(check: Check, provider: ModalProvider, tmp_path: Path) -> None:
    if reason := check.inapplicable(provider.capabilities):
        pytest.skip(reason)
    folder = tmp_path / "host"
    folder.mkdir()
    await check.run(provider, folder)
