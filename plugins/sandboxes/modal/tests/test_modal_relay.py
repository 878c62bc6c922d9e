"""The way to the model over this provider's own streams: chunks, many connections, back-pressure, cuts."""

from __future__ import annotations

from pathlib import Path

import pytest
from rl_harness.testing.sandbox import RELAY_CHECKS, Check
from rl_harness_modal.provider import ModalProvider

pytestmark = pytest.mark.needs("userns", "modal")


@pytest.mark.parametrize("check", RELAY_CHECKS, ids=str)
async def test_relay(check: Check, provider: ModalProvider, stand_in, tmp_path: Path) -> None:
    await check.run(provider, tmp_path)
