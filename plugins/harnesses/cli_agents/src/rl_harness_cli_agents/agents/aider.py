"""aider, headless: one message, edits without tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import ClassVar

from pydantic import Field

from rl_harness_cli_agents.agent import CliAgent, CliAgentOptions, Seat
from rl_harness_cli_agents.packages import Pip


class AiderOptions(CliAgentOptions):
    files: tuple[str, ...] = Field((), description="files it may edit from the start, from the working directory")
    edit_format: str = Field("diff", description="how the model writes edits: diff, whole, udiff, ...")


class Aider(CliAgent):
    Options = AiderOptions
    name: ClassVar[str] = "aider"
    package = Pip(package="aider-chat", version="0.86.2", program="aider", below=(3, 13))
    calls_tools: ClassVar[bool] = False

    def environment(self, seat: Seat) -> Mapping[str, str]:
        return {
            "OPENAI_API_BASE": seat.base_url,
            "OPENAI_API_KEY": seat.api_key,
            "AIDER_ANALYTICS": "false",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }

    def files(self, seat: Seat) -> Mapping[str, str]:
        metadata = {
            f"openai/{seat.model}": {
                "max_input_tokens": seat.context_length,
                "max_output_tokens": seat.max_tokens,
                "input_cost_per_token": 0,
                "output_cost_per_token": 0,
                "litellm_provider": "openai",
                "mode": "chat",
            }
        }
        return {f"{seat.home}/instruction.md": seat.instruction, f"{seat.home}/metadata.json": json.dumps(metadata)}

    def arguments(self, seat: Seat) -> Sequence[str]:
        assert isinstance(self.options, AiderOptions)
        return [
            "--model",
            f"openai/{seat.model}",
            "--model-metadata-file",
            f"{seat.home}/metadata.json",
            "--edit-format",
            self.options.edit_format,
            "--yes-always",
            "--no-git",
            "--no-check-update",
            "--no-show-release-notes",
            "--no-show-model-warnings",
            "--no-detect-urls",
            "--no-pretty",
            "--map-tokens",
            "0",
            "--analytics-disable",
            "--chat-history-file",
            f"{seat.home}/chat-history.md",
            "--input-history-file",
            f"{seat.home}/input-history",
            "--message-file",
            f"{seat.home}/instruction.md",
            *self.options.args,
            "--",
            *self.options.files,
        ]
