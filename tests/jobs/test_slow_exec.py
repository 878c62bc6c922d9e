"""Where a provider's own exec is slow, the agent's commands go through a helper inside; the verifier's never do."""

from __future__ import annotations

import json

import pytest

PLUGIN = """
import msgspec
from rl_harness.hookspecs import Extension, hookimpl
from rl_harness.sandboxes.local import LocalProvider

@hookimpl
def rl_harness_sandboxes():
    return [Extension("slow", f"{__name__}:SlowProvider", "the local sandbox, if its exec were slow")]

class SlowProvider(LocalProvider):
    @property
    def capabilities(self):
        return msgspec.structs.replace(super().capabilities, slow_exec=True)
"""

UP = "until test $(pgrep -fc 'rl-harness helpe[r]') -ge 2; do sleep 0.05; done"
WHO = "tr '\\0' ' ' < /proc/$PPID/cmdline > who.txt"
TEST = f"""
{WHO.replace("who.txt", "/tmp/verifier.txt")}
grep -q 'rl-harness helper' /app/who.txt && ! grep -q 'rl-harness helper' /tmp/verifier.txt
echo $((1 - $?)) > /logs/verifier/reward.txt
"""


@pytest.mark.needs("userns")
def test_the_agents_commands_take_the_helper_and_the_verifiers_do_not(world) -> None:
    task = world.directory / "tasks" / "who"
    (task / "tests").mkdir(parents=True)
    (task / "instruction.md").write_text("Who runs your commands?")
    (task / "task.toml").write_text('schema_version = "1.4"\n\n[environment]\nnetwork_mode = "no-network"\n')
    (task / "tests" / "test.sh").write_text(TEST)
    plugin = world.directory / "slow.py"
    plugin.write_text(PLUGIN)
    replies = json.dumps([f"```bash\n{command}\n```" for command in (UP, WHO)] + ["done"])
    arguments = ("run", "tasks/who", *world.scripted, "-p", str(plugin), "--sandbox", "slow", "--harness", "shell")
    report = world.json(*arguments, "-o", f"engine.replies={replies}", "-o", "harness.format='fenced'")
    summary = report["evaluations"][0]["summary"]
    assert (summary["scored"], summary["passed"], summary["unscored"]) == (1, 1, {}), report
