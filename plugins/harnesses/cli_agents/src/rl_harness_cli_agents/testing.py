"""For the tests of agents: a run of the command line with a real gateway and sandbox, and a model that is scripted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_harness.testing import SCRIPTED_PLUGIN, write_tokenizer

#: What the task asks for, with characters that a shell or a parser of arguments could trip over.
INSTRUCTION = (
    "-- Write the number 36 to \"answer.txt\".\n\nIts name is 'answer.txt'; $HOME and `pwd` stay as they are.\n"
)
#: A command that does it.
COMMAND = "echo 36 > answer.txt && echo it is writ''ten"
#: What that prints, which is not found in the command itself.
DONE = "it is written"

_TASK = {
    "instruction.md": INSTRUCTION,
    "task.toml": 'schema_version = "1.4"\n[environment]\nnetwork_mode = "no-network"\n[agent]\ntimeout_sec = 240\n',
    "environment/workspace/readme.txt": "The answer belongs beside this file.\n",
    # Nothing but the answer may have been left.
    "tests/test.sh": """\
left="$(ls -A /app | tr '\\n' ' ')"
echo "left: $left"
if [ "$left" = "answer.txt readme.txt " ] && grep -qx 36 /app/answer.txt; then reward=1; else reward=0; fi
echo $reward > /logs/verifier/reward.txt
""",
}


def tool_call(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as a model writes it that the ChatML renderer understands."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class ScriptedRun:
    """``rl-harness run`` as a process, on one task whose verifier wants 36 in ``answer.txt`` and nothing else left."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model = write_tokenizer(directory / "tiny")
        self.task = directory / "tasks" / "job"
        for name, text in _TASK.items():
            path = self.task / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def run(
        self, harness: str, rules: Sequence[tuple[str, str]], *options: str, exit_code: int = 0, seconds: float = 290
    ) -> Any:
        """The summary of an evaluation. ``rules``: a pattern of the prompt, and what the model then says."""
        said = ", ".join(f"{{match = {json.dumps(match)}, reply = {json.dumps(reply)}}}" for match, reply in rules)
        arguments = ["run", str(self.task), "--harness", harness, "--sandbox", "local", "--json"]
        arguments += ["-p", str(SCRIPTED_PLUGIN), "--engine", "scripted", "--model", str(self.model)]
        done = subprocess.run(
            [sys.executable, "-m", "rl_harness", *arguments, "-o", f"engine.rules=[{said}]", *options],
            cwd=self.directory,
            env={**os.environ, "RL_HARNESS_RETRIES": "0"},
            capture_output=True,
            timeout=seconds,
            check=False,
        )
        if done.returncode != exit_code:
            raise AssertionError(f"{done.stdout.decode()}\n{done.stderr.decode()}")
        return json.loads(done.stdout)["evaluations"][0]["summary"]

    def said(self) -> str:
        """What the attempt left in its record, to be read when a test fails."""
        (run,) = (path.name for path in (self.directory / "runs").iterdir() if path.is_dir())
        done = subprocess.run(
            [sys.executable, "-m", "rl_harness", "runs", "show", run, "--task", "job"],
            cwd=self.directory,
            capture_output=True,
            check=False,
        )
        return (done.stdout + done.stderr).decode()[-8000:]
