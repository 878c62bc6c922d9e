"""Real agents, unmodified: each through the gateway and the local sandbox, on a task whose verifier must pass."""

from __future__ import annotations

import pytest
from rl_harness_cli_agents.testing import DONE, ScriptedRun, ending, write_number

pytestmark = [pytest.mark.needs("userns"), pytest.mark.long, pytest.mark.timeout(300)]

#: All that have tools.
AGENTS = ("claude-code", "codex", "opencode", "qwen-code", "pi", "mini-swe-agent")
#: Of each protocol, and of each kind of client.
ENDING = ("claude-code", "codex", "pi", "mini-swe-agent")
FAILING = ("claude-code", "codex")


@pytest.mark.parametrize("agent", [pytest.param(name, marks=pytest.mark.needs(name)) for name in AGENTS])
def test_an_agent_solves_a_task_with_a_tool(agent: str, scripted: ScriptedRun) -> None:
    summary = scripted.run(agent, [(DONE, ending(agent)), ("Write the number 36", write_number(agent))])
    assert (summary["passed"], summary["unscored"], summary["flags"]) == (1, {}, {}), scripted.said()
    # Nothing but the two calls: no titles, no probes.
    assert (summary["terminations"], summary["turns"]) == ({"answer": 1}, 2), scripted.said()


@pytest.mark.parametrize("agent", [pytest.param(name, marks=pytest.mark.needs(name)) for name in ENDING])
def test_an_agent_ends_when_its_turns_are_used_up(agent: str, scripted: ScriptedRun) -> None:
    summary = scripted.run(agent, [("Write the number 36", write_number(agent))], "--max-turns", "1")
    assert (summary["terminations"], summary["turns"], summary["passed"]) == ({"turn_limit": 1}, 1, 1), scripted.said()
    assert summary["seconds"]["agent"] < 200, "it tried again until its time was over"


@pytest.mark.parametrize("agent", [pytest.param(name, marks=pytest.mark.needs(name)) for name in FAILING])
def test_an_agent_whose_model_fails_is_not_graded(agent: str, scripted: ScriptedRun) -> None:
    summary = scripted.run(agent, [("said by nobody", "")], exit_code=1)
    assert (summary["scored"], summary["unscored"]) == (0, {"engine_error": 1}), scripted.said()


EDIT = """I write the file.

answer.txt
```
<<<<<<< SEARCH
=======
36
>>>>>>> REPLACE
```
"""


@pytest.mark.needs("aider")
def test_aider_solves_it_by_an_edit(scripted: ScriptedRun) -> None:
    summary = scripted.run("aider", [("Write the number 36", EDIT)])
    assert (summary["passed"], summary["unscored"], summary["flags"]) == (1, {}, {}), scripted.said()
    assert (summary["terminations"], summary["turns"]) == ({"answer": 1}, 1), scripted.said()


@pytest.mark.needs("aider")
def test_aider_that_edits_wrongly_gets_nothing_for_its_exit_code(scripted: ScriptedRun) -> None:
    summary = scripted.run("aider", [("Write the number 36", EDIT.replace("36", "37"))])
    assert (summary["reward_mean"], summary["terminations"]) == (0.0, {"answer": 1}), scripted.said()
