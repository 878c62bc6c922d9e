"""OpenClaw: its agent run locally and once, without a gateway of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import ClassVar

from rl_harness_cli_agents import CliAgent, Npm, Seat

from rl_harness_claw.message import message, workspace


class OpenClaw(CliAgent):
    name: ClassVar[str] = "openclaw"
    package = Npm(package="openclaw", version="2026.9.6", program="openclaw", node=(24, 16))

    def environment(self, seat: Seat) -> Mapping[str, str]:
        return {
            "OPENCLAW_STATE_DIR": f"{seat.home}/.openclaw",
            "OPENCLAW_CONFIG_PATH": f"{seat.home}/.openclaw/openclaw.json",
            "RL_HARNESS_API_KEY": seat.api_key,
        }

    def files(self, seat: Seat) -> Mapping[str, str]:
        model = {
            "id": seat.model,
            "name": seat.model,
            "reasoning": False,
            "input": ["text"],
            "contextWindow": seat.context_length,
            "maxTokens": seat.max_tokens,
            "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        }
        provider = {
            "baseUrl": seat.base_url,
            "apiKey": "${RL_HARNESS_API_KEY}",
            "api": "openai-completions",
            "models": [model],
        }
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
