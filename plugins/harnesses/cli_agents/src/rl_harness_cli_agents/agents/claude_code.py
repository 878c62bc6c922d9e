"""Claude Code: Anthropic's agent, headless."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from rl_harness_cli_agents.agent import CliAgent, Seat
from rl_harness_cli_agents.packages import Npm


class ClaudeCode(CliAgent):
    name: ClassVar[str] = "claude-code"
    package = Npm(package="@anthropic-ai/claude-code", version="2.1.332", program="claude", native=True)
    protocols: ClassVar[frozenset[str]] = frozenset({"messages"})

    def environment(self, seat: Seat) -> Mapping[str, str]:
        return {
            "ANTHROPIC_BASE_URL": seat.address,
            "ANTHROPIC_API_KEY": seat.api_key,
            "ANTHROPIC_MODEL": seat.model,
            # Whatever it would ask a smaller model for.
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": seat.model,
            "ANTHROPIC_DEFAULT_SONNET_MODEL": seat.model,
            "ANTHROPIC_DEFAULT_OPUS_MODEL": seat.model,
            "CLAUDE_CODE_SUBAGENT_MODEL": seat.model,
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(seat.context_length),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(seat.max_tokens),
            "CLAUDE_CONFIG_DIR": f"{seat.home}/.claude",
            # The gateway waits for an engine that is away; what it calls a failure is one.
            "CLAUDE_CODE_MAX_RETRIES": "2",
            # Without it, root may not skip the permissions.
            "IS_SANDBOX": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
        }

    def arguments(self, seat: Seat) -> Sequence[str]:
        return ["-p", "--dangerously-skip-permissions", *self.options.args]

    def stdin(self, seat: Seat) -> str:
        return seat.instruction
