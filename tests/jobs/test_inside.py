"""An agent that runs inside a sandbox without network is evaluated from the command line, its model calls relayed."""

from __future__ import annotations

from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "inside_harness.py"


@pytest.mark.needs("userns")
def test_an_agent_inside_reaches_its_model_without_a_network(world) -> None:
    task = world.directory / "tasks" / "colour"
    (task / "environment" / "workspace").mkdir(parents=True)
    (task / "environment" / "workspace" / "readme.txt").write_text("nothing\n")
    (task / "instruction.md").write_text("Which colour is the sky?")
    (task / "task.toml").write_text('schema_version = "1.4"\n\n[environment]\nnetwork_mode = "no-network"\n')
    (task / "tests").mkdir()
    (task / "tests" / "test.sh").write_text(
        "grep -qx blue /app/answer.txt && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n"
    )
    rule = "engine.rules=[{match = 'Which colour', reply = 'blue'}]"
    arguments = ("run", "tasks/colour", *world.scripted, "-p", str(EXAMPLE), "--harness", "inside", "-o", rule)
    report = world.json(*arguments, "--sandbox", "local")
    summary = report["evaluations"][0]["summary"]
    assert (summary["scored"], summary["passed"], summary["unscored"]) == (1, 1, {}), world.stderr
