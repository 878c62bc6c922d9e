"""Qwen Code, headless."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import ClassVar

from rl_harness_cli_agents.agent import CliAgent, Seat
from rl_harness_cli_agents.packages import Npm


class QwenCode(CliAgent):
    name: ClassVar[str] = "qwen-code"
    package = Npm(package="@qwen-code/qwen-code", version="0.24.4", program="qwen", node=(22, 0))

    def environment(self, seat: Seat) -> Mapping[str, str]:
        return {
            "OPENAI_API_KEY": seat.api_key,
            "OPENAI_BASE_URL": seat.base_url,
            "OPENAI_MODEL": seat.model,
            "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
        }

    def files(self, seat: Seat) -> Mapping[str, str]:
        settings = {
            "security": {"auth": {"selectedType": "openai"}},
            "general": {"enableAutoUpdate": False, "disableAutoUpdate": True},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "model": {
                "name": seat.model,
                "generationConfig": {
                    "contextWindowSize": seat.context_length,
                    "samplingParams": {"max_tokens": seat.max_tokens},
                },
            },
        }
        return {f"{seat.home}/.qwen/settings.json": json.dumps(settings, indent=2)}

    def arguments(self, seat: Seat) -> Sequence[str]:
        return ["--yolo", "--auth-type", "openai", "--model", seat.model, *self.options.args]

    def stdin(self, seat: Seat) -> str:
        return seat.instruction
