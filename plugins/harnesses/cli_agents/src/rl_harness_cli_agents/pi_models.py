"""A provider as pi's configuration describes one, and that of OpenClaw, which is made with pi's parts."""

from __future__ import annotations

from typing import Any

from rl_harness_cli_agents.agent import Seat

#: Where the program finds its key, so that its configuration does not hold it.
PI_KEY_VARIABLE = "RL_HARNESS_API_KEY"


def pi_provider(seat: Seat, api_key: str) -> dict[str, Any]:
    """With the model of ``seat`` alone; ``api_key`` refers to :data:`PI_KEY_VARIABLE`, as the program writes that."""
    model = {
        "id": seat.model,
        "name": seat.model,
        "reasoning": False,
        "input": ["text"],
        "contextWindow": seat.context_length,
        "maxTokens": seat.max_tokens,
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
    }
    return {"baseUrl": seat.base_url, "apiKey": api_key, "api": "openai-completions", "models": [model]}
