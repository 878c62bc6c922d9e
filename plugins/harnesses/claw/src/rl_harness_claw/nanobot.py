"""nanobot: asked once, without its channels."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import ClassVar

from rl_harness_cli_agents import CliAgent, Pip, Seat

from rl_harness_claw.message import message, workspace


class Nanobot(CliAgent):
    name: ClassVar[str] = "nanobot"
    package = Pip(package="nanobot-ai", version="0.3.5", program="nanobot")

    def environment(self, seat: Seat) -> Mapping[str, str]:
        return {}

    def files(self, seat: Seat) -> Mapping[str, str]:
        config = {
            "agents": {
                "defaults": {
                    "workspace": workspace(seat),
                    "model": seat.model,
                    "provider": "custom",
                    "maxTokens": seat.max_tokens,
                    "contextWindowTokens": seat.context_length,
                }
            },
            "providers": {"custom": {"apiKey": seat.api_key, "apiBase": seat.base_url}},
        }
        return {f"{seat.home}/.nanobot/config.json": json.dumps(config, indent=2)}

    def arguments(self, seat: Seat) -> Sequence[str]:
        return ["agent", "--no-markdown", *self.options.args, f"--message={message(seat)}"]
