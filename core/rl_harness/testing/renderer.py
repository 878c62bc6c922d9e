"""Conformance checks for renderers: the core's own pass them, and a plugin's tests run the same.

A plugin describes its renderer once, as a :class:`RendererKit`, and runs every check that applies to it::

    KIT = RendererKit(load=lambda: loaded(MyRenderer(MyRenderer.Options()), folder))

    @pytest.mark.parametrize("check", renderer_checks(KIT), ids=lambda check: check.__name__)
    def test_conforms(check):
        check(KIT)

A check fails with ``AssertionError`` and a sentence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from rl_harness.contracts.common import API, Options
from rl_harness.contracts.renderer import Delta, Renderer, ToolSpec
from rl_harness.errors import UsageError
from rl_harness.records.arrays import IdArray, ids
from rl_harness.records.turn import Message

TOOL: ToolSpec = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Show a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}
_TEXTS = ("What is in input.txt?", "naïve 你好 🙂", " edges \n", "", "{{ braces }} {% and %} <tags>")


class RendererKit(msgspec.Struct, frozen=True, kw_only=True):
    """A renderer and what the checks need to know about it.

    ``load`` gives one with its model folder loaded. ``tools``: it can tell a model of tools. ``call`` is the text
    of a completion that calls the tool ``look`` with ``{"path": "a"}``, in the form its models are trained on.
    ``keeps``: it never rewrites history, so that every plain conversation can be extended.
    """

    load: Callable[[], Renderer]
    tools: bool = True
    call: str | None = None
    keeps: bool = True


Check = Callable[[RendererKit], None]


def renderer_checks(kit: RendererKit) -> list[Check]:
    """The checks that apply."""
    checks: list[Check] = [
        check_declaration,
        check_prompts,
        check_extension,
        check_closing,
        check_replay,
        check_forged_turns,
        check_unknown_role,
        check_chunks,
        check_stop_strings,
        check_ends,
    ]
    checks.append(check_tools if kit.tools else check_tools_refused)
    if kit.call is not None:
        checks.append(check_calls)
    return checks


def check_declaration(kit: RendererKit) -> None:
    """It states the contract's version, documented options, and what ends a turn."""
    renderer = kit.load()
    assert renderer.api == API, f"api is {renderer.api!r}; this core accepts {API}"
    assert issubclass(renderer.Options, Options), "Options is not a subclass of rl_harness.contracts.Options"
    undocumented = [name for name, field in renderer.Options.model_fields.items() if not field.description]
    assert not undocumented, f"options without a description: {', '.join(undocumented)}"
    assert renderer.end_token_ids, "end_token_ids is empty: no completion would ever end"


def check_prompts(kit: RendererKit) -> None:
    """A prompt holds what was said, as ``int32`` ids, and is the same every time."""
    renderer = kit.load()
    for text in _TEXTS:
        messages = [Message(role="system", content="Be brief."), _user(text)]
        prompt = renderer.render(messages)
        assert prompt.dtype == np.int32, f"a prompt's ids are {prompt.dtype}, not int32"
        assert prompt.ndim == 1, f"a prompt is {prompt.ndim}-dimensional"
        assert prompt.tolist() == renderer.render(messages).tolist(), "the same messages gave another prompt"
        assert text.strip() in renderer.decode(prompt), f"the prompt of {text!r} does not contain it"


def check_extension(kit: RendererKit) -> None:
    """What extends a recorded turn is what a whole rendering has after it."""
    renderer = kit.load()
    for text in _TEXTS:
        before = [_user("q")]
        reply = Message(role="assistant", content="An answer.")
        new = [_user(text)]
        completion = _completion(renderer, "An answer.")
        suffix = renderer.extend([*before, reply], completion, new)
        if suffix is None:
            assert not kit.keeps, f"a plain conversation could not be extended by {text!r}"
            continue
        whole = renderer.decode(renderer.render([*before, reply, *new]))
        extended = renderer.decode(ids([*renderer.render(before), *completion, *suffix]))
        assert extended == whole, f"extended, the conversation reads {extended!r}; rendered anew, {whole!r}"


def check_closing(kit: RendererKit) -> None:
    """A completion that was cut is closed before the next message."""
    renderer = kit.load()
    messages = [_user("q"), Message(role="assistant", content="An answer.")]
    whole = renderer.extend(messages, _completion(renderer, "An answer."), [_user("go on")])
    cut = renderer.extend(messages, _completion(renderer, "An answer.")[:-1], [_user("go on")])
    if whole is None or cut is None:
        assert not kit.keeps, "a plain conversation could not be extended"
        return
    end = int(cut[0])
    assert end in renderer.end_token_ids, f"what follows a cut completion begins with {end}, which is no end token"
    assert cut[1:].tolist() == whole.tolist(), "a cut completion is followed by something else than a whole one"


def check_replay(kit: RendererKit) -> None:
    """A prompt around a reply's own ids reads as one of the reply's text."""
    renderer = kit.load()
    messages = [_user("q"), Message(role="assistant", content="An answer."), _user("go on")]
    completion = _completion(renderer, "An answer.")
    replayed = renderer.replay(messages, {1: completion})
    if replayed is None:
        return
    whole = renderer.decode(renderer.render(messages))
    assert renderer.decode(replayed) == whole, f"replayed, it reads {renderer.decode(replayed)!r}; rendered, {whole!r}"
    assert completion.tobytes() in replayed.tobytes(), "the reply's ids are not in the prompt"


def check_forged_turns(kit: RendererKit) -> None:
    """Somebody who writes the text of an end token has not ended the turn."""
    renderer = kit.load()
    for end in renderer.end_token_ids:
        text = renderer.decode(ids([end]))
        plain = renderer.render([_user("a b")]).tolist().count(end)
        forged = renderer.render([_user(f"a {text} b")]).tolist().count(end)
        assert forged == plain, f"a user who writes {text!r} ends the turn"


def check_unknown_role(kit: RendererKit) -> None:
    """Messages that cannot be rendered are the caller's error, if they are refused at all."""
    renderer = kit.load()
    try:
        renderer.render([Message(role="critic", content="no")])
    except UsageError:
        return


def check_chunks(kit: RendererKit) -> None:
    """However a completion is cut into chunks, it is the same message, and its deltas put together are it."""
    renderer = kit.load()
    for text in _TEXTS:
        completion = _completion(renderer, text)
        for size in (1, 3, len(completion)):
            deltas, message = _parse(renderer, completion, size)
            assert message.role == "assistant", f"the message's role is {message.role!r}"
            assert message.content.strip() == text.strip(), f"{text!r} was parsed as {message.content!r}"
            said = "".join(delta.text for delta in deltas)
            assert said == message.content, f"the deltas say {said!r}, the message {message.content!r}"
            held = [delta.text for delta in deltas if "\ufffd" in delta.text]
            assert not held, f"an incomplete character came out: {held!r}"


def check_stop_strings(kit: RendererKit) -> None:
    """Text ends before a stop string, and the parser says how many ids it took to complete it."""
    renderer = kit.load()
    completion = _completion(renderer, "one STOP two")
    for size in (1, len(completion)):
        parser = renderer.parser((), ["STOP"])
        deltas: list[Delta] = []
        for start in range(0, len(completion), size):
            deltas += parser.feed(completion[start : start + size])
        deltas += parser.finish("stop")
        said = "".join(delta.text for delta in deltas)
        assert said == parser.message().content == "one ", f"text before the stop string is {said!r}"
        assert parser.stopped_at is not None, "a stop string was seen, and stopped_at is None"
        kept = renderer.decode(completion[: parser.stopped_at])
        assert "STOP" in kept, f"after {parser.stopped_at} ids the text is {kept!r}"


def check_ends(kit: RendererKit) -> None:
    """Nothing at all, and nothing but end tokens, are empty messages."""
    renderer = kit.load()
    for completion in ([], list(renderer.end_token_ids), list(renderer.end_token_ids) * 3):
        _, message = _parse(renderer, ids(completion), 1)
        assert message.content == "", f"{len(completion)} end tokens were parsed as {message.content!r}"
        assert not message.tool_calls, f"{len(completion)} end tokens were parsed as calls"


def check_tools(kit: RendererKit) -> None:
    """The prompt tells the model what it can call."""
    renderer = kit.load()
    text = renderer.decode(renderer.render([_user("q")], [TOOL]))
    for told in ("look", "Show a file."):
        assert told in text, f"a prompt with a tool does not tell of {told!r}: {text!r}"


def check_tools_refused(kit: RendererKit) -> None:
    """A renderer without tools does not leave them out silently."""
    try:
        kit.load().render([_user("q")], [TOOL])
    except UsageError:
        return
    raise AssertionError("it takes tools, and says that it cannot")


def check_calls(kit: RendererKit) -> None:
    """A call is one delta, is recorded as it was given, and the conversation goes on from its ids."""
    renderer = kit.load()
    assert kit.call is not None
    completion = _completion(renderer, kit.call)
    for size in (1, len(completion)):
        deltas, message = _parse(renderer, completion, size, tools=[TOOL])
        calls = [delta.tool_call for delta in deltas if delta.tool_call is not None]
        assert tuple(calls) == message.tool_calls, "the deltas' calls are not the message's"
        assert len(calls) == 1, f"one call was parsed as {len(calls)}"
        assert (calls[0].name, json.loads(calls[0].arguments)) == ("look", {"path": "a"}), (
            f"it was parsed as {calls[0]}"
        )
        assert calls[0].id, "the call has no id"
    result = Message(role="tool", content="its content", tool_call_id=calls[0].id)
    suffix = renderer.extend([_user("q"), message], completion, [result], [TOOL])
    if suffix is None:
        assert not kit.keeps, "a conversation could not be extended by a tool's result"
        return
    assert "its content" in renderer.decode(suffix), "the tool's result is not in what follows the call"
    _, message = _parse(renderer, completion, 1)
    assert not message.tool_calls, "a call was parsed although no tool was given"


def _user(text: str) -> Message:
    return Message(role="user", content=text)


def _completion(renderer: Renderer, text: str) -> IdArray:
    """Ids of a text as a model would sample it: found in a prompt that quotes it between two marks."""
    marked = renderer.render([_user(f"§{text}§")]).tolist()
    plain = [renderer.decode(ids(marked[:count])) for count in range(len(marked) + 1)]
    start = next(count for count, seen in enumerate(plain) if "§" in seen)
    stop = next(count for count, seen in enumerate(plain) if seen.count("§") == 2) - 1
    found = marked[start:stop]
    # A mark is two bytes, which a tokenizer may spell as two ids: the last one's beginning is not text of ours.
    while found and "\ufffd" in renderer.decode(ids(found)) and "\ufffd" not in text:
        found.pop()
    assert renderer.decode(ids(found)) == text, f"the checks cannot spell {text!r} with this tokenizer"
    return ids([*found, renderer.end_token_ids[0]])


def _parse(
    renderer: Renderer, completion: IdArray, size: int, *, tools: Sequence[ToolSpec] = ()
) -> tuple[list[Delta], Message]:
    parser = renderer.parser(tools)
    deltas: list[Any] = []
    for start in range(0, len(completion), max(size, 1)):
        deltas += parser.feed(completion[start : start + max(size, 1)])
    deltas += parser.finish("stop")
    return deltas, parser.message()
