"""OpenClaw: its agent run locally and once, without a gateway of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import ClassVar

from rl_harness_cli_agents import PI_KEY_VARIABLE, CliAgent, Npm, Seat, pi_provider

from rl_harness_claw.message import message, workspace


class OpenClaw(CliAgent):
    name: ClassVar[str] = "openclaw"
    package = Npm(package="openclaw", version="2026.9.6", program="openclaw", node=(24, 16))

    def environment(self, seat: Seat) -> Mapping[str, str]:
        return {
            "OPENCLAW_STATE_DIR": f"{seat.home}/.openclaw",
            "OPENCLAW_CONFIG_PATH": f"{seat.home}/.openclaw/openclaw.json",
            PI_KEY_VARIABLE: seat.api_key,
        }

    def files(self, seat: Seat) -> Mapping[str, str]:
        provider = pi_provider(seat, f"${{{PI_KEY_VARIABLE}}}")
        config = {
            "models": {"mode": "merge", "providers": {"rl-harness": provider}},
            "agents": {
                "defaults": {
                    "model": {"primary": f"rl-harness/{seat.model}"},
                    "workspace": workspace(seat),
                    "skipBootstrap": True,
                }
            },
            "tools": {"exec": {"security": "full", "ask": "off"}},
        }
        return {f"{seat.home}/.openclaw/openclaw.json": json.dumps(config, indent=2)}

    def arguments(self, seat: Seat) -> Sequence[str]:
        return ["agent", "--local", "--agent", "main", *self.options.args, f"--message={message(seat)}"]
