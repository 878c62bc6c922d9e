"""Token-exact recording: whatever agents do to their history, what was sampled is never tokenised again."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_harness.contracts import Renderer
from rl_harness.gateway import canonical
from rl_harness.gateway.prompting import Prompt, build_prompt
from rl_harness.gateway.renderers import template
from rl_harness.gateway.renderers.chatml import ChatMLOptions, ChatMLRenderer
from rl_harness.gateway.renderers.template import TemplateOptions, TemplateRenderer
from rl_harness.gateway.tree import Conversation, TurnTree
from rl_harness.records import Message, SamplingParams, ToolCall, Turn, ids, logps, prompt_of, sequence_of
from rl_harness.testing.tokenizer import CHATML_TEMPLATE, SPECIAL_TOKENS, write_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

PLAIN = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
RAISES = """{% for m in messages %}{% if m.role == 'assistant' and loop.index0 > 0 and
messages[loop.index0 - 1].role == 'assistant' %}{{ raise_exception('two replies in a row') }}{% endif %}{% endfor %}"""
#: Keep their history; a benign agent's conversation always continues.
KEEPING = {
    "plain": PLAIN,
    "strips": PLAIN.replace("m.content", "m.content | trim"),
    "default_system": "{% if messages[0].role != 'system' %}<|im_start|>system\nBe.<|im_end|>\n{% endif %}" + PLAIN,
    "tools": CHATML_TEMPLATE,
    "raises": RAISES + PLAIN,
    "dates": "{{ strftime_now('%H:%M:%S') }}{{ bos_token }}{{ bos_token }}" + PLAIN,
}
#: Rewrite it in one way or another.
REWRITING = {
    "drops_reasoning": """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    "drops_before_the_last_question": """{% set ns = namespace(last=-1) %}
{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content and loop.index0 > ns.last %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    "merges_system": "<|im_start|>system\n{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    "<|im_end|>\n" + PLAIN,
    "counts": "{{ messages | length }}" + PLAIN,
    "shortens": "{% for m in messages[-3:] %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
}
TOOL = {"type": "function", "function": {"name": "run", "parameters": {}}}


def crossing(folder: Path) -> Path:
    """Merges across any border, of words and of messages alike."""
    merges = ("th", "he", "\u010a\u010a", "e\u010a", "\u010au", ">\u010a", "r\u010a", "\u010a<", "\u0120t")
    write_tokenizer(folder, template=CHATML_TEMPLATE, merges=merges)
    file = folder / "tokenizer.json"
    made = json.loads(file.read_text())
    made["pre_tokenizer"]["use_regex"] = False
    file.write_text(json.dumps(made))
    return folder


def beginning(folder: Path) -> Path:
    """Puts its own begin token before whatever it encodes, twice."""
    write_tokenizer(folder, template="{{ bos_token }}" + CHATML_TEMPLATE)
    file = folder / "tokenizer.json"
    made = Tokenizer.from_file(str(file))
    begin = "<|endoftext|>"
    made.post_processor = processors.TemplateProcessing(
        single=f"{begin} {begin} $A", special_tokens=[(begin, made.token_to_id(begin))]
    )
    made.save(str(file))
    return folder


def falling_back(folder: Path) -> Path:
    """Few characters, bytes for the others, a mark for spaces, and one before all text."""
    write_tokenizer(folder, template=CHATML_TEMPLATE)
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {token: 256 + number for number, token in enumerate(["\u2581", *"thean<>|", "th", "\u2581t"])}
    merges = [("t", "h"), ("\u2581", "t")]
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    made.save(str(folder / "tokenizer.json"))
    return folder


#: Tokenizers that make trouble.
NASTY = {"crossing": crossing, "beginning": beginning, "falling_back": falling_back}
_made: dict[str, Renderer] = {}


@pytest.fixture(scope="module", autouse=True)
def renderers(tmp_path_factory: pytest.TempPathFactory) -> None:
    root: Path = tmp_path_factory.mktemp("renderers")
    for name, source in (KEEPING | REWRITING).items():
        made = TemplateRenderer(TemplateOptions())
        made.load(write_tokenizer(root / name, template=source))
        _made[name] = made
    for name, spoil in NASTY.items():
        made = TemplateRenderer(TemplateOptions())
        made.load(spoil(root / name))
        _made[name] = made
    own = ChatMLRenderer(ChatMLOptions())
    own.load(root / "plain")
    _made["chatml"] = own


class Recorder:
    """A session without its server: asks, answers with given ids, records."""

    def __init__(self, renderer: Renderer, tools: tuple[Any, ...] = ()) -> None:
        self.renderer = renderer
        self.tools = tools
        self.tree = TurnTree()
        self.sent: list[np.ndarray[Any, Any]] = []

    def ask(
        self,
        messages: list[Message],
        completion: list[int],
        tools: tuple[Any, ...] | None = None,
        opening: Sequence[int] = (),
    ) -> Turn:
        conversation = Conversation.of(messages, self.tools if tools is None else tools)
        prompt = build_prompt(self.renderer, self.tree, conversation, ids(opening))
        self._check(prompt)
        parser = self.renderer.parser(conversation.tools)
        parser.feed(ids([*opening, *completion]))
        parser.finish("stop")
        index = len(self.tree.turns)
        turn = Turn(
            id=f"s/{index}",
            session="s",
            index=index,
            policy="m",
            sampling=SamplingParams(),
            parent=prompt.parent,
            shared=prompt.shared,
            context=ids(prompt.ids[prompt.shared :]),
            completion=ids(completion),
            logps=logps(np.zeros(len(completion))),
            versions=ids(np.zeros(len(completion))),
            finish_reason="stop",
            message=parser.message(),
            prompt_tokens=len(prompt.ids),
            completion_tokens=len(completion),
        )
        self.tree.add(turn, prompt.conversation, prompt.follows, opening=len(opening), replies=prompt.replies)
        self.sent.append(prompt.ids)
        return turn

    def _check(self, prompt: Prompt) -> None:
        earlier = [sequence_of(turn, self.tree.turn) for turn in self.tree.turns]
        if prompt.parent is None:
            assert prompt.shared == 0
        else:
            whole = sequence_of(self.tree.turn(prompt.parent), self.tree.turn)
            assert whole[: prompt.shared].tolist() == prompt.ids[: prompt.shared].tolist()
        if prompt.follows is None or prompt.parent != prompt.follows.id:
            assert prompt.shared == max((_common(prompt.ids, one) for one in earlier), default=0)

    def check(self) -> None:
        """Every prompt can be put together again from what is stored."""
        for turn, sent in zip(self.tree.turns, self.sent, strict=True):
            assert prompt_of(turn, self.tree.turn).tolist() == sent.tolist()

    def continues(self, turn: Turn) -> bool:
        parent = turn.parent and self.tree.turn(turn.parent)
        return bool(parent) and turn.shared == parent.prompt_tokens + parent.completion_tokens


def _common(a: Any, b: Any) -> int:
    count = 0
    for x, y in zip(a.tolist(), b.tolist(), strict=False):
        if x != y:
            break
        count += 1
    return count


END = 260
words = st.text(alphabet="the \n{}<>|你é", max_size=8)
text_ids = st.lists(st.one_of(st.integers(0, 257)), max_size=8)  # bytes and merges alike, valid UTF-8 or not


@st.composite
def completions(draw: st.DrawFn, name: str = "plain") -> list[int]:
    """Ids as a model may sample them: odd spellings, broken characters, a thought, calls, no end."""
    folder = _made[name]._folder  # type: ignore[attr-defined]
    end = folder.special["<|im_end|>"]
    tokens: list[int] = []
    if draw(st.booleans()):
        tokens += folder.encode(f"<think>{draw(words)}</think>")
    tokens += draw(text_ids)
    for _ in range(draw(st.integers(0, 2))):
        arguments = draw(st.dictionaries(st.sampled_from("abc"), st.integers() | words | st.floats(-2, 2), max_size=2))
        call = json.dumps({"name": "run", "arguments": arguments}, indent=draw(st.sampled_from([None, 1])))
        tokens += folder.encode(f"<tool_call>{call}</tool_call>")
    return tokens + [end] * draw(st.integers(0, 1))


def echo(draw: st.DrawFn, message: Message) -> Message:
    """The reply as agents send it back: re-serialised, renamed, trimmed, without its reasoning."""
    calls = []
    for call in message.tool_calls:
        arguments = json.loads(call.arguments)
        how: dict[str, Any] = draw(
            st.sampled_from([{"separators": (",", ":")}, {"ensure_ascii": True}, {"indent": 2}, {"sort_keys": True}])
        )
        arguments = {k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in arguments.items()}
        calls.append(
            ToolCall(
                id=draw(st.sampled_from(["", "x", call.id])), name=call.name, arguments=json.dumps(arguments, **how)
            )
        )
    content = message.content.strip() if draw(st.booleans()) else message.content
    reasoning = message.reasoning if draw(st.booleans()) else None
    return Message(role="assistant", content=content, reasoning=reasoning, tool_calls=tuple(calls))


def answer_to(draw: st.DrawFn, reply: Message) -> list[Message]:
    if reply.tool_calls:
        return [Message(role="tool", content=draw(words), tool_call_id=call.id) for call in reply.tool_calls]
    return [Message(role="user", content=draw(words))]


WITH_TOOLS = ("tools", "chatml", *NASTY)


@given(data=st.data(), name=st.sampled_from([*KEEPING, *NASTY, "chatml"]))
@settings(max_examples=40, deadline=None)
def test_a_benign_agent_always_continues(data: st.DataObject, name: str) -> None:
    tools = (TOOL,) if name in WITH_TOOLS else ()
    recorder = Recorder(_made[name], tools)
    messages = [Message(role="user", content=data.draw(words))]
    for number in range(data.draw(st.integers(1, 4))):
        turn = recorder.ask(messages, data.draw(completions(name)))
        assert recorder.continues(turn) == (number > 0)
        messages = [*messages, echo(data.draw, turn.message), *answer_to(data.draw, turn.message)]
    recorder.check()
    stored = sum(len(turn.context) + len(turn.completion) for turn in recorder.tree.turns)
    last = recorder.tree.turns[-1]
    assert stored == last.prompt_tokens + last.completion_tokens


@given(data=st.data(), name=st.sampled_from([*KEEPING, *REWRITING, *NASTY, "chatml"]))
@settings(max_examples=80, deadline=None)
def test_any_agent_any_template(data: st.DataObject, name: str) -> None:
    """History rewritten, cut, interleaved: every prompt is recorded exactly, and each continued turn begins with
    the recorded ids."""
    recorder = Recorder(_made[name], (TOOL,) if name in WITH_TOOLS else ())
    conversations = [[Message(role="user", content=data.draw(words))] for _ in range(2)]
    for _ in range(data.draw(st.integers(1, 6))):
        which = data.draw(st.integers(0, 1))
        messages = conversations[which]
        turn = recorder.ask(messages, data.draw(completions(name)))
        if recorder.continues(turn):
            parent = recorder.tree.turn(str(turn.parent))
            assert (
                prompt_of(turn, recorder.tree.turn)[: turn.shared].tolist() == recorder.tree.sequence(parent).tolist()
            )
        messages = [*messages, echo(data.draw, turn.message), *answer_to(data.draw, turn.message)]
        mischief = data.draw(st.sampled_from(["", "", "first", "drop", "insert", "system"]))
        if mischief == "first":
            messages[0] = Message(role="user", content=data.draw(words))
        elif mischief == "drop":
            del messages[data.draw(st.integers(0, len(messages) - 2))]
        elif mischief == "insert":
            messages.insert(data.draw(st.integers(0, len(messages))), Message(role="user", content=data.draw(words)))
        elif mischief == "system":
            messages.append(Message(role="system", content=data.draw(words)))
        conversations[which] = messages
    recorder.check()


def user(text: str) -> Message:
    return Message(role="user", content=text)


def said(turn: Turn, **changes: Any) -> Message:
    message = turn.message
    return Message(**({"role": "assistant", "content": message.content, "tool_calls": message.tool_calls} | changes))


def odd(text: str) -> list[int]:
    """A spelling that the tokenizer itself never chooses: one id a byte, though 'th' is a token."""
    folder = _made["plain"]._folder  # type: ignore[attr-defined]
    tokens = [folder.encode_plain(c)[0] for c in text] + [END]
    assert tokens != [*folder.encode(text), END]
    return tokens


def test_two_spellings_of_one_text() -> None:
    """Fault 1: the sampled ids are kept, although the tokenizer would write the text otherwise."""
    recorder = Recorder(_made["plain"])
    turn = recorder.ask([user("q")], odd("the"))
    after = recorder.ask([user("q"), said(turn), user("r")], odd("the"))
    assert recorder.continues(after)
    assert odd("the") == recorder.sent[1][turn.prompt_tokens : turn.prompt_tokens + 4].tolist()


def test_a_volatile_tail_keeps_the_replies() -> None:
    """An ephemeral last message is gone in the next request: a branch, whose replies are the recorded ids."""
    recorder = Recorder(_made["plain"])
    one = recorder.ask([user("q"), user("time: 1")], odd("the"))
    two = recorder.ask([user("q"), said(one), user("r"), user("time: 2")], odd("thee"))
    assert two.parent == one.id
    assert not recorder.continues(two)
    text = _made["plain"].decode(recorder.sent[1])
    assert text.count("time") == 1
    spelled = recorder.sent[1].tolist()
    assert any(spelled[at : at + 4] == odd("the") for at in range(len(spelled)))


def test_interleaved_conversations_each_continue() -> None:
    """Fault 7: a title call or a sub-agent in between does not break the main conversation."""
    recorder = Recorder(_made["plain"])
    main = recorder.ask([user("main")], odd("the"))
    side = recorder.ask([user("make a title")], odd("thee"))
    main2 = recorder.ask([user("main"), said(main), user("go")], odd("the"))
    side2 = recorder.ask([user("make a title"), said(side), user("shorter")], odd("the"))
    assert (main2.parent, side2.parent) == (main.id, side.id)
    assert recorder.continues(main2)
    assert recorder.continues(side2)


def contains(ids: Any, part: Sequence[int]) -> bool:
    whole = list(ids)
    return any(whole[at : at + len(part)] == list(part) for at in range(len(whole)))


def call_ids(name: str, number: int) -> list[int]:
    """A call in a spelling that no template chooses."""
    folder = _made[name]._folder  # type: ignore[attr-defined]
    text = f'<tool_call>{{"arguments":  {{"n": {number}}}, "name":"run"}}</tool_call>'
    return [*folder.encode(text), folder.special["<|im_end|>"]]


class Counting:
    """Counts what a renderer is asked for."""

    def __init__(self, renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.extended = self.rendered = 0
        extend, render = renderer.extend, renderer.render

        def counted_extend(*how: Any) -> Any:
            self.extended += 1
            return extend(*how)

        def counted_render(*how: Any) -> Any:
            self.rendered += 1
            return render(*how)

        monkeypatch.setattr(renderer, "extend", counted_extend)
        monkeypatch.setattr(renderer, "render", counted_render)


def renamed(turn: Turn) -> Message:
    """As OpenClaw sends a reply back: ids without their punctuation."""
    calls = [ToolCall(id=c.id.replace("_", ""), name=c.name, arguments=c.arguments) for c in turn.message.tool_calls]
    return Message(role="assistant", content=turn.message.content, tool_calls=tuple(calls))


def test_an_agent_with_a_volatile_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    """It renames calls and ends each request with a message that is gone from the next: what the replies cost does not
    grow, all keep their ids, and each turn follows the one before."""
    counts = Counting(_made["tools"], monkeypatch)
    recorder = Recorder(_made["tools"], (TOOL,))
    history = [user("task")]
    turns: list[Turn] = []
    costs = []
    for number in range(20):
        before = counts.extended
        turn = recorder.ask([*history, user(f"it is {number} o'clock")], call_ids("tools", number))
        costs.append(counts.extended - before)
        assert all(contains(recorder.sent[-1], one.completion.tolist()) for one in turns)
        turns.append(turn)
        reply = renamed(turn)
        history += [reply, Message(role="tool", content=f"out {number}", tool_call_id=reply.tool_calls[0].id)]
    recorder.check()
    assert max(costs) <= 2
    assert counts.rendered <= 3
    stored = sum(len(turn.context) + len(turn.completion) for turn in recorder.tree.turns)
    assert stored < 3 * (turn.prompt_tokens + turn.completion_tokens)


def test_a_system_message_that_changes_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A header with a price in it: the prompts differ from the start, but replies keep their ids, and what was rendered
    between them is not rendered again."""
    counts = Counting(_made["tools"], monkeypatch)
    recorder = Recorder(_made["tools"], (TOOL,))
    history = [user("task")]
    turns: list[Turn] = []
    for number in range(20):
        before = counts.extended
        turn = recorder.ask([Message(role="system", content=f"cost {number}"), *history], call_ids("tools", number))
        assert counts.extended - before <= 2
        assert all(contains(recorder.sent[-1], one.completion.tolist()) for one in turns)
        text = _made["tools"].decode(recorder.sent[-1])
        assert f"cost {number}" in text
        assert all(f"out {earlier}" in text for earlier in range(number))
        turns.append(turn)
        history += [turn.message, Message(role="tool", content=f"out {number}", tool_call_id="x")]
    recorder.check()


def test_calls_told_as_text_are_recognised() -> None:
    """smolagents writes calls into the assistant's text, and results into the user's."""
    recorder = Recorder(_made["tools"], (TOOL,))
    one = recorder.ask([user("q")], [*odd("the")[:-1], *call_ids("tools", 1)])
    call = one.message.tool_calls[0]
    function = {"name": call.name, "arguments": json.loads(call.arguments)}
    told = f"the\nCalling tools:\n{[{'id': call.id, 'type': 'function', 'function': function}]}"
    two = recorder.ask(
        [user("q"), Message(role="assistant", content=told), user("Observation:\n5")], call_ids("tools", 2)
    )
    assert recorder.continues(two)
    quoted = Message(role="assistant", content=f"{told} and then, in short: " + "x" * 2000)
    three = recorder.ask([user("q"), quoted, user("Observation:\n5")], odd("the"))
    assert not recorder.continues(three)
    recorder.check()


def test_compaction_begins_anew() -> None:
    recorder = Recorder(_made["tools"], (TOOL,))
    system = Message(role="system", content="be brief")
    one = recorder.ask([system, user("q")], call_ids("tools", 1))
    recorder.ask([system, user("q"), said(one), Message(role="tool", content="o")], odd("the"))
    compacted = recorder.ask([system, user("Summary: it went well.")], odd("the"))
    assert compacted.shared < one.prompt_tokens
    after = recorder.ask([system, user("Summary: it went well."), said(compacted), user("go on")], odd("the"))
    assert recorder.continues(after)
    recorder.check()


def test_marks_on_tools_are_nobodys_business() -> None:
    """``cache_control`` moves from tool to tool, and is no part of what the model is told."""
    recorder = Recorder(_made["tools"])
    marked = TOOL | {"cache_control": {"type": "ephemeral"}}
    inside = {"type": "function", "function": TOOL["function"] | {"defer_loading": True}}  # type: ignore[operator]
    one = recorder.ask([user("q")], call_ids("tools", 1), tools=(marked,))
    two = recorder.ask([user("q"), said(one), Message(role="tool", content="o")], odd("the"), tools=(inside,))
    assert recorder.continues(two)
    assert "ephemeral" not in _made["tools"].decode(recorder.sent[0])
    assert "defer" not in _made["chatml"].decode(_made["chatml"].render([user("q")], [inside]))


def test_results_go_to_the_calls_as_they_were_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The template sees results under the ids of the recorded calls, whatever the agent calls them."""
    renderer = _made["tools"]
    seen: list[Any] = []
    extend = renderer.extend
    monkeypatch.setattr(renderer, "extend", lambda m, c, new, t: (seen.append(new), extend(m, c, new, t))[1])
    recorder = Recorder(renderer, (TOOL,))
    one = recorder.ask([user("q")], [*call_ids("tools", 1)[:-1], *call_ids("tools", 2)])
    own = [call.id for call in one.message.tool_calls]
    theirs = tuple(
        ToolCall(id=f"t{n}", name=c.name, arguments=c.arguments) for n, c in enumerate(one.message.tool_calls)
    )
    nameless = tuple(ToolCall(id="", name=c.name, arguments=c.arguments) for c in theirs)
    for calls, named, expected in (
        (theirs, ["t1", "t0"], [own[1], own[0]]),
        (nameless, [None, None], own),
        (theirs, ["other", "t0"], [own[0], own[1]]),
        (one.message.tool_calls, [own[1], own[0]], [own[1], own[0]]),
    ):
        results = [Message(role="tool", content=str(n), tool_call_id=id) for n, id in enumerate(named)]
        turn = recorder.ask([user("q"), said(one, tool_calls=calls), *results], odd("the"))
        assert recorder.continues(turn)
        assert [message.tool_call_id for message in seen[-1]] == expected


def test_a_call_that_had_to_be_made_keeps_its_beginning() -> None:
    """Also where its history is put together anew."""
    recorder = Recorder(_made["tools"], (TOOL,))
    opening = _made["tools"].call_opening("run")
    assert opening is not None
    folder = _made["tools"]._folder  # type: ignore[attr-defined]
    rest = [*folder.encode(' {"n":  1}}</tool_call>'), END]
    one = recorder.ask([user("q")], rest, opening=opening.tolist())
    assert len(one.message.tool_calls) == 1
    recorder.ask([user("changed"), said(one), Message(role="tool", content="o")], odd("the"))
    assert contains(recorder.sent[-1], [*opening.tolist(), *rest])


#: What agents do to a request, given what they did before: see each.
WAYS = ("tail", "header", "rename", "drop_reasoning", "reserialise", "strip", "flatten")


@given(data=st.data(), name=st.sampled_from([*KEEPING, *NASTY]))
@settings(max_examples=40, deadline=None)
def test_whatever_agents_do_replies_keep_their_ids(data: st.DataObject, name: str) -> None:
    """Two conversations in one session, each agent with habits of its own."""
    tools = (TOOL,) if name in WITH_TOOLS else ()
    recorder = Recorder(_made[name], tools)
    habits = [data.draw(st.sets(st.sampled_from(WAYS), max_size=3)) for _ in range(2)]
    histories: list[list[Message]] = [[user(f"task {n}")] for n in range(2)]
    said_by: list[list[Turn]] = [[], []]
    for number in range(data.draw(st.integers(2, 7))):
        who = data.draw(st.integers(0, 1))
        request = list(histories[who])
        if "header" in habits[who]:
            request.insert(0, Message(role="system", content=f"header {number}"))
        if "tail" in habits[who]:
            request.append(user(f"tail {number}"))
        turn = recorder.ask(request, data.draw(completions(name)))
        for earlier in said_by[who]:
            assert contains(recorder.sent[-1], earlier.completion.tolist())
        said_by[who].append(turn)
        reply, results = habitual(turn.message, habits[who])
        histories[who] += [reply, *(results or [user(data.draw(words))])]
    recorder.check()


def after_thought(turn: Turn, folder: Any) -> list[int]:
    """The ids of a reply without its reasoning, however that is spelled."""
    tokens = turn.completion.tolist()
    if turn.message.reasoning is None:
        return tokens
    start = next((n for n in range(len(tokens)) if "</think>" in folder.decode(tokens[: n + 1], special=True)), None)
    if start is None:
        return []
    rest = tokens[start + 1 :]
    while rest and not folder.decode(rest[:1], special=True).strip():
        rest = rest[1:]
    return rest


@given(data=st.data(), name=st.sampled_from([name for name in REWRITING if name != "shortens"]))
@settings(max_examples=40, deadline=None)
def test_where_a_template_rewrites_history_replies_keep_their_ids(data: st.DataObject, name: str) -> None:
    """All but the reasoning that it drops."""
    recorder = Recorder(_made[name])
    folder = _made[name]._folder  # type: ignore[attr-defined]
    history = [user("task")]
    turns: list[Turn] = []
    for number in range(data.draw(st.integers(2, 5))):
        turn = recorder.ask(history, data.draw(completions(name)))
        for earlier in turns:
            assert contains(recorder.sent[-1], after_thought(earlier, folder))
        turns.append(turn)
        extra = [Message(role="system", content=f"rule {number}")] if data.draw(st.booleans()) else []
        history = [*history, echo(data.draw, turn.message), user(data.draw(words)), *extra]
    recorder.check()


async def test_conversations_at_once_in_one_session(bench: Any) -> None:
    """A main agent, its sub-agents and a title call share a key and run at the same time: each goes on from its own
    turns, and what is recorded is what the engine was given, id by id."""
    bench.engine.reply = lambda request, prompt: f"reply {len(prompt) % 7}"

    async def converse(name: str) -> None:
        messages: list[Any] = [f"task of {name}"]
        for number in range(6):
            messages.append(await bench.ask(*messages))
            messages.append({"role": "user", "content": f"{name} {number}"})

    await asyncio.gather(*(converse(name) for name in ("main", "one", "two", "title")))
    turns = {turn.id: turn for turn in bench.session.turns}
    assert len(turns) == 24
    given = sorted(request.prompt.tolist() for request in bench.engine.requests)
    assert sorted(prompt_of(turn, turns.__getitem__).tolist() for turn in turns.values()) == given
    whole = [t for t in turns.values() if t.parent and t.shared == len(sequence_of(turns[t.parent], turns.__getitem__))]
    assert len(whole) == 20


def test_prompts_are_built_while_turns_are_recorded() -> None:
    """Long conversations are put together in threads of their own."""
    recorder = Recorder(_made["plain"])
    first = recorder.ask([user("q")], odd("the"))
    history = [user("q"), said(first), user("r")]
    stop = threading.Event()
    failed: list[BaseException] = []

    def build() -> None:
        try:
            while not stop.is_set():
                for number in range(8):
                    request = [*history, user(f"x{number}")]
                    build_prompt(recorder.renderer, recorder.tree, Conversation.of(request, ()), ids(()))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=build) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(40):
        recorder.ask([*history, user(str(number))], odd("the"))
    stop.set()
    for thread in threads:
        thread.join()
    assert not failed
    recorder.check()


def habitual(message: Message, habits: set[str]) -> tuple[Message, list[Message]]:
    """A reply and the results of its calls, as an agent with some habits sends them."""
    calls = [
        ToolCall(
            id=f"x{number}" if "rename" in habits else call.id,
            name=call.name,
            arguments=json.dumps(json.loads(call.arguments), separators=(",", ":"))
            if "reserialise" in habits
            else call.arguments,
        )
        for number, call in enumerate(message.tool_calls)
    ]
    results = [Message(role="tool", content="out", tool_call_id=call.id) for call in calls]
    content = message.content.strip() if "strip" in habits else message.content
    if "flatten" in habits and calls and "rename" not in habits:
        listed = [{"id": c.id, "function": {"name": c.name, "arguments": c.arguments}} for c in calls]
        return Message(role="assistant", content=f"{content}\nCalling tools:\n{listed}"), [user("Observation: out")]
    reasoning = None if "drop_reasoning" in habits else message.reasoning
    return Message(role="assistant", content=content, reasoning=reasoning, tool_calls=tuple(calls)), results


@given(data=st.data(), name=st.sampled_from([*KEEPING, *REWRITING]))
@settings(max_examples=40, deadline=None)
def test_a_folded_history_is_gone_on_from_as_the_whole(data: st.DataObject, name: str) -> None:
    """A template is asked about a short history in place of a long one: the answer is the same."""
    renderer = _made[name]
    thought = st.sampled_from([None, "hm"])
    exchange = st.sampled_from(["call", "calls", "talk"])
    history = [Message(role="system", content="s"), user("q")]
    for number in range(data.draw(st.integers(6, 20))):
        kind = data.draw(exchange)
        count = {"call": 1, "calls": 2, "talk": 0}[kind] if name == "tools" else 0
        calls = tuple(ToolCall(id=f"c{n}", name="run", arguments="{}") for n in range(count))
        reply = Message(role="assistant", content=f"r{number}", reasoning=data.draw(thought), tool_calls=calls)
        results = [Message(role="tool", content=f"o{n}", tool_call_id=call.id) for n, call in enumerate(calls)]
        history += [reply, *(results or [user(f"u{number}")])]
    reply = Message(role="assistant", content="last", reasoning=data.draw(thought))
    new = [data.draw(st.sampled_from([user("and"), Message(role="tool", content="o"), Message(role="system")]))]
    tools = (TOOL,) if name == "tools" else ()
    folded = renderer.extend([*history, reply], ids([1]), new, tools)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template, "_SHORT_HISTORY", 10**9)
        whole = renderer.extend([*history, reply], ids([1]), new, tools)
    assert (None if folded is None else folded.tolist()) == (None if whole is None else whole.tolist())


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_what_was_met_before_has_the_same_digests(data: st.DataObject) -> None:
    """Digests of a conversation's beginning are taken over from an earlier request, and are what they would be anew."""
    tree = TurnTree()
    message = st.sampled_from([user("a"), user("b"), Message(role="assistant", content="a"), Message(role="system")])
    for _ in range(4):
        messages = data.draw(st.lists(message, min_size=1, max_size=5))
        tools = data.draw(st.sampled_from([(), (TOOL,)]))
        met, alone = Conversation.of(messages, tools), Conversation.of(messages, tools)
        tree.meet(met)
        assert (met.messages, met.digests, met.links, met.key) == (
            alone.messages,
            alone.digests,
            alone.links,
            alone.key,
        )


def test_other_tools_are_another_conversation() -> None:
    recorder = Recorder(_made["tools"], (TOOL,))
    one = recorder.ask([user("q")], odd("the"))
    two = recorder.ask([user("q"), said(one), user("r")], odd("the"), tools=())
    assert not recorder.continues(two)
    spelled = recorder.sent[1].tolist()
    assert any(spelled[at : at + 4] == odd("the") for at in range(len(spelled)))


def test_of_equal_texts_the_one_with_the_callers_ids_is_continued() -> None:
    recorder = Recorder(_made["tools"], (TOOL,))
    call = '<tool_call>{"name": "run", "arguments": {}}</tool_call>'
    folder = _made["tools"]._folder  # type: ignore[attr-defined]
    first = recorder.ask([user("q")], [*folder.encode(call), END])
    second = recorder.ask([user("q")], [*folder.encode(call.replace(" ", "  ")), END])
    out = Message(role="tool", content="x")
    assert recorder.ask([user("q"), said(first), out], odd("the")).parent == first.id
    assert recorder.ask([user("q"), said(second), out], odd("the")).parent == second.id


def test_a_rewritten_turn_says_whom_it_follows() -> None:
    renderer = _made["drops_reasoning"]
    folder = renderer._folder  # type: ignore[attr-defined]
    tree = TurnTree()
    recorder = Recorder(renderer)
    recorder.tree = tree
    one = recorder.ask([user("q")], [*folder.encode("<think>hm</think>a"), END])
    prompt = build_prompt(renderer, tree, Conversation.of([user("q"), said(one), user("r")], ()), ids(()))
    assert prompt.follows is one
    assert prompt.shared == one.prompt_tokens
    assert "<think>" not in renderer.decode(prompt.ids)


def test_a_thousand_turns_are_stored_once() -> None:
    """Fault 21: storage grows with what is new, not with turns times length."""
    recorder = Recorder(_made["chatml"])
    messages = [user("q" * 200)]
    for _ in range(150):
        turn = recorder.ask(messages, odd("the"))
        messages += [said(turn), user("next")]
    stored = sum(len(turn.context) + len(turn.completion) for turn in recorder.tree.turns)
    assert stored == turn.prompt_tokens + turn.completion_tokens
    branch = recorder.ask([user("q" * 200 + "!"), *messages[1:]], odd("the"))
    assert branch.shared > 150


@given(
    sequences=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), max_size=12),
    query=st.lists(st.integers(0, 2), max_size=9),
)
@settings(max_examples=120, deadline=None)
def test_the_longest_shared_prefix_is_found(sequences: list[list[int]], query: list[int]) -> None:
    tree = TurnTree()
    for number, sequence in enumerate(sequences):
        prompt, completion = ids(sequence[:-1]), ids(sequence[-1:])
        parent, shared = tree.shared_prefix(prompt)
        turn = Turn(
            id=str(number),
            session="s",
            index=number,
            policy="m",
            sampling=SamplingParams(),
            parent=parent,
            shared=shared,
            context=ids(prompt[shared:]),
            completion=completion,
            logps=logps([0.0]),
            versions=ids([0]),
            finish_reason="stop",
            message=Message(role="assistant", content=str(number)),
            prompt_tokens=len(prompt),
            completion_tokens=1,
        )
        tree.add(turn, Conversation.of([user(str(number))], ()), None)
    for number, sequence in enumerate(sequences):
        assert tree.sequence(tree.turn(str(number))).tolist() == sequence
    parent, shared = tree.shared_prefix(ids(query))
    assert shared == max((_common(ids(query), ids(one)) for one in sequences), default=0)
    assert (parent is None) == (shared == 0)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ('{"a": 1, "b": "é"}', '{"b":"\\u00e9","a":1.0}', True),
        ('{"a": 1}', '{"a": "1"}', False),
        ('{"a": 100000000000000000000001}', '{"a": 100000000000000000000000}', False),
        ('{"a": true}', '{"a": 1}', False),
        ("{}", " {} ", True),
        ("not json", "not json ", True),
        ("not json", '{"arguments": "not json"}', True),
        ('{"a": NaN}', '{"a": null}', False),
        ('{"a": 1e999}', '{"a": 1e998}', True),
    ],
)
def test_arguments_are_compared_by_value(one: str, other: str, same: bool) -> None:
    def digest(arguments: str) -> bytes:
        call = ToolCall(id=arguments, name="f", arguments=arguments)
        return canonical.digest(Message(role="assistant", tool_calls=(call,)))

    assert (digest(one) == digest(other)) is same


def test_what_does_not_matter_does_not_count() -> None:
    plain = Message(role="assistant", content="a")
    assert canonical.digest(plain) == canonical.digest(
        Message(role="assistant", content=" a\n", reasoning="x", name="n")
    )
    assert canonical.digest(plain) != canonical.digest(Message(role="user", content="a"))
    assert canonical.digest(plain) != canonical.digest(Message(role="assistant", content="A"))


def test_deep_arguments_are_compared_as_text() -> None:
    deep = "[" * (sys.getrecursionlimit() * 50)
    call = ToolCall(id="", name="f", arguments=deep)
    assert canonical.digest(Message(role="assistant", tool_calls=(call,)))
