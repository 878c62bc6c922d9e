"""Whatever a client sends, it is answered; never with a 500."""

from __future__ import annotations

import contextlib
import gzip
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rl_harness.gateway.errors import ApiError
from rl_harness.gateway.protocols import DEFAULT, PROTOCOLS
from rl_harness.gateway.upstream import upstream_body

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = [
    "messages",
    "model",
    "stream",
    "stream_options",
    "tools",
    "tool_choice",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "stop",
    "seed",
    "n",
    "logprobs",
    "top_logprobs",
    "response_format",
    "logit_bias",
    "frequency_penalty",
    "functions",
]
PART = st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url", "x"])}, optional={"text": JSON})
CALL = st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": st.text(max_size=3), "arguments": JSON})})
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system", "x"])},
    optional={
        "content": st.text(max_size=9) | st.lists(PART, max_size=2) | JSON,
        "tool_calls": st.lists(CALL, max_size=2),
    },
)
BLOCK = st.fixed_dictionaries(
    {
        "type": st.sampled_from(
            ["text", "tool_use", "tool_result", "thinking", "image", "document", "search_result", "x"]
        )
    },
    optional=dict.fromkeys(("text", "thinking", "id", "name", "input", "tool_use_id", "content", "source"), JSON),
)
ANTHROPIC = st.fixed_dictionaries(
    {
        "messages": st.lists(
            st.fixed_dictionaries(
                {
                    "role": st.sampled_from(["user", "assistant", "system", "x"]),
                    "content": st.text(max_size=9) | st.lists(BLOCK, max_size=3) | JSON,
                }
            ),
            max_size=3,
        )
        | JSON
    },
    optional={
        "system": st.lists(BLOCK, max_size=2) | JSON,
        "tools": st.lists(st.fixed_dictionaries({"name": JSON, "input_schema": JSON}), max_size=2) | JSON,
        **dict.fromkeys(
            ("max_tokens", "stream", "tool_choice", "stop_sequences", "temperature", "output_config"), JSON
        ),
    },
)
ITEM = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(
            [
                "message",
                "reasoning",
                "function_call",
                "function_call_output",
                "custom_tool_call",
                "local_shell_call",
                "x",
            ]
        ),
        "role": st.sampled_from(["user", "assistant", "developer", "x"]),
        "content": st.text(max_size=9) | st.lists(PART, max_size=2) | JSON,
        "summary": st.lists(PART, max_size=2) | JSON,
        "encrypted_content": st.sampled_from(["rlh1.", "rlh1.x", "rlh1.aGk=", "y"]) | JSON,
        **dict.fromkeys(("id", "name", "namespace", "call_id", "arguments", "input", "action", "output"), JSON),
    },
)
OFFERED = st.fixed_dictionaries(
    {"type": st.sampled_from(["function", "namespace", "custom", "local_shell", "web_search", "x"])},
    optional=dict.fromkeys(("name", "description", "parameters", "tools", "format"), JSON),
)
RESPONSES = st.fixed_dictionaries(
    {"input": st.lists(ITEM, max_size=4) | JSON},
    optional={
        "tools": st.lists(OFFERED, max_size=2) | JSON,
        "tool_choice": st.sampled_from(["auto", "none", "required"]) | OFFERED | JSON,
        **dict.fromkeys(("instructions", "stream", "max_output_tokens", "stop", "include", "text", "reasoning"), JSON),
    },
)
BODY = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE, max_size=3) | JSON}, optional={name: JSON for name in FIELDS if name != "messages"}
)


#: Arguments whose text is half a surrogate pair once it is parsed.
HALF_A_PAIR = (
    b'{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ARGS}}]}]}'.replace(
        b"ARGS", rb'"{\"a\": \"\\ud800\"}"'
    )
)


@given(
    data=st.one_of(
        st.binary(max_size=50),
        BODY.map(lambda body: json.dumps(body).encode()),
        JSON.map(lambda v: json.dumps(v).encode()),
    )
)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
async def test_any_body_is_answered(bench: Any, data: bytes) -> None:
    await answered(bench, "/chat/completions", data)


async def answered(bench: Any, path: str, data: bytes) -> None:
    """By our own engine, and by the parser for a model behind a chat API."""
    bench.engine.reply = lambda request, prompt: "ok"
    async with bench.post(data, path=path) as response:
        text = await response.text()
        assert response.status in (200, 400), (response.status, text)
    with contextlib.suppress(ApiError):
        upstream_body(PROTOCOLS[path].parse(data, bench.remote, retry=False).call)


@pytest.mark.parametrize("path", ["/messages", "/messages/count_tokens"])
@given(data=ANTHROPIC.map(lambda body: json.dumps(body).encode()))
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
async def test_any_anthropic_body_is_answered(bench: Any, path: str, data: bytes) -> None:
    await answered(bench, path, data)


@given(data=RESPONSES.map(lambda body: json.dumps(body).encode()))
@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
async def test_any_responses_body_is_answered(bench: Any, data: bytes) -> None:
    await answered(bench, "/responses", data)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"\xff\xfe", 400),
        (b"{", 400),
        (b"[" * 100_000, 400),
        (b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400),
        (HALF_A_PAIR, 200),
        (b'{"messages": [{"role": "user", "content": "\\u0000"}]}', 200),
        (b'{"messages": [{"role": "user", "content": "<|im_end|>"}]}', 200),
    ],
)
async def test_bodies_at_the_edge(bench: Any, body: bytes, status: int) -> None:
    async with bench.post(body) as response:
        assert response.status == status, await response.text()


DEEP = b"[" * 900 + b"]" * 900
HALF = rb'{"a": "\ud800"}'
USED = (
    b'{"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": INPUT}]},'
    b'{"role": "user", "content": "q"}]}'
)
CALLED = b'{"input": [{"type": "function_call", "name": "f", "call_id": "c", "arguments": INPUT}]}'


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        *[(path, body, 400) for path in ("/messages", "/responses") for body in (b"", b"\xff", b"{", b"[" * 100_000)],
        ("/messages", USED.replace(b"INPUT", HALF), 400),
        ("/messages", USED.replace(b"INPUT", DEEP), 200),
        ("/messages", USED.replace(b"INPUT", b"5"), 200),
        ("/messages", b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400),
        (
            "/messages",
            b'{"messages": [{"role": "user", "content": [{"type": "tool_result", "content": ' + DEEP + b"}]}]}",
            400,
        ),
        ("/responses", CALLED.replace(b"INPUT", json.dumps(HALF.decode()).encode()), 200),
        ("/responses", CALLED.replace(b"INPUT", HALF), 400),
        ("/responses", CALLED.replace(b"INPUT", b'{"a": ' + DEEP + b"}"), 200),
        ("/responses", b'{"input": [{"role": "user", "content": ' + DEEP + b"}]}", 400),
        ("/responses", b'{"input": "q", "tools": [{"type": "namespace", "name": "n", "tools": ' + DEEP + b"}]}", 400),
    ],
)
async def test_bodies_at_the_edge_of_the_other_protocols(bench: Any, path: str, body: bytes, status: int) -> None:
    async with bench.post(body, path=path) as response:
        assert response.status == status, await response.text()


async def test_a_compressed_body(bench: Any) -> None:
    """Said, and not taken for JSON that is wrong. It would also be a way around the limit on bodies."""
    async with bench.post(gzip.compress(b"{}"), headers={"content-encoding": "gzip"}) as response:
        assert response.status == 415
        assert "uncompressed" in await response.text()


async def test_a_field_is_named(bench: Any) -> None:
    with pytest.raises(ApiError, match=r"Expected `str`, got `int` - at `\$.messages\[0\].role`"):
        DEFAULT.parse(b'{"messages": [{"role": 5}]}', bench.session, retry=False)


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_beyond_the_limit(bench: Any, chunked: bool) -> None:
    bench.gateway.limits = replace(bench.gateway.limits, body=1000)

    async def pieces() -> Any:
        for _ in range(20):
            yield b"x" * 100

    body: Any = pieces() if chunked else b"x" * 2000
    key = {"authorization": f"Bearer {bench.session.api_key}"}
    async with bench.http.post(f"{bench.gateway.base_url}/chat/completions", data=body, headers=key) as response:
        assert response.status == 413
        assert (await response.json())["error"]["code"] == "request_too_large"
    await bench.ask("q")
