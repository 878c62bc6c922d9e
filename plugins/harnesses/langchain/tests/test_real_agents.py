"""The examples of agents made with real frameworks, through the command line, the gateway and the local sandbox, on a
task whose verifier must pass. Their code names no address and no key."""

from __future__ import annotations

from pathlib import Path

import pytest
from rl_harness_cli_agents.testing import COMMAND, DONE, ScriptedRun, tool_call
from rl_harness_cli_agents.testing_training import VOCABULARY, check_training

pytestmark = [pytest.mark.needs("userns"), pytest.mark.long, pytest.mark.timeout(300)]

EXAMPLES = Path(__file__).parents[4] / "examples"
CALL = tool_call("shell", {"command": COMMAND})
FINAL = "The number is written."


@pytest.mark.parametrize(
    ("harness", "last"),
    [
        pytest.param("langchain:langchain_agent:agent", FINAL, marks=pytest.mark.needs("langchain")),
        pytest.param("python:openai_agents", FINAL, marks=pytest.mark.needs("openai-agents")),
        pytest.param(
            "python:smolagents_agent",
            tool_call("final_answer", {"answer": FINAL}),
            marks=pytest.mark.needs("smolagents"),
        ),
    ],
)
def test_an_agent_solves_a_task(harness: str, last: str, scripted: ScriptedRun) -> None:
    rules = [(DONE, last), ("Write the number 36", CALL)]
    summary = scripted.run(harness, rules, "-o", f"harness.path={EXAMPLES}", "-o", "renderer.name=chatml")
    assert (summary["passed"], summary["unscored"], summary["flags"]) == (1, {}, {}), scripted.said()
    assert (summary["terminations"], summary["turns"]) == ({"answer": 1}, 2), scripted.said()


@pytest.mark.needs("torch")
@pytest.mark.parametrize(
    "harness",
    [
        pytest.param("langchain:langchain_agent:agent", marks=pytest.mark.needs("langchain")),
        pytest.param("python:openai_agents", marks=pytest.mark.needs("openai-agents")),
    ],
)
def test_the_model_behind_an_agent_is_trained(harness: str, tmp_path: Path) -> None:
    from rl_harness_torch.testing import tiny_model

    model = tiny_model(tmp_path / "model", vocab_size=VOCABULARY, max_position_embeddings=32768)
    check_training(tmp_path, model, harness, "-o", f"harness.path={EXAMPLES}")
