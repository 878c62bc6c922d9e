"""mini-SWE-agent, headless."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from rl_harness_cli_agents.agent import CliAgent, Seat
from rl_harness_cli_agents.packages import Pip


class MiniSweAgent(CliAgent):
    name: ClassVar[str] = "mini-swe-agent"
    package = Pip(package="mini-swe-agent", version="2.4.6", program="mini")
    untold: ClassVar[frozenset[str]] = frozenset({"context_length"})

    def environment(self, seat: Seat) -> Mapping[str, str]:
        return {
            "OPENAI_API_BASE": seat.base_url,
            "OPENAI_API_KEY": seat.api_key,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_SILENT_STARTUP": "1",
            # It takes the end of its turns for a failure that passes.
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_GLOBAL_CONFIG_DIR": f"{seat.home}/.config/mini-swe-agent",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }

    def arguments(self, seat: Seat) -> Sequence[str]:
        return [
            "--model",
            f"openai/{seat.model}",
            "--yolo",
            "--exit-immediately",
            "--output",
            f"{seat.home}/trajectory.json",
            # The settings that it has anyway, and one more.
            "--config",
            "mini.yaml",
            "--config",
            f"model.model_kwargs.max_tokens={seat.max_tokens}",
            *self.options.args,
            f"--task={seat.instruction}",
        ]
