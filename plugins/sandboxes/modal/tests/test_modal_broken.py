"""An agent that breaks the programs of its machine is graded, on the files that it left or by the rules for none."""

from __future__ import annotations

import pytest
from rl_harness.sandboxes.remote import RemoteSandbox
from rl_harness.sandboxes.remote import sandbox as remote
from rl_harness.testing.broken import BROKEN, graded_after_breaking
from rl_harness_modal import sandbox as module
from rl_harness_modal.provider import ModalProvider

pytestmark = [pytest.mark.needs("root", "userns", "modal"), pytest.mark.long]


@pytest.mark.parametrize(("program", "how"), BROKEN)
async def test_an_agent_that_broke_programs_is_graded(
    provider: ModalProvider, program: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RemoteSandbox, "patience", 1.0)  # for what never comes
    for where in (remote, module):
        monkeypatch.setattr(where, "_KILL_SECONDS", 3.0)
    for name in ("_SILENCE", "_DYING_SECONDS"):
        monkeypatch.setattr(remote, name, 1.0)
    idle, done = await graded_after_breaking(provider, program, how)
    assert (idle.reward, idle.unscored) == (0.0, None), idle
    assert done.unscored is None, done
