"""ZeroClaw: asked once. No registry used here has it, so it must be in the sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import ClassVar

from rl_harness_cli_agents import CliAgent, Seat, Unpackaged

from rl_harness_claw.message import message, workspace

_CONFIG = """\
default_provider = "rl-harness"
default_model = {model}
api_key = {api_key}

[model_providers.rl-harness]
base_url = {base_url}

[autonomy]
level = "full"
workspace_only = false
"""


class ZeroClaw(CliAgent):
    name: ClassVar[str] = "zeroclaw"
    package = Unpackaged(
        version="any",
        program="zeroclaw",
        how="build it into the task's image, and give -o harness.install=present",
    )

    def environment(self, seat: Seat) -> Mapping[str, str]:
        return {"ZEROCLAW_WORKSPACE": workspace(seat)}

    def files(self, seat: Seat) -> Mapping[str, str]:
        # A JSON string is a TOML string.
        text = _CONFIG.format(
            model=json.dumps(seat.model), api_key=json.dumps(seat.api_key), base_url=json.dumps(seat.base_url)
        )
        return {f"{seat.home}/.zeroclaw/config.toml": text}

    def arguments(self, seat: Seat) -> Sequence[str]:
        return ["agent", *self.options.args, f"--message={message(seat)}"]
