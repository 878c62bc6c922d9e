"""Secrets in prompts and replies: the agent gets them, nobody else does; no turn that held one is trained on."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import numpy as np
import pytest
from rl_harness.gateway import Gateway
from rl_harness.learning import samples_of
from rl_harness.records import Message, SamplingParams, ToolCall, encode, prompt_of
from rl_harness.redaction import Secrets
from rl_harness.runs.rows import turn_of, turn_row
from rl_harness.testing.records import an_episode

TOKEN = "tok_9f8e7d6c5b4a39281706"
PLANTED = [
    ("API key", "sk-proj-abcdefghij0123456789ABCDEFGHIJ"),
    ("API key", "sk-ant-api03-aaaaaaaaaaaaaaaaaaaaaaaa-AA"),
    ("GitHub token", "ghp_" + "a1B2" * 9),
    ("GitHub token", "github_pat_" + "a1B2_" * 8),
    ("GitLab token", "glpat-" + "a1B2-" * 5),
    ("AWS access key", "AKIA" + "ABCDEFGH01234567"),
    ("Google API key", "AIza" + "a1B2c" * 7),
    ("Hugging Face token", "hf_" + "aB" * 17),
    ("Slack token", "xoxb-123456789012-abcdef"),
    ("private key", "-----BEGIN RSA PRIVATE KEY-----\nMIIEow" + "A" * 40 + "\n-----END RSA PRIVATE KEY-----"),
    ("private key", "-----BEGIN PRIVATE KEY-----\nMIIEvQ" + "A" * 40),
    ("JWT", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl"),
    ("session key", "rlh-" + "a" * 32),
]
HARMLESS = [
    "sk-learn is a library; task-0123456789-0123456789-abc; risk-abcdefghij0123456789",
    "ghp_ is a prefix, hf_hub_download() a function, AKIA nothing",
    "-----BEGIN CERTIFICATE-----\nMIID\n-----END CERTIFICATE-----, and -----BEGIN PRIVATE KEY----- alone",
    "eyJ.eyJ.x xoxo AIzaShort postgres not-needed",
]


@pytest.mark.parametrize(("kind", "text"), PLANTED)
def test_well_known_shapes(kind: str, text: str) -> None:
    secrets = Secrets()
    around = f"export A={text}\n"
    assert secrets.find(around) == [kind]
    assert secrets.redact(around).startswith(f"export A=[redacted: {kind}]")
    assert text not in secrets.redact(around)


@pytest.mark.parametrize("text", HARMLESS)
def test_what_only_looks_alike(text: str) -> None:
    secrets = Secrets.of_environment(
        (), {"DB_PASSWORD": "postgres", "OPENAI_API_KEY": "not-needed", "X_TOKEN": "eyJ.1"}
    )
    assert secrets.find(text) == []
    assert secrets.redact(text) == text


def test_texts_made_to_be_slow_to_search_are_not() -> None:
    """The agent writes what is searched, in the event loop of all."""
    secrets = Secrets()
    size = 1 << 20
    began = time.process_time()
    for piece in (
        "sk-",
        "rlh-",
        "ghp_",
        "github_pat_",
        "eyJ",
        "eyJaaaaaaaa.",
        "xoxb-",
        "glpat-",
        "AKIA",
        "hf_",
        "-----BEGIN ",
    ):
        text = piece * (size // len(piece))
        secrets.find(text)
        secrets.redact(text)
    for text in ("-----BEGIN PRIVATE KEY-----" * (size // 27), "-----BEGIN RSA PRIVATE KEY-----x " * (size // 33)):
        secrets.find(text)
        secrets.redact(text)
    assert time.process_time() - began < 10  # quadratic time would be many minutes


def test_values_of_variables() -> None:
    """Those named, and those whose own names say so; the longest first where one is part of another."""
    environment = {
        "DEPLOY_TOKEN": TOKEN,
        "MY_PASSWORD": TOKEN + "-x",
        "DECLARED": "word-1-of-4",
        "PATH": "/usr/bin:/bin0000000",
        "KEYBOARD": "layout-0123456789",
    }
    secrets = Secrets.of_environment(["DECLARED", "ABSENT"], environment)
    assert secrets.find(" ".join(environment.values())) == ["MY_PASSWORD", "DEPLOY_TOKEN", "DECLARED"]
    assert secrets.redact(f"{TOKEN}-x {TOKEN} word-1-of-4") == (
        "[redacted: MY_PASSWORD] [redacted: DEPLOY_TOKEN] [redacted: DECLARED]"
    )


def test_records_are_cleaned_all_the_way_down() -> None:
    secrets = Secrets({"T": TOKEN})
    call = ToolCall(id="1", name="f", arguments=f'{{"a": "{TOKEN}"}}')
    message = Message(role="assistant", content=TOKEN, reasoning=f"so {TOKEN}", tool_calls=(call,))
    cleaned = secrets.clean({"m": message, TOKEN: [TOKEN, 1, None, (TOKEN,)]})
    assert TOKEN not in str(cleaned)
    assert cleaned["m"].tool_calls[0].arguments == '{"a": "[redacted: T]"}'
    plain = Message(role="user", content="x")
    assert secrets.clean(plain) is plain


@pytest.fixture
def known(bench: Any) -> Any:
    bench.gateway._sessions.secrets = Secrets({"DEPLOY_TOKEN": TOKEN})
    bench.session = bench.open("k")
    return bench


def stored(turns: list[Any]) -> bytes:
    """Everything that goes to disk of them, and ids as the text they stand for."""
    return b"".join(encode(turn) for turn in turns)


async def test_a_reply_that_holds_one(known: Any) -> None:
    """The agent gets it. What went before keeps its ids; what goes on from it is quarantined with it."""
    bench = known
    said = ["first", f"the token is {TOKEN}", "third", "a title"]
    bench.engine.reply = lambda request, prompt: said.pop(0)
    first = await bench.ask("q")
    second = await bench.ask("q", first, "r")
    assert TOKEN in second["content"]
    await bench.ask("q", first, "r", second, "s")
    await bench.ask("q", first, "name this")
    whole = bench.session.turns
    prompts = {turn.id: prompt_of(turn, {one.id: one for one in whole}.__getitem__) for turn in whole}
    turns = await bench.gateway.close_session("k")
    assert [turn.quarantined for turn in turns] == [(), ("DEPLOY_TOKEN",), ("DEPLOY_TOKEN",), ()]
    assert [turn.exact for turn in turns] == [True, False, False, True]
    assert turns[1].message.content == "the token is [redacted: DEPLOY_TOKEN]"
    assert turns[1].completion_tokens == whole[1].completion_tokens
    assert [len(turn.completion) + len(turn.context) for turn in turns[1:3]] == [0, 0]
    assert TOKEN.encode() not in stored(turns)
    for turn in turns:
        # Nothing left of the secret in ids either, and those that stay have the very prompts that were sent.
        known_turns = {one.id: one for one in turns}
        if turn.exact:
            prompt = prompt_of(turn, known_turns.__getitem__)
            assert np.array_equal(prompt, prompts[turn.id])
            assert TOKEN not in bench.renderer.decode(prompt) + bench.renderer.decode(turn.completion)
    samples = samples_of(an_episode(), turns, group="g", advantage=1.0, gamma=0.5)
    assert [sample.turn for sample in samples] == ["k/0", "k/3"]
    # The credit of what stays follows the conversation as it was: two turns go on from the first.
    assert samples[0].advantage[0] == pytest.approx((0.25 + 0.5) / 2)


async def test_a_prompt_that_holds_one(known: Any) -> None:
    """In a message, in tools, in a tool call's arguments, in reasoning: found wherever it is."""
    bench = known
    tool = {"type": "function", "function": {"name": "f", "description": TOKEN, "parameters": {"type": "object"}}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": TOKEN})}}
    plain = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    await bench.ask(f"use {TOKEN}")
    await bench.ask("q", tools=[tool])
    await bench.ask("q", {"role": "assistant", "tool_calls": [call]}, "r", tools=[plain])
    await bench.ask("q", {"role": "assistant", "content": "x", "reasoning_content": TOKEN}, "r")
    await bench.ask("q", {"role": "assistant", "content": "x", "reasoning_content": "y"}, "r")
    turns = await bench.gateway.close_session("k")
    assert [bool(turn.quarantined) for turn in turns] == [True, True, True, True, False]
    assert TOKEN.encode() not in stored(turns)


async def test_the_sessions_own_keys(bench: Any) -> None:
    bench.engine.reply = lambda request, prompt: f"OPENAI_API_KEY={bench.session.api_key}"
    await bench.ask("env")
    bench.engine.reply = lambda request, prompt: "ok"
    await bench.ask(f"curl {bench.gateway.root_url}{bench.session.secret_path}")
    turns = await bench.gateway.close_session("s")
    assert [turn.quarantined for turn in turns] == [("session key",)] * 2


async def test_a_quarantined_turn_survives_the_store(known: Any) -> None:
    await known.ask(f"use {TOKEN}")
    (turn,) = await known.gateway.close_session("k")
    again = turn_of(*turn_row(turn))
    assert (again.quarantined, again.exact, again.message) == (turn.quarantined, False, turn.message)


async def test_a_system_prompt_shared_with_a_quarantined_turn(known: Any) -> None:
    """A branch that shares ids with a turn that loses them has them as its own."""
    bench = known
    system = {"role": "system", "content": "You are an agent with a long system prompt that branches share."}
    await bench.ask(system, f"use {TOKEN}")
    await bench.ask(system, "another")
    whole = {turn.id: turn for turn in bench.session.turns}
    assert whole["k/1"].parent == "k/0"
    turns = await bench.gateway.close_session("k")
    assert (turns[1].parent, turns[1].shared, turns[1].exact) == (None, 0, True)
    assert np.array_equal(turns[1].context, prompt_of(whole["k/1"], whole.__getitem__))


async def test_nothing_is_changed_where_nothing_is_secret(bench: Any) -> None:
    await bench.ask("q")
    turns = bench.session.turns
    stored_turns = await bench.gateway.close_session("s")
    assert all(one is other for one, other in zip(turns, stored_turns, strict=True))


async def test_each_message_is_searched_once(known: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation is sent anew with every call: looking for secrets costs what is new, not the history."""
    texts: list[str] = []
    find = Secrets.find
    monkeypatch.setattr(Secrets, "find", lambda self, text: texts.append(text) or find(self, text))
    messages: list[Any] = []
    for number in range(5):
        messages.append({"role": "user", "content": f"message {number}"})
        messages.append(await known.ask(*messages))
    assert sum("message 0" in text for text in texts) == 1
    assert len(texts) == 1 + 5 + 5 + 1  # tools; what users said; the replies as they came; they as history, all alike


async def test_by_default_the_environments_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", TOKEN)
    assert Gateway({}).secrets.find(TOKEN) == ["SOME_API_KEY"]


def test_sampling_parameters_are_searched_too() -> None:
    secrets = Secrets({"T": TOKEN})
    assert secrets.clean(SamplingParams(stop=(TOKEN,))).stop == ("[redacted: T]",)
    assert msgspec.json.encode(secrets.clean(SamplingParams(stop=("x",)))) == b'{"stop":["x"]}'
