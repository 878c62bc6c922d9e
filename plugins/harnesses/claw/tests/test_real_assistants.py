"""Real assistants, unmodified: each through the gateway and the local sandbox, on a task whose verifier must pass."""

from __future__ import annotations

import pytest
from rl_harness_cli_agents.testing import DONE, ScriptedRun, ending, write_number

pytestmark = [pytest.mark.needs("userns"), pytest.mark.long, pytest.mark.timeout(300)]

ASSISTANTS = [pytest.param(name, marks=pytest.mark.needs(name)) for name in ("nanobot", "openclaw")]


@pytest.mark.parametrize("assistant", ASSISTANTS)
def test_an_assistant_solves_a_task_and_keeps_its_own_files_elsewhere(assistant: str, scripted: ScriptedRun) -> None:
    rules = [(DONE, ending(assistant)), ("Write the number 36", write_number(assistant))]
    summary = scripted.run(assistant, rules)
    assert (summary["passed"], summary["unscored"], summary["flags"]) == (1, {}, {}), scripted.said()
    assert (summary["terminations"], summary["turns"]) == ({"answer": 1}, 2), scripted.said()
