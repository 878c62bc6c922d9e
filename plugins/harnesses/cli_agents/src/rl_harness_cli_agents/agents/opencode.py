"""OpenCode, headless."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import ClassVar

from rl_harness_cli_agents.agent import CliAgent, Seat
from rl_harness_cli_agents.packages import Npm


class OpenCode(CliAgent):
    name: ClassVar[str] = "opencode"
    package = Npm(package="opencode-ai", version="1.18.33", program="opencode", native=True)

    def environment(self, seat: Seat) -> Mapping[str, str]:
        return {
            "OPENCODE_CONFIG": f"{seat.home}/opencode.json",
            "OPENAI_API_KEY": seat.api_key,
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        }

    def files(self, seat: Seat) -> Mapping[str, str]:
        model = {
            "name": seat.model,
            "tool_call": True,
            "limit": {"context": seat.context_length, "output": seat.max_tokens},
        }
        config = {
            "$schema": "https://opencode.ai/config.json",
            "model": f"rl-harness/{seat.model}",
            "small_model": f"rl-harness/{seat.model}",
            "provider": {
                "rl-harness": {
                    "npm": "@ai-sdk/openai-compatible",
                    "name": "rl-harness",
                    "options": {"baseURL": seat.base_url, "apiKey": "{env:OPENAI_API_KEY}"},
                    "models": {seat.model: model},
                }
            },
            "permission": {"*": "allow", "external_directory": "allow", "doom_loop": "allow"},
            "agent": {"title": {"disable": True}},
            "autoupdate": False,
            "share": "disabled",
        }
        return {f"{seat.home}/opencode.json": json.dumps(config, indent=2)}

    def arguments(self, seat: Seat) -> Sequence[str]:
        # A title of its own spares the model the invention of one.
        return ["run", "--title", "task", *self.options.args]

    def stdin(self, seat: Seat) -> str:
        return seat.instruction
