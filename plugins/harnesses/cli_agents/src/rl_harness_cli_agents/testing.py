"""For the tests of agents: a run of the command line with a real gateway and sandbox, and a model that is scripted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
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

#: By agent: the tool with which it runs a command, the name of the argument, and what else it wants to be told.
_TOOLS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "claude-code": ("Bash", "command", {"description": "Write the answer"}),
    "codex": ("exec_command", "cmd", {}),
    "opencode": ("bash", "command", {"description": "Write the answer"}),
    "qwen-code": ("run_shell_command", "command", {"is_background": False}),
    "pi": ("bash", "command", {}),
    "mini-swe-agent": ("bash", "command", {}),
    "nanobot": ("exec", "command", {}),
    "openclaw": ("exec", "command", {}),
}
TASK_TOML = 'schema_version = "1.4"\n[environment]\nnetwork_mode = "no-network"\n[agent]\ntimeout_sec = 240\n'
_JOB = {
    "instruction.md": INSTRUCTION,
    "task.toml": TASK_TOML,
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


def running(agent: str, command: str) -> str:
    """What a model says that wants a command run in ``/app`` by one of the agents that have tools."""
    tool, argument, more = _TOOLS[agent]
    return tool_call(tool, {argument: f"cd /app && {command}", **more})


def write_number(agent: str) -> str:
    """What a model says that solves the task of :class:`ScriptedRun`."""
    return running(agent, COMMAND)


def ending(agent: str) -> str:
    """What a model says that is done."""
    return running(agent, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT") if agent == "mini-swe-agent" else "It is done."


class ScriptedRun:
    """``rl-harness run`` as a process, on one task whose verifier wants 36 in ``answer.txt`` and nothing else left, or
    on ``tasks``: files by task."""

    def __init__(
        self, directory: Path, tasks: Mapping[str, Mapping[str, str]] = MappingProxyType({"job": _JOB})
    ) -> None:
        self.directory = directory
        self.model = write_tokenizer(directory / "tiny")
        self.tasks = [directory / "tasks" / task for task in tasks]
        for task, files in zip(self.tasks, tasks.values(), strict=True):
            for name, text in files.items():
                path = task / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)

    def run(
        self, harness: str, rules: Sequence[tuple[str, str]], *options: str, exit_code: int = 0, seconds: float = 290
    ) -> Any:
        """The summary of an evaluation. ``rules``: a pattern of the prompt, and what the model then says."""
        report = self.report(harness, rules, *options, exit_code=exit_code, seconds=seconds)
        return report["evaluations"][0]["summary"]

    def report(
        self,
        harness: str,
        rules: Sequence[tuple[str, str]],
        *options: str,
        sandbox: str = "local",
        env: Mapping[str, str] = MappingProxyType({}),
        exit_code: int = 0,
        seconds: float = 290,
    ) -> Any:
        """All that the run says."""
        said = ", ".join(f"{{match = {json.dumps(match)}, reply = {json.dumps(reply)}}}" for match, reply in rules)
        model = ["-p", str(SCRIPTED_PLUGIN), "--engine", "scripted", "-o", f"engine.rules=[{said}]"]
        arguments = ["--harness", harness, "--sandbox", sandbox, *model, *options]
        return self.command(*arguments, env=env, exit_code=exit_code, seconds=seconds)

    def command(
        self,
        *options: str,
        env: Mapping[str, str] = MappingProxyType({}),
        exit_code: int = 0,
        seconds: float = 290,
    ) -> Any:
        """What a run of the tasks with the model says, with these options on its command line."""
        arguments = ["run", *map(str, self.tasks), "--json", "--model", str(self.model), *options]
        done = subprocess.run(
            [sys.executable, "-m", "rl_harness", *arguments],
            cwd=self.directory,
            env={**os.environ, "RL_HARNESS_RETRIES": "0", **env},
            capture_output=True,
            timeout=seconds,
            check=False,
        )
        if done.returncode != exit_code:
            raise AssertionError(f"{done.stdout.decode()}\n{done.stderr.decode()}")
        return json.loads(done.stdout)

    def said(self, task: str = "job", name: str | None = None) -> str:
        """What the attempt at a task left in its record, in the only run or in that of a name."""
        (run,) = (
            path.name for path in (self.directory / "runs").iterdir() if path.is_dir() and name in (None, path.name)
        )
        done = subprocess.run(
            [sys.executable, "-m", "rl_harness", "runs", "show", run, "--task", task],
            cwd=self.directory,
            capture_output=True,
            check=False,
        )
        return (done.stdout + done.stderr).decode()
