"""Whatever a model says, a client that sends the reply back as it got it continues that very turn, in each protocol."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

FUNCTION = {"name": "run", "description": "Run it.", "parameters": {"type": "object"}}
WORDS = st.text(st.sampled_from("ab é\n{<🙂"), min_size=1, max_size=6)
CALL = st.dictionaries(st.sampled_from("xyz"), st.text(max_size=4) | st.integers(), max_size=2).map(
    lambda arguments: f"<tool_call>\n{json.dumps({'name': 'run', 'arguments': arguments})}\n</tool_call>"
)
SAID = st.tuples(
    st.just("") | WORDS.map(lambda thought: f"<think>{thought}</think>"),
    st.lists(WORDS | CALL, max_size=4).map("".join),
).map("".join)


class Chat:
    path = "/chat/completions"

    def __init__(self) -> None:
        tools = [{"type": "function", "function": FUNCTION}]
        self.body: dict[str, Any] = {"messages": [{"role": "user", "content": "q"}], "tools": tools}

    def take(self, events: list[dict[str, Any]]) -> None:
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        for event in events:
            for choice in event["choices"]:
                message["content"] += choice["delta"].get("content") or ""
                message.setdefault("tool_calls", []).extend(choice["delta"].get("tool_calls", ()))
        calls = message["tool_calls"]
        self.body["messages"] += [
            message,
            *({"role": "tool", "tool_call_id": c["id"], "content": "out"} for c in calls),
        ]
        self.body["messages"].append({"role": "user", "content": "r"})


class Messages:
    path = "/messages"

    def __init__(self) -> None:
        tools = [{"name": "run", "description": "Run it.", "input_schema": {"type": "object"}}]
        self.body: dict[str, Any] = {"messages": [{"role": "user", "content": "q"}], "tools": tools}

    def take(self, events: list[dict[str, Any]]) -> None:
        blocks: list[dict[str, Any]] = []
        for event in events:
            if event["type"] == "content_block_start":
                blocks.append(event["content_block"])
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                if delta["type"] == "input_json_delta":
                    blocks[-1]["input"] = json.loads(delta["partial_json"])
                else:
                    field = delta["type"].removesuffix("_delta")
                    blocks[-1][field] += delta[field]
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "out"}
            for block in blocks
            if block["type"] == "tool_use"
        ]
        self.body["messages"].append({"role": "assistant", "content": blocks})
        self.body["messages"].append({"role": "user", "content": [*results, {"type": "text", "text": "r"}]})


class Responses:
    path = "/responses"

    def __init__(self) -> None:
        self.body: dict[str, Any] = {
            "input": [{"role": "user", "content": "q"}],
            "tools": [{"type": "function", **FUNCTION}],
        }

    def take(self, events: list[dict[str, Any]]) -> None:
        items = events[-1]["response"]["output"]
        texts = {event["item_id"]: "" for event in events if event["type"] == "response.output_text.delta"}
        for event in events:
            if event["type"] == "response.output_text.delta":
                texts[event["item_id"]] += event["delta"]
        assert texts == {
            item["id"]: item["content"][0]["text"]
            for item in items
            if item["type"] == "message" and item["content"][0]["text"]
        }
        self.body["input"] += items
        self.body["input"] += [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "out"}
            for item in items
            if item["type"] == "function_call"
        ]
        self.body["input"].append({"role": "user", "content": "r"})


@pytest.mark.parametrize("client", [Chat, Messages, Responses])
@given(said=SAID)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
async def test_a_reply_sent_back_is_continued(bench: Any, client: Any, said: str) -> None:
    bench.engine.reply = lambda request, prompt: said
    agent = client()
    name = f"{client.path}{len(bench.engine.requests)}"
    session = bench.open(name)
    for _ in range(2):
        async with bench.post(agent.body | {"stream": True}, path=agent.path, session=session) as response:
            lines = [line async for line in response.content if line.startswith(b"data: {")]
            assert response.status == 200
        agent.take([json.loads(line[6:]) for line in lines])
    one, two = await bench.gateway.close_session(name)
    assert (two.parent, two.shared) == (one.id, one.prompt_tokens + one.completion_tokens)
