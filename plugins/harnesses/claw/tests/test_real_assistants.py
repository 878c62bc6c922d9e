"""Real assistants, unmodified: each through the gateway and the local sandbox, on a task whose verifier must pass."""

from __future__ import annotations

import pytest
from rl_harness_cli_agents.testing import COMMAND, DONE, ScriptedRun, tool_call

pytestmark = [pytest.mark.needs("userns"), pytest.mark.long, pytest.mark.timeout(300)]

#: In their own workspaces unless they go elsewhere.
CALL = tool_call("exec", {"command": f"cd /app && {COMMAND}"})


@pytest.mark.parametrize(
    "assistant", [pytest.param(name, marks=pytest.mark.needs(name)) for name in ("nanobot", "openclaw")]
)
def test_an_assistant_solves_a_task_and_keeps_its_own_files_elsewhere(assistant: str, scripted: ScriptedRun) -> None:
    summary = scripted.run(assistant, [(DONE, "The number is written."), ("Write the number 36", CALL)])
    assert (summary["passed"], summary["unscored"], summary["flags"]) == (1, {}, {}), scripted.said()
    assert (summary["terminations"], summary["turns"]) == ({"answer": 1}, 2), scripted.said()
