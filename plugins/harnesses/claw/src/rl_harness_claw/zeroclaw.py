"""ZeroClaw: asked once. No registry used here has it, so it must be in the sandbox. Written after the source of its
version 0.8.4, and not run here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import ClassVar

from rl_harness_cli_agents import CliAgent, Seat, Unpackaged

from rl_harness_claw.message import message, workspace

#: That of ZeroClaw 0.8. Nothing is asked and nothing refused, its limits on actions and costs included: what confines
#: it is the sandbox. Its names of sections have no hyphens.
_CONFIG = """\
schema_version = 3

[providers.models.custom.rl_harness]
uri = {base_url}
api_key = {api_key}
model = {model}
max_tokens = {max_tokens}

[risk_profiles.rl_harness]
level = "full"
workspace_only = false
allowed_commands = ["*"]
forbidden_paths = []
require_approval_for_medium_risk = false
block_high_risk_commands = false
always_ask = []
sandbox_enabled = false

[runtime_profiles.rl_harness]
agentic = true
max_tool_iterations = {max_turns}
max_actions_per_hour = {most}
max_cost_per_day_cents = {most}
max_context_tokens = {context_length}

[agents.rl_harness]
model_provider = "custom.rl_harness"
risk_profile = "rl_harness"
runtime_profile = "rl_harness"

[agents.rl_harness.workspace]
path = {workspace}
unrestricted_filesystem = true
"""
_MOST = 2**32 - 1


class ZeroClaw(CliAgent):
    name: ClassVar[str] = "zeroclaw"
    package = Unpackaged(
        version="any",
        program="zeroclaw",
        how="build it into the task's image, and give -o harness.install=present",
    )

    def environment(self, seat: Seat) -> Mapping[str, str]:
        return {"ZEROCLAW_CONFIG_DIR": f"{seat.home}/.zeroclaw"}

    def files(self, seat: Seat) -> Mapping[str, str]:
        # A JSON string is a TOML string.
        text = _CONFIG.format(
            model=json.dumps(seat.model),
            api_key=json.dumps(seat.api_key),
            base_url=json.dumps(seat.base_url),
            workspace=json.dumps(workspace(seat)),
            max_tokens=seat.max_tokens,
            max_turns=seat.max_turns,
            context_length=seat.context_length,
            most=_MOST,
        )
        return {f"{seat.home}/.zeroclaw/config.toml": text}

    def arguments(self, seat: Seat) -> Sequence[str]:
        return ["agent", "--agent", "rl_harness", *self.options.args, f"--message={message(seat)}"]
