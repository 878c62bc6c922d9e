"""A sandbox seen through a helper keeps the contract of commands and streams: the kit that plugin authors run."""

from __future__ import annotations

from pathlib import Path

import pytest
from rl_harness.contracts.sandbox import SandboxProvider
from rl_harness.testing.sandbox import CHECKS, Check, commands, streams

pytestmark = pytest.mark.needs("userns")

#: Beside what goes through the helper: what ends it, or must work beside it.
MORE = {"a_closed_sandbox_says_so", "closing_ends_running_commands", "cancelling_close_still_closes"}
THROUGH = [check for check in CHECKS if check in (*commands.checks, *streams.checks) or check.name in MORE]


@pytest.mark.parametrize("check", THROUGH, ids=str)
async def test_local(check: Check, resident: SandboxProvider, tmp_path: Path) -> None:
    if reason := check.inapplicable(resident.capabilities):
        pytest.skip(reason)
    folder = tmp_path / "host"
    folder.mkdir()
    await check.run(resident, folder)
