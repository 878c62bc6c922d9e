"""The pi coding agent, headless."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import ClassVar

from rl_harness_cli_agents.agent import CliAgent, Seat
from rl_harness_cli_agents.packages import Npm
from rl_harness_cli_agents.pi_models import PI_KEY_VARIABLE, pi_provider


class Pi(CliAgent):
    name: ClassVar[str] = "pi"
    package = Npm(package="@earendil-works/pi-coding-agent", version="1.6.0", program="pi", node=(22, 19))

    def environment(self, seat: Seat) -> Mapping[str, str]:
        return {
            "PI_CODING_AGENT_DIR": f"{seat.home}/.pi/agent",
            PI_KEY_VARIABLE: seat.api_key,
            "PI_OFFLINE": "1",
            "PI_SKIP_VERSION_CHECK": "1",
            "PI_TELEMETRY": "0",
        }

    def files(self, seat: Seat) -> Mapping[str, str]:
        providers = {"rl-harness": pi_provider(seat, f"${PI_KEY_VARIABLE}")}
        return {f"{seat.home}/.pi/agent/models.json": json.dumps({"providers": providers}, indent=2)}

    def arguments(self, seat: Seat) -> Sequence[str]:
        return ["-p", "--no-session", "--provider", "rl-harness", "--model", seat.model, *self.options.args]

    def stdin(self, seat: Seat) -> str:
        return seat.instruction
