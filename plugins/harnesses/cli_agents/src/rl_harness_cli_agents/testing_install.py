"""For the tests of sandboxes: an agent that a set-up step installs from a wheel in the task's workspace, by the script
that installs any agent of PyPI. No registry is asked."""

from __future__ import annotations

import io
import secrets
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from rl_harness_cli_agents.testing import TASK_TOML, ScriptedRun

#: A plugin in one file, as anyone would write it for an agent of their own.
_PLUGIN = """\
from rl_harness.hookspecs import Extension, hookimpl
from rl_harness_cli_agents import CliAgent, Pip


@hookimpl
def rl_harness_harnesses():
    return [Extension("small", f"{__name__}:Small", "an agent that asks its model once")]


class Small(CliAgent):
    name = "small"
    package = Pip(package="small-agent", version="1.0", program="small-agent", python=(3, 8))
    calls_tools = False

    def environment(self, seat):
        return {"URL": seat.base_url, "KEY": seat.api_key, "MODEL": seat.model}

    def arguments(self, seat):
        return []

    def stdin(self, seat):
        return seat.instruction
"""
_PROGRAM = """\
import json, os, subprocess, sys, urllib.request


def main():
    body = {"model": os.environ["MODEL"], "messages": [{"role": "user", "content": sys.stdin.read()}]}
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["KEY"]}
    url = os.environ["URL"] + "/chat/completions"
    reply = json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))
    sys.exit(subprocess.run(reply["choices"][0]["message"]["content"], shell=True).returncode)
"""
_WHEEL = {
    "small_agent.py": _PROGRAM,
    "small_agent-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: small-agent\nVersion: 1.0\n",
    "small_agent-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "small_agent-1.0.dist-info/entry_points.txt": "[console_scripts]\nsmall-agent = small_agent:main\n",
    "small_agent-1.0.dist-info/RECORD": "",
}
_TASK = {
    "instruction.md": "Write the number 36.\n",
    "task.toml": TASK_TOML + '[verifier]\nenvironment_mode = "separate"\n',
    # Its installation is the agent's alone; what was downloaded for it is nowhere.
    "tests/test.sh": """\
if [ -e /opt/rl-harness ]; then echo "the agent is in the verifier's sandbox"; exit 1; fi
if grep -qx "36 by small-agent, nothing in tmp" /app/answer.txt; then reward=1; else reward=0; fi
cat /app/answer.txt
echo $reward > /logs/verifier/reward.txt
""",
}
_COMMAND = """\
[ -x /opt/rl-harness/small/bin/small-agent ] && left="$(ls -A /tmp | grep tmp || echo nothing)" && \
echo "36 by small-agent, $left in tmp" > answer.txt"""


def check_install_in_sandbox(
    directory: Path, sandbox: str, *options: str, environment: Mapping[str, str | bytes] = MappingProxyType({})
) -> str:
    """The set-up step installs the agent, for itself alone, and the next run finds what was prepared. ``environment``:
    further files of the task's folder of that name. The task's name, by which the snapshot is found."""
    task = f"small-{secrets.token_hex(4)}"
    run = ScriptedRun(directory, {task: _TASK})
    plugin = directory / "small.py"
    plugin.write_text(_PLUGIN)
    files = {**environment, "workspace/wheels/small_agent-1.0-py3-none-any.whl": _wheel()}
    for name, content in files.items():
        path = run.tasks[0] / "environment" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    for name, built in (("first", 1), ("again", 0)):
        report = run.report(
            "small",
            [("Write the number 36", _COMMAND)],
            *("-p", str(plugin), "--name", name, "-o", "harness.install=sandbox"),
            *("-o", 'harness.install_env={PIP_NO_INDEX="1", PIP_FIND_LINKS="/app/wheels"}', *options),
            sandbox=sandbox,
        )
        summary = report["evaluations"][0]["summary"]
        assert (summary["passed"], summary["unscored"]) == (1, {}), (summary, run.said(task, name))
        assert report["sandboxes"]["snapshots_built"] == built
    return task


def _wheel() -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as wheel:
        for name, text in _WHEEL.items():
            wheel.writestr(name, text)
    return content.getvalue()
