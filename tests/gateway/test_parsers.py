"""Ids to text, reasoning and tool calls, however the ids are cut into chunks."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_harness.contracts import Delta
from rl_harness.gateway.renderers.formats.hermes import Hermes
from rl_harness.gateway.renderers.streams import THINK, TaggedParser
from rl_harness.gateway.renderers.tokenizer import TokenizerFolder
from rl_harness.records import Message, ids
from rl_harness.testing.tokenizer import write_tokenizer

CALL = '<tool_call>\n{"name": "run", "arguments": {"command": "ls"}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TokenizerFolder:
    return TokenizerFolder(write_tokenizer(tmp_path_factory.mktemp("t")))


def run(
    tokenizer: TokenizerFolder,
    text: str | list[int],
    *,
    size: int = 1,
    stop: tuple[str, ...] = (),
    calls: bool = True,
    thinking: bool = False,
    reason: str = "stop",
) -> tuple[list[Delta], Message, TaggedParser]:
    parser = TaggedParser(tokenizer, stop=stop, form=Hermes() if calls else None, thought=THINK if thinking else None)
    tokens = tokenizer.encode(text) if isinstance(text, str) else text
    deltas: list[Delta] = []
    for start in range(0, len(tokens), size):
        deltas += parser.feed(ids(tokens[start : start + size]))
    deltas += parser.finish(reason)
    return deltas, parser.message(), parser


def said(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_text_comes_out_token_by_token(tokenizer: TokenizerFolder) -> None:
    deltas, message, _ = run(tokenizer, "abc<|im_end|>")
    assert [delta.text for delta in deltas] == ["a", "b", "c"]
    assert message == Message(role="assistant", content="abc")


def test_an_incomplete_character_is_held_back(tokenizer: TokenizerFolder) -> None:
    deltas, _, _ = run(tokenizer, "a你b", calls=False)
    assert [delta.text for delta in deltas] == ["a", "你", "b"]


def test_a_character_cut_by_the_end_becomes_a_replacement(tokenizer: TokenizerFolder) -> None:
    _, message, _ = run(tokenizer, tokenizer.encode("a你")[:-1], reason="length")
    assert message.content == "a\ufffd"


@given(data=st.binary(max_size=40), size=st.integers(1, 5))
@settings(max_examples=80, deadline=None)
def test_pieces_together_are_the_text_of_all_bytes(tokenizer: TokenizerFolder, data: bytes, size: int) -> None:
    spelled = {tokenizer.spelled[token]: token for token in range(256)}
    tokens = [spelled[bytes([byte])] for byte in data]
    deltas, message, _ = run(tokenizer, tokens, size=size, calls=False)
    assert said(deltas) == message.content == data.decode(errors="replace")


@given(text=st.text(max_size=30), size=st.integers(1, 7), calls=st.booleans())
@settings(max_examples=80, deadline=None)
def test_any_text_survives_any_chunking(tokenizer: TokenizerFolder, text: str, size: int, calls: bool) -> None:
    deltas, message, _ = run(tokenizer, text, size=size, calls=calls)
    assert said(deltas) == message.content == text


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_call_is_one_delta(tokenizer: TokenizerFolder, size: int) -> None:
    deltas, message, _ = run(tokenizer, f"I look.\n{CALL}\n{CALL}<|im_end|>", size=size)
    calls = [delta.tool_call for delta in deltas if delta.tool_call is not None]
    assert said(deltas) == message.content == "I look."
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("run", {"command": "ls"})] * 2
    assert tuple(calls) == message.tool_calls
    assert calls[0].id != calls[1].id


def test_without_tools_a_call_is_text(tokenizer: TokenizerFolder) -> None:
    _, message, _ = run(tokenizer, CALL, calls=False)
    assert message.content == CALL
    assert message.tool_calls == ()


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "", "arguments": {}}',
        '{"arguments": {}}',
        "not json",
        "[" * 100_000,
        "",
    ],
)
def test_a_malformed_call_is_text(tokenizer: TokenizerFolder, body: str) -> None:
    text = f"before <tool_call>{body}</tool_call> after"
    deltas, message, _ = run(tokenizer, text, size=50_000)
    assert message.tool_calls == ()
    assert said(deltas) == message.content == text


def test_a_call_without_its_closing_tag(tokenizer: TokenizerFolder) -> None:
    _, message, _ = run(tokenizer, CALL.removesuffix("</tool_call>") + "<|im_end|>")
    assert [call.name for call in message.tool_calls] == ["run"]
    cut = CALL[:30]
    _, message, _ = run(tokenizer, cut, reason="length")
    assert message.tool_calls == ()
    assert message.content == cut


def test_reasoning_is_told_from_text(tokenizer: TokenizerFolder) -> None:
    deltas, message, _ = run(tokenizer, "<think>\nhm, 2\n</think>\n\n4<|im_end|>")
    assert message == Message(role="assistant", content="4", reasoning="hm, 2")
    assert "".join(delta.reasoning for delta in deltas) == "hm, 2"


def test_reasoning_that_the_prompt_opened(tokenizer: TokenizerFolder) -> None:
    _, message, _ = run(tokenizer, f"hm</think>{CALL}", thinking=True)
    assert (message.reasoning, message.content, len(message.tool_calls)) == ("hm", "", 1)


def test_reasoning_cut_short_has_no_text(tokenizer: TokenizerFolder) -> None:
    _, message, _ = run(tokenizer, "<think>so far", reason="length")
    assert message == Message(role="assistant", reasoning="so far")


def test_a_tag_within_text_is_text(tokenizer: TokenizerFolder) -> None:
    _, message, _ = run(tokenizer, "use <think> tags", calls=False)
    assert message.content == "use <think> tags"


@pytest.mark.parametrize("size", [1, 4, 100])
def test_a_stop_string_is_cut_and_located(tokenizer: TokenizerFolder, size: int) -> None:
    deltas, message, parser = run(tokenizer, "one STOP two", size=size, stop=("STOP", "never"))
    assert said(deltas) == message.content == "one "
    assert parser.stopped_at == len("one STOP")


def test_the_beginning_of_a_stop_string_is_only_held_back(tokenizer: TokenizerFolder) -> None:
    deltas, message, parser = run(tokenizer, "STO STO", stop=("STOP",))
    assert said(deltas) == message.content == "STO STO"
    assert parser.stopped_at is None


def test_nothing_but_an_end_token(tokenizer: TokenizerFolder) -> None:
    deltas, message, _ = run(tokenizer, "<|im_end|>")
    assert deltas == []
    assert message == Message(role="assistant")


def test_ids_beyond_the_vocabulary_have_no_text(tokenizer: TokenizerFolder) -> None:
    _, message, _ = run(tokenizer, [*tokenizer.encode("a"), 10_000, *tokenizer.encode("b")])
    assert message.content == "ab"
