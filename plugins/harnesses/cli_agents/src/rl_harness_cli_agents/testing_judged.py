"""For the tests of real agents: whatever becomes of one, its task's verifier alone says what it was worth; and it sees
nothing that it could be graded by, or reward itself with."""

from __future__ import annotations

import re
from pathlib import Path

from rl_harness_cli_agents.testing import COMMAND, DONE, TASK_TOML, ScriptedRun, ending, running

#: Stands in whatever an agent must not see, in one file that it may, and in one variable that it is given.
_KEPT = "KEPT-FROM-AGENTS"
#: Found by the first, which does not find itself.
_PATTERN = "KEPT-FROM-AGENT[S]"
_SEEN = f"/app/readme.txt\\nSHOWN={_KEPT}"
_NUMBER = "if grep -qx 36 /app/answer.txt; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
_TASKS = {
    "dies": {"instruction.md": "Write 36 and die.\n", "task.toml": TASK_TOML, "tests/test.sh": _NUMBER},
    "lies": {"instruction.md": "Say that it is done.\n", "task.toml": TASK_TOML, "tests/test.sh": _NUMBER},
    "peeks": {
        "instruction.md": "Look for what is hidden.\n",
        "task.toml": TASK_TOML,
        "environment/workspace/readme.txt": f"{_KEPT}\n",
        "solution/solve.sh": f"echo {_KEPT}\n",
        "tests/test.sh": f"""\
cat /app/answer.txt
if [ "$(cat /app/answer.txt)" = "$(printf '{_SEEN}')" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
""",
    },
}
#: Its own processes from the shell up to the one that the sandbox started.
_DIE = (
    "echo 36 > answer.txt; p=$$; all=; "
    "while q=$(sed -n 's/^PPid:[^0-9]*//p' /proc/$p/status); [ $q -gt 1 ]; do all=\"$p $all\"; p=$q; done; kill -9 $all"
)
#: In all files but the system's, its own program's and its own, which may repeat its variables, and in the variables of
#: all processes.
_LEFT_OUT = " ".join(f"--exclude-dir={name}" for name in ("proc", "sys", "dev", "usr", "rl-harness", "rl-harness-home"))
_PEEK = (
    f"{{ grep -rlsI '{_PATTERN}' / {_LEFT_OUT}; "
    f"cat /proc/[0-9]*/environ | tr '\\0' '\\n' | grep '{_PATTERN}' | sort -u; }} > answer.txt; "
    f"{COMMAND.partition('&& ')[2]}"
)
_SECRETS = ("RL_HARNESS_REWARD_KEY", "ADMIN_KEY", "OPENAI_API_KEY", "ANTHROPIC_API_KEY")


def check_judged_by_the_verifier(directory: Path, agent: str) -> None:
    """One run of three tasks: it dies with the work done, says that it is done and is not, looks for what is hidden."""
    run = ScriptedRun(directory, _TASKS)
    rules = [
        (DONE, ending(agent)),
        ("Write 36 and die", running(agent, _DIE)),
        ("Say that it is done", ending(agent)),
        ("Look for what is hidden", running(agent, _PEEK)),
    ]
    options = ("-o", f'harness.env={{SHOWN="{_KEPT}"}}', "--concurrency", "3")
    run.report(agent, rules, *options, env=dict.fromkeys(_SECRETS, _KEPT))
    said = {task: run.said(task) for task in _TASKS}
    ends = {
        task: (*re.findall(r"attempt 1: reward (\S+)", text), *re.findall(r"ended by (\w+)", text), _code(text))
        for task, text in said.items()
    }
    expected = {"dies": ("1", "agent_error", 137), "lies": ("0", "answer", 0), "peeks": ("1", "answer", 0)}
    assert ends == expected, said[next((task for task in ends if ends[task] != expected[task]), "dies")]
    output = said["lies"].partition("event agent")[2].partition("output:")[2].partition("event verifier")[0]
    assert len(output.strip()) > len("| it"), "what it printed was not kept"


def _code(text: str) -> int:
    return int(re.findall(r"exit_code:\s+\| (-?\d+)", text)[0])
