"""Codex: OpenAI's agent, headless."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import ClassVar

from rl_harness_cli_agents.agent import CliAgent, Seat
from rl_harness_cli_agents.packages import Npm

_CONFIG = """\
model = {model}
model_provider = "rl-harness"
model_context_window = {context_length}
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
web_search = "disabled"

[model_providers.rl-harness]
name = "rl-harness"
base_url = {base_url}
env_key = "CODEX_API_KEY"
wire_api = "responses"
request_max_retries = 2
stream_max_retries = 2

[analytics]
enabled = false

[history]
persistence = "none"
"""


class Codex(CliAgent):
    name: ClassVar[str] = "codex"
    package = Npm(package="@openai/codex", version="0.171.0", program="codex", node=(16, 0))
    protocols: ClassVar[frozenset[str]] = frozenset({"responses"})
    untold: ClassVar[frozenset[str]] = frozenset({"max_tokens"})

    def environment(self, seat: Seat) -> Mapping[str, str]:
        return {"CODEX_HOME": f"{seat.home}/.codex", "CODEX_API_KEY": seat.api_key}

    def files(self, seat: Seat) -> Mapping[str, str]:
        # A JSON string is a TOML string.
        text = _CONFIG.format(
            model=json.dumps(seat.model), base_url=json.dumps(seat.base_url), context_length=seat.context_length
        )
        return {f"{seat.home}/.codex/config.toml": text}

    def arguments(self, seat: Seat) -> Sequence[str]:
        return [
            "exec",
            "--skip-git-repo-check",
            "--dangerously-bypass-approvals-and-sandbox",
            *self.options.args,
            "-",
        ]

    def stdin(self, seat: Seat) -> str:
        return seat.instruction
