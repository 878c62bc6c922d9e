"""For the tests of agents: the line that evaluates one, with a trainer."""

from __future__ import annotations

from pathlib import Path

from rl_harness.testing import write_tokenizer

from rl_harness_cli_agents.testing import TASK_TOML, ScriptedRun

#: Tokens of the tokenizer that the model gets.
VOCABULARY = 261
_TASK = {
    "instruction.md": "Say something.\n",
    "task.toml": TASK_TOML,
    # No two attempts alike: whatever the model says, there is something to learn from.
    "tests/test.sh": "echo 0.$(od -An -N3 -tu4 /dev/urandom | tr -d ' ') > /logs/verifier/reward.txt\n",
}


def check_training(directory: Path, model: Path, harness: str, *options: str) -> None:
    """One step on a group of attempts, each of which called the model that the step then changed. ``model`` has
    :data:`VOCABULARY` tokens; its tokenizer is written here."""
    run = ScriptedRun(directory, {"job": _TASK})
    run.model = write_tokenizer(model)
    settings = {
        "training.steps": 1,
        "training.group_size": 3,
        "evaluation.limit": 1,
        "evaluation.greedy": "false",
        "sampling.max_tokens": 8,
        "max_turns": 2,
        "engine.threads": 1,
        "backend.threads": 1,
    }
    chosen = [part for key, value in settings.items() for part in ("-o", f"{key}={value}")]
    report = run.command("--harness", harness, "--sandbox", "local", "--trainer", "grpo", *chosen, *options)
    (step,) = report["training"]
    trained = report["training_episodes"]
    assert (trained["episodes"], trained["scored"], trained["flags"]) == (3, 3, {}), trained
    assert trained["turns"] >= 3, trained
    assert step["grad_norm"] > 0, (step, report["notes"])
    assert step["logp_gap"] < 1e-3, step
