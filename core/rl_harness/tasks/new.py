"""Writes a small working task to start from."""

from __future__ import annotations

import re
from pathlib import Path

from rl_harness.errors import TaskError

_FILES = {
    "instruction.md": """\
The file `names.txt` has one name a line. Write the number of lines in it to `count.txt`.
""",
    "task.toml": """\
schema_version = "1.4"

[metadata]
difficulty = "easy"

[agent]
timeout_sec = 300          # what the agent gets, and is told

[verifier]
timeout_sec = 60

[environment]
network_mode = "no-network"
# docker_image, cpus, memory_mb, storage_mb, workdir, env: what the sandbox is made of.
# environment/workspace/ is copied into the working directory, /app; then environment/setup.sh, if there is one, runs
# there once to install what the task needs, and every attempt starts from the result.

[rl_harness]
verifier = "separate"      # graded in a fresh sandbox that gets /app (or `artifacts`) from the agent's
# max_turns = 20
""",
    "environment/workspace/names.txt": "Ada\nGrace\nEdsger\n",
    "tests/test.sh": """\
#!/bin/bash
# Grades the attempt, in its working directory: writes one number to reward.txt, or named numbers to reward.json.
# The agent never saw this directory; it is in /tests only now.
reward=0
if [ -f count.txt ] && [ ! -L count.txt ] && [ "$(tr -d '[:space:]' < count.txt)" = 3 ]; then
    reward=1
fi
# /logs/verifier, except in a sandbox without a root of its own.
echo "$reward" > "${RL_HARNESS_LOGS:-/logs/verifier}/reward.txt"
""",
    "solution/solve.sh": """\
#!/bin/bash
# Shows that the task can be done: `rl-harness tasks check` runs it and expects a reward of 1.
wc -l < names.txt > count.txt
""",
}


def new_task(directory: Path, name: str | None = None) -> Path:
    """Write a task to ``directory``, or to ``directory / name``; it passes ``check`` as it is."""
    target = Path(directory) / name if name else Path(directory)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", target.name):
        raise TaskError(
            f"{target.name!r} is no name for a task", remedy="use letters, digits, dots, hyphens and underscores"
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise TaskError(f"{target}: already exists and is not empty", remedy="choose another name")
    for file, text in _FILES.items():
        path = target / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        if path.suffix == ".sh":
            path.chmod(0o755)
    return target
