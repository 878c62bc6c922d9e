"""Which episodes of an agent its model learns from: groups whose rewards differ, whatever its calls are like."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from rl_harness.testing import write_tokenizer
from rl_harness_cli_agents.agent import HOME
from rl_harness_cli_agents.testing import TASK_TOML

pytestmark = [
    pytest.mark.needs("userns"),
    pytest.mark.needs("torch"),
    pytest.mark.needs("mini-swe-agent"),
    pytest.mark.long,
    pytest.mark.timeout(400),
]

#: The reward is the share of ASCII letters among what the model said, as the agent's own record of its steps has it.
LETTERS = f"""\
python3 - > /logs/verifier/reward.txt <<'END'
import json
steps = [step.get("extra", {{}}).get("response") for step in json.load(open("{HOME}/trajectory.json"))["messages"]]
said = "".join(step["choices"][0]["message"]["content"] or "" for step in steps if step)
print(sum(c.isascii() and c.isalpha() for c in said) / max(1, len(said)))
END
"""
NOTHING = "echo 0 > /logs/verifier/reward.txt\n"


def write_task(directory: Path, verifier: str) -> Path:
    for name, text in {
        "instruction.md": "Fix the bug.\n",
        "task.toml": TASK_TOML + '[verifier]\nenvironment_mode = "shared"\n',
        "tests/test.sh": verifier,
    }.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


def test_a_model_that_calls_no_tool_rightly_is_trained_behind_an_agent(tmp_path: Path) -> None:
    from rl_harness_torch.testing import tiny_model

    model = write_tokenizer(tiny_model(tmp_path / "model", vocab_size=261, max_position_embeddings=32_768))
    tasks = [write_task(tmp_path / "letters", LETTERS), write_task(tmp_path / "nothing", NOTHING)]
    options = {
        "sampling.max_tokens": 16,
        "training.steps": 1,
        "training.group_size": 3,
        "evaluation.limit": 1,
        "evaluation.greedy": "false",
        "max_turns": 1,
        "engine.threads": 1,
        "backend.threads": 1,
    }
    line = ["run", *map(str, tasks), "--harness", "mini-swe-agent", "--sandbox", "local", "--model", str(model)]
    done = subprocess.run(
        [sys.executable, "-m", "rl_harness", *line, "--trainer", "grpo", "--json"]
        + [part for key, value in options.items() for part in ("-o", f"{key}={value}")],
        cwd=tmp_path,
        env={**os.environ, "RL_HARNESS_RETRIES": "0"},
        capture_output=True,
        timeout=390,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    report = json.loads(done.stdout)
    (step,) = report["training"]
    assert (step["episodes"], step["unscored"]) == (6, 0)
    # Rewards that are all the same say nothing of what was better: that group is counted, and not trained on.
    assert (step["groups"], step["groups_trained"], step["groups_no_signal"]) == (2, 1, 1)
    assert step["tokens_trained"] > 0
    assert step["grad_norm"] > 0
    assert step["logp_gap_max"] < 0.01  # the trainer's log-probs of what was sampled are the engine's
    with sqlite3.connect(next((tmp_path / "runs").glob("*/db.sqlite"))) as db:
        versions = {row[0] for row in db.execute("SELECT policy_version FROM episodes")}
    assert versions == {0, 1}  # the agent of the last evaluation had the new weights
