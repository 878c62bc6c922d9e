"""Tools' schemas: which are none, which arguments fit one, what type a value gets. They come from agents: nothing they
hold may raise, or take long."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_harness.gateway.schemas import Tools, schema_problem, tools_problem


def tool(parameters: Any, name: str = "run") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"type": ["object", "null"], "properties": {"a": True, "b": {"type": "array", "items": {"$ref": "#/$defs/c"}}}},
        {"$defs": {"c": {"enum": [1, None, "x"]}}, "required": [], "additionalProperties": {"type": "string"}},
        {"properties": {"type": {"type": "string"}, "required": {"const": 1}}, "anyOf": [{"required": ["type"]}]},
        {"properties": {"a": {"pattern": "(", "format": "no such", "x-own": 3, "default": {"type": 7}}}},
        {"properties": {"a": {"minimum": 0.5, "maxLength": 3, "exclusiveMinimum": 1, "items": [{}, {}]}}},
    ],
)
def test_schemas(schema: Any) -> None:
    assert schema_problem(schema) is None
    assert tools_problem([tool(schema)]) is None


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ([], "it is no schema but []"),
        ("object", 'it is no schema but "object"'),
        ({"type": "strnig"}, 'type is "strnig", not one or more of string'),
        ({"type": []}, "type is [], not"),
        ({"properties": []}, "properties is [], not an object of schemas"),
        ({"properties": {"a": {"type": 3}}}, "properties.a.type is 3, not"),
        ({"properties": {"a": "string"}}, 'properties.a is no schema but "string"'),
        ({"required": "a"}, 'required is "a", not a list of names'),
        ({"anyOf": [{}, 3]}, "anyOf[1] is no schema but 3"),
        ({"items": {"enum": 3}}, "items.enum is 3, not a list of values"),
        ({"$ref": 1}, "$ref is 1, not a reference"),
        ({"minLength": -1}, "minLength is -1, not a count"),
        ({"maximum": "1"}, 'maximum is "1", not a number'),
    ],
)
def test_what_is_no_schema(schema: Any, problem: str) -> None:
    found = tools_problem([tool({}), tool(schema, "walk")])
    assert found is not None
    assert found.startswith("tools[1]: the parameters of 'walk' are no JSON schema: ")
    assert problem in found


def test_a_schema_that_is_a_truth_value_takes_no_arguments() -> None:
    assert "not an object" in str(tools_problem([tool(True)]))
    assert tools_problem([tool(None), {"type": "function", "function": {"name": "bare"}}]) is None


@pytest.mark.parametrize(
    ("schema", "value", "problem"),
    [
        ({"type": "object", "required": ["a"]}, {}, "a is missing"),
        ({"properties": {"a": {"type": "integer"}}}, {"a": 1.0}, None),
        ({"properties": {"a": {"type": "integer"}}}, {"a": True}, "a is true, not of type integer"),
        ({"properties": {"a": {"type": "number", "minimum": 2}}}, {"a": 1}, "a is 1, less than 2"),
        ({"properties": {"a": {"enum": [1, "x"]}}}, {"a": True}, "a is true, which is not in its enum"),
        ({"properties": {"a": {"const": None}}}, {"a": None}, None),
        ({"properties": {"a": {"maxLength": 1}}}, {"a": "xy"}, "a has a length of 2"),
        ({"properties": {"a": {"items": {"type": "string"}}}}, {"a": ["x", 1]}, "a[1] is 1, not of type string"),
        ({"properties": {}, "additionalProperties": False}, {"b": 1}, "b is not allowed"),
        ({"allOf": [{}, {"required": ["a"]}]}, {}, "a is missing"),
        ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, {}, "it fits none of oneOf"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"required": ["a"]}}}, {}, "a is missing"),
        ({"$ref": "http://example.com/schema"}, {}, None),
        ({"properties": {"a": {"pattern": "^b$"}}}, {"a": "c"}, None),
    ],
)
def test_what_fits(schema: Any, value: Any, problem: str | None) -> None:
    found = Tools([tool(schema)]).problem("run", value)
    assert found == (None if problem is None else f"run: {problem}")


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "1", "1"),
        ({"type": "string"}, " x\n", " x\n"),
        ({"type": "integer"}, " 3 ", 3),
        ({"type": "integer"}, "three", "three"),
        ({"type": "integer"}, "1.5", "1.5"),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": ["null", "string"]}, "null", None),
        ({"type": ["null", "string"]}, "3", "3"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "3", 3),
        ({"type": "array"}, "['a', 1, None]", ["a", 1, None]),
        ({"type": "object"}, '{"a": 1}', {"a": 1}),
        ({"enum": [1, 2]}, "2", 2),
        ({"$ref": "#/properties/b"}, "4", 4),
        ({}, '{"a": 1}', {"a": 1}),
        ({}, "3", "3"),
        (True, "3", "3"),
        ({"type": "array"}, "[" * 100_000, "[" * 100_000),
    ],
)
def test_values_get_the_types_of_the_schema(schema: Any, text: str, value: Any) -> None:
    tools = Tools([tool({"properties": {"a": schema, "b": {"type": "integer"}}})])
    assert tools.typed("run", "a", text) == value
    assert type(tools.typed("run", "a", text)) is type(value)
    assert tools.typed("run", "other", text) == tools.typed("fly", "a", text) == text


KEYS = "type properties items anyOf allOf $ref $defs required enum const additionalProperties minimum minLength not a"
VALUES = "object string integer array null # #/$defs/a"
words = st.sampled_from([*KEYS.split(), *VALUES.split()])
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=4),
    max_leaves=12,
)


@given(schema=anything, value=anything, text=st.text(max_size=8) | words)
@settings(max_examples=300, deadline=None)
def test_nothing_raises(schema: Any, value: Any, text: str) -> None:
    """Also where nobody has looked whether it is a schema."""
    schema_problem(schema)
    tools = Tools([tool(schema)])
    tools.problem("run", value)
    tools.typed("run", "a", text)
    tools.keys("run")


def test_a_schema_that_leads_into_itself() -> None:
    loop = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
    tools = Tools([tool(loop)])
    assert tools.problem("run", {}) is None
    several = {"anyOf": [{"$ref": "#"}] * 8}
    start = time.process_time()
    assert Tools([tool(several)]).problem("run", {}) is None
    assert time.process_time() - start < 1
    nested: Any = {}
    for _ in range(50_000):
        nested = {"items": nested}
    assert schema_problem(nested) is None
    deep: Any = json.loads("[" * 900 + "]" * 900)
    endless = {"$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"}
    assert Tools([tool(endless)]).problem("run", deep) is None


async def test_a_request_with_a_tool_that_has_no_schema(bench: Any) -> None:
    """The agent's own mistake, in its protocol's words; what is sent again and again is looked at once."""
    bad = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "q"}]}
    wrong = {"type": "object", "properties": {"a": {"type": "strnig"}}}
    async with bench.post(bad | {"tools": [tool({}), tool(wrong, "walk")]}) as response:
        assert response.status == 400
        error = (await response.json())["error"]
    assert error["param"] == "tools"
    assert "tools[1]: the parameters of 'walk'" in error["message"]
    assert "properties.a.type" in error["message"]
    url = f"{bench.gateway.base_url}/messages"
    key = {"x-api-key": bench.session.api_key}
    async with bench.http.post(
        url, headers=key, json=bad | {"tools": [{"name": "walk", "input_schema": wrong}]}
    ) as response:
        answer = await response.json()
        assert (response.status, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error")
    assert "'walk'" in answer["error"]["message"]
    assert bench.session.turns == []


async def test_what_is_wrong_with_a_call_is_in_the_turn(bench: Any, replies: Any) -> None:
    replies('<tool_call>{"name": "run", "arguments": {"a": "x"}}</tool_call>')
    await bench.ask("q", tools=[tool({"properties": {"a": {"type": "integer"}}})])
    assert bench.session.turns[0].extra["tool_problems"] == ['run: a is "x", not of type integer']
