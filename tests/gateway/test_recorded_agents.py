"""What real agents sent, in short: two calls of each, with a tool called in between.

``recordings/AGENT.json`` holds them as they came from the program, with its prompts and most of its tools cut out. How
an agent writes its history again is its own: what matters is that the second call goes on from the tokens of the first.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

RECORDINGS = {
    file.stem: json.loads(file.read_text("utf-8")) for file in sorted(Path(__file__).parent.glob("recordings/*.json"))
}


def called_tool(body: Any) -> tuple[str, Any]:
    """Name and arguments of the call that the agent repeats in its second request, in any protocol's words."""
    if isinstance(body, list):
        for value in body:
            if found := called_tool(value):
                return found
    if isinstance(body, dict):
        if body.get("type") == "tool_use":
            return body["name"], body["input"]
        if "arguments" in body and "name" in body:
            return body["name"], json.loads(body["arguments"])
        return called_tool([value for key, value in body.items() if key != "tools"])
    return ()  # type: ignore[return-value]  # nothing here


@pytest.mark.parametrize("agent", RECORDINGS)
async def test_the_second_call_goes_on_from_the_first(agent: str, bench: Any, replies: Any) -> None:
    first, second = RECORDINGS[agent]
    name, arguments = called_tool(second["body"])
    call = json.dumps({"name": name, "arguments": arguments})
    replies(f"<tool_call>\n{call}\n</tool_call>", "It is done.")
    for request, expected in ((first, name), (second, "It is done.")):
        sent = bench.post(request["body"], path=request["path"], headers=request["headers"])
        async with sent as response:
            said = await response.text()
            assert response.status == 200, said
            streamed = bool(request["body"].get("stream"))
            assert response.headers["content-type"].startswith("text/event-stream" if streamed else "application/json")
            assert streamed or expected in said
    turns = bench.session.turns
    assert [turn.finish_reason for turn in turns] == ["tool_calls", "stop"]
    assert turns[0].message.tool_calls[0].name == name
    assert turns[1].parent == turns[0].id
    # All of the first call, but for OpenClaw, whose last message of a call is gone in the next.
    whole = turns[0].prompt_tokens + turns[0].completion_tokens
    assert turns[1].shared == whole or (agent == "openclaw" and 0.5 * whole < turns[1].shared)
