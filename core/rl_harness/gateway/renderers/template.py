"""The renderer ``template``: a model folder's own chat template, in sandboxed Jinja.

The template is a black box. :meth:`TemplateRenderer.extend` finds out whether it keeps what came before by
rendering the conversation with a marker in place of the recorded reply, and takes only the text after it.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec
import numpy as np
from pydantic import Field

from rl_harness.contracts.common import Options
from rl_harness.contracts.renderer import Renderer, ToolSpec
from rl_harness.errors import ConfigError, Unavailable, UsageError
from rl_harness.gateway.arguments import load_object
from rl_harness.gateway.canonical import plain_tool
from rl_harness.gateway.renderers.formats import FORMATS, ToolFormat, detect
from rl_harness.gateway.renderers.streams import END_THINK, THINK, THOUGHTS, IncrementalDecoder, TaggedParser
from rl_harness.gateway.renderers.tokenizer import TokenizerFolder
from rl_harness.records.arrays import IdArray, ids
from rl_harness.records.turn import Message, ToolCall

#: Stands for a recorded reply while a template renders it; no template changes or splits such a word.
_MARK = "rlharness0reply0mark"
_MARK_THOUGHT = "rlharness0thought0mark"

#: Messages of a history that a template is asked about as it is.
_SHORT_HISTORY = 12
#: Characters of an earlier message that are enough for a template.
_LONG = 400
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_PROBE: ToolSpec = {
    "type": "function",
    "function": {"name": "probe", "description": "d", "parameters": {"type": "object", "properties": {}}},
}


class TemplateOptions(Options):
    template: Path | None = Field(None, description="a Jinja file to use instead of the model folder's own template")
    kwargs: dict[str, Any] = Field({}, description="variables for the template, such as enable_thinking")
    tool_format: str | None = Field(
        None, description=f"how the model writes tool calls: {', '.join(FORMATS)}; unset: as its template shows"
    )


class TemplateRenderer(Renderer):
    """Any model whose folder has ``tokenizer.json`` and a chat template."""

    api = 1
    Options = TemplateOptions

    def __init__(self, options: TemplateOptions) -> None:
        super().__init__(options)
        self._options = options

    def load(self, path: Path) -> None:
        self._folder = TokenizerFolder(path)
        source, with_tools = self._sources(path)
        self._template = ChatTemplate(source, self._folder.named_tokens(), self._options.kwargs)
        self._tool_template = (
            self._template
            if with_tools == source
            else ChatTemplate(with_tools, self._folder.named_tokens(), self._options.kwargs)
        )
        self._form = self._find_form(with_tools)
        self._calls = _CallShape.of(self._tool_template) if self._tool_template.takes_tools else _CallShape()
        self._turn_end = self._find_turn_end()
        turn_end = () if self._turn_end is None else (self._folder.special[self._turn_end],)
        self._end_ids = tuple(dict.fromkeys(turn_end + self._folder.end_ids()))
        # What else the template itself ends turns with (Llama's calls have an end of their own).
        self._closing = {
            number for number in self._end_ids if self._folder.decode([number], special=True) in source + with_tools
        }
        self._closing.update(turn_end)
        self._thought = self._opened_thought()
        self._turn_start, self._thought_start = self._find_turn_start()

    def _find_form(self, source: str) -> ToolFormat | None:
        name = self._options.tool_format
        if name is None:
            return detect(source, self._folder.added)
        if name not in FORMATS:
            raise ConfigError(f"renderer.tool_format: {name!r} is none of {', '.join(FORMATS)}")
        return FORMATS[name]

    def _sources(self, path: Path) -> tuple[str, str]:
        file = self._options.template
        if file is not None:
            try:
                text = file.read_text(encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"renderer.template: {file} cannot be read: {error.strerror}") from error
            return text, text
        source = self._folder.chat_template(tools=False)
        if source is None:
            raise Unavailable(
                f"{path} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json)",
                remedy="choose another renderer (-o renderer.name=chatml) or give one (-o renderer.template=FILE)",
            )
        return source, self._folder.chat_template(tools=True) or source

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        return self._end_ids

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> IdArray:
        return ids(self._encode(*self._text(messages, tools, prompt=True)))

    def extend(
        self,
        messages: Sequence[Message],
        completion: IdArray,
        new: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
    ) -> IdArray | None:
        reply = messages[-1]
        try:
            template = self._template_for(tools)
            hidden: dict[str, str] = {}
            history = [self._shape(self._recalled(message), template, hidden) for message in folded(messages[:-1])]
            if not _shows_reasoning(reply, template):
                reply = msgspec.structs.replace(reply, reasoning=None)
            after = [self._shape(message, template, hidden) for message in (_marked(reply), *new)]
            before = template.render(history, tools[:1], prompt=True)
            whole = template.render(history + after, tools[:1], prompt=True)
        except UsageError:
            # What is new may be refused only after this history; a fresh rendering says so properly.
            return None
        if not whole.startswith(before):
            return None
        rest = self._after_reply(whole[len(before) :], reply)
        if rest is None:
            return None
        end = self._turn_end
        if end is None:
            return ids(self._encode(rest, hidden))
        # Encoded together with the end token, since a tokenizer may treat what follows one differently.
        suffix = self._encode(end + rest, hidden)
        closed = len(completion) > 0 and int(completion[-1]) in self._closing
        return ids(suffix[1:] if closed else suffix)

    def replay(
        self, messages: Sequence[Message], completions: Mapping[int, IdArray], tools: Sequence[ToolSpec] = ()
    ) -> IdArray | None:
        if self._turn_end is None:
            return None
        template = self._template_for(tools)
        hidden: dict[str, str] = {}
        shaped = [
            self._shape(_marked(message, position) if position in completions else message, template, hidden)
            for position, message in enumerate(messages)
        ]
        text = template.render(shaped, tools, prompt=True)
        pieces: list[IdArray | list[int]] = []
        at, closed = 0, False
        for position in sorted(completions):
            mark, thought = _marks(position)
            if mark not in text:
                continue  # the template leaves the whole reply out
            found = text.find(mark, at)
            kept = thought in text[at : max(found, at)]
            start = None if found < 0 else self._reply_start(text, at, found, kept)
            end = text.find(self._turn_end, found)
            own: IdArray | None = completions[position]
            if not kept and (_shows_reasoning(messages[position], template) or self._thought is not None):
                own = self._without_reasoning(completions[position])
            if start is None or end < 0 or own is None or text.count(mark) != 1:
                return None
            pieces += [self._encode(text[at:start], hidden)[int(closed) :], own]
            at, closed = end, len(own) > 0 and int(own[-1]) in self._closing
        pieces.append(self._encode(text[at:], hidden)[int(closed) :])
        return ids(np.concatenate([np.asarray(piece, dtype=np.int32) for piece in pieces]))

    def _reply_start(self, text: str, at: int, mark: int, kept: bool) -> int | None:
        """Where the reply with a mark begins in ``text[at:]``: after what opens an assistant's turn, and after what the
        template makes of reasoning that it drops. ``kept``: the reasoning is there."""
        if self._turn_start:
            begin = text.rfind(self._turn_start, at, mark)
            if begin < 0:
                return None
            begin += len(self._turn_start)
        else:  # right after what came before
            tags = self._form.tags if self._form else ()
            pieces = self._folder.split_special(text[at:mark])
            last = max((n for n in range(1, len(pieces), 2) if pieces[n] not in tags), default=-1)
            begin = at + sum(map(len, pieces[: last + 1]))
        if kept:
            return begin + len(self._thought_start) if text.startswith(self._thought_start, begin) else None
        for end in THOUGHTS.values():
            _, tag, after = text[begin:mark].rpartition(end)
            if tag:
                begin = mark - len(after.lstrip())
        return begin

    def _without_reasoning(self, completion: IdArray) -> IdArray | None:
        """The ids of a reply after its reasoning; None if one id holds of both."""
        decoder = IncrementalDecoder(self._folder, (*THOUGHTS, *THOUGHTS.values()))
        text, reasons = "", self._thought is not None
        for position, token in enumerate(completion.tolist()):
            text += decoder.feed(token)
            if not reasons:
                stripped = text.lstrip()
                reasons = stripped.startswith(tuple(THOUGHTS))
                if not reasons and not any(opening.startswith(stripped) for opening in THOUGHTS):
                    break
            for end in THOUGHTS.values() if reasons else ():
                _, tag, after = text.partition(end)
                if tag:
                    return None if after.strip() else self._without_space(completion[position + 1 :])
        # All of it is reasoning, or none is.
        return completion[len(completion) :] if reasons else completion

    def _without_space(self, tokens: IdArray) -> IdArray:
        start = 0
        while start < len(tokens) and int(tokens[start]) not in self._closing:
            spelled = self._folder.decode([int(tokens[start])], special=True)
            if spelled.strip() or not spelled:
                break
            start += 1
        return tokens[start:]

    def _after_reply(self, text: str, reply: Message) -> str | None:
        """What follows the marked reply and its end token in ``text``; None if the reply was not kept."""
        if text.count(_MARK) != 1 or (reply.reasoning and text.count(_MARK_THOUGHT) != 1):
            return None
        at = text.index(_MARK)
        if not reply.reasoning and not reply.tool_calls and text[:at].strip():
            return None  # the template puts something before the reply that the model did not say
        rest = text[at + len(_MARK) :]
        if self._turn_end is None:
            return None if reply.tool_calls else rest
        _, found, rest = rest.partition(self._turn_end)
        return rest if found else None

    def parser(self, tools: Sequence[ToolSpec] = (), stop: Sequence[str] = ()) -> TaggedParser:
        form = self._form if tools else None
        return TaggedParser(self._folder, stop=stop, form=form, tools=tools, thought=self._thought)

    def call_opening(self, name: str | None) -> IdArray | None:
        if self._form is None:
            return None
        # Where the prompt has opened reasoning, a call begins only after it.
        end = "" if self._thought is None else f"{THOUGHTS[self._thought]}\n\n"
        return ids(self._folder.encode(end + self._form.opening(name)))

    def count(self, text: str) -> int:
        return self._folder.count(text)

    def decode(self, ids: IdArray) -> str:
        return self._folder.decode(ids, special=True)

    def _text(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, prompt: bool
    ) -> tuple[str, dict[str, str]]:
        """The rendered text, with special tokens that people wrote replaced by stand-ins (stand-in -> text)."""
        template = self._template_for(tools)
        hidden: dict[str, str] = {}
        shaped = [self._shape(message, template, hidden) for message in messages]
        return template.render(shaped, tools, prompt=prompt), hidden

    def _template_for(self, tools: Sequence[ToolSpec]) -> ChatTemplate:
        if not tools:
            return self._template
        if not self._tool_template.takes_tools:
            raise UsageError(
                "this model's chat template ignores tools, so the model would never hear of them",
                remedy="use a renderer with a tool template: -o renderer.name=chatml",
            )
        if self._form is None:
            raise UsageError(
                "this model's chat template does not show how the model writes its tool calls in any form known here",
                remedy=f"say which it is: -o renderer.tool_format=NAME, one of {', '.join(FORMATS)}",
            )
        return self._tool_template

    def _recalled(self, message: Message) -> Message:
        """What is enough of an earlier message for the template to decide what follows: nobody reads what it says."""
        content = message.content
        if len(content) > _LONG and not any(tag in content for tag in THOUGHTS.values()):
            content = f"{content[: _LONG // 2]}{content[-_LONG // 2 :]}"
        calls = message.tool_calls[-1:] if self._calls.single else message.tool_calls
        calls = tuple(ToolCall(id=call.id, name=call.name, arguments="{}") for call in calls)
        return msgspec.structs.replace(message, content=content, tool_calls=calls)

    def _shape(self, message: Message, template: ChatTemplate, hidden: dict[str, str]) -> dict[str, Any]:
        """A message in the shape that published templates are written for."""
        shaped: dict[str, Any] = {"role": message.role, "content": self._hide(message.content, hidden)}
        if message.reasoning:
            reasoning = self._hide(message.reasoning, hidden)
            if template.takes_reasoning:
                shaped["reasoning_content"] = reasoning
            else:
                shaped["content"] = f"{THINK}\n{reasoning}\n{END_THINK}\n\n{shaped['content']}"
        if message.tool_calls:
            hide = functools.partial(self._hide, hidden=hidden)
            shaped["tool_calls"] = [self._calls.shape(call, hide) for call in message.tool_calls]
            shaped["content"] = self._calls.content(shaped["content"])
        if message.tool_call_id is not None:
            shaped["tool_call_id"] = self._calls.id(message.tool_call_id)
        if message.name is not None:
            shaped["name"] = message.name
        return shaped

    def _hide(self, text: str, hidden: dict[str, str]) -> str:
        """Replace the text of special tokens in what somebody wrote, so that it cannot act as one."""
        if not self._folder.has_special(text):
            return text
        pieces = self._folder.split_special(text)
        for position in range(1, len(pieces), 2):
            # Private-use characters: no template looks for them, none is white space.
            stand_in = f"\ue000{self._folder.special[pieces[position]]}\ue001"
            hidden[stand_in] = pieces[position]
            pieces[position] = stand_in
        return "".join(pieces)

    def _encode(self, text: str, hidden: Mapping[str, str]) -> list[int]:
        if not hidden:
            return self._folder.encode(text)
        tokens: list[int] = []
        for position, piece in enumerate(self._folder.split_special(text)):
            if position % 2:
                tokens.append(self._folder.special[piece])
                continue
            for stand_in, original in hidden.items():
                piece = piece.replace(stand_in, original)
            tokens += self._folder.encode_plain(piece)
        return tokens

    def _find_turn_end(self) -> str | None:
        """The special token that the template writes after an assistant's reply."""
        sample = [Message(role="user", content="a"), Message(role="assistant", content=_MARK)]
        try:
            text, _ = self._text([*sample, Message(role="user", content="b")], (), prompt=False)
        except UsageError as error:
            raise Unavailable(
                f"the chat template of {self._folder.path} cannot render a conversation: {error}"
            ) from error
        pieces = self._folder.split_special(text.partition(_MARK)[2])
        return pieces[1] if len(pieces) > 1 else None

    def _find_turn_start(self) -> tuple[str, str]:
        """What a prompt ends with to open the assistant's turn, and then to open reasoning."""
        asked = [Message(role="user", content="a")]
        closed, opened = (self._text(asked, (), prompt=prompt)[0] for prompt in (False, True))
        opening = opened[len(closed) :] if opened.startswith(closed) else ""
        at = len(opening) if self._thought is None else opening.rfind(self._thought)
        return (opening[:at], opening[at:]) if at >= 0 else ("", "")

    def _opened_thought(self) -> str | None:
        """What a prompt ends with to open reasoning, if it does."""
        text, _ = self._text([Message(role="user", content="a")], (), prompt=True)
        return next((opening for opening in THOUGHTS if text.rstrip().endswith(opening)), None)


def folded(history: Sequence[Message]) -> Sequence[Message]:
    """A shorter history that a template goes on from as it does from the whole.

    What a template writes next depends on which kinds of messages there were, not on how many: of exchanges (an
    assistant's message with what follows it) that are alike, the latest stands for all. The latest two are kept, and
    so is what comes before the first. So the last message of each role stays the last, roles alternate as they did,
    and whatever the template would rewrite has something in its place.
    """
    if len(history) <= _SHORT_HISTORY:
        return history
    kinds = [(m.role, not m.content, not m.reasoning, len(m.tool_calls), m.name is None) for m in history]
    starts = [position for position, kind in enumerate(kinds) if kind[0] == "assistant"]
    exchanges = list(zip(starts, [*starts[1:], len(history)], strict=True))
    latest = {tuple(kinds[start:end]): (start, end) for start, end in exchanges}
    kept = sorted({*latest.values(), *exchanges[-2:]})
    head = history[: starts[0]] if starts else history
    return [*head, *(message for start, end in kept for message in history[start:end])]


class _CallShape:
    """In which of the shapes in use a template takes an assistant's calls, found by trying.

    ``as_text``: arguments are JSON text, not objects. ``no_content``: a message with nothing but calls has None as
    its content. ``short_ids``: ids have exactly nine letters and digits. ``single``: one call a message.
    """

    def __init__(
        self, *, as_text: bool = False, no_content: bool = False, short_ids: bool = False, single: bool = False
    ) -> None:
        self._as_text = as_text
        self._no_content = no_content
        self._short_ids = short_ids
        self.single = single

    @classmethod
    def of(cls, template: ChatTemplate) -> _CallShape:
        for short_ids, no_content, as_text in itertools.product((False, True), repeat=3):
            shape = cls(as_text=as_text, no_content=no_content, short_ids=short_ids)
            if shape._fits(template, 1):
                single = not shape._fits(template, 2)
                return cls(as_text=as_text, no_content=no_content, short_ids=short_ids, single=single)
        return cls()

    def _fits(self, template: ChatTemplate, calls: int) -> bool:
        call = ToolCall(id="call_0", name=_MARK, arguments=json.dumps({_MARK_THOUGHT: "value"}))
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": self.content(""), "tool_calls": [self.shape(call, str)] * calls},
        ]
        try:
            text = template.render(messages, (_PROBE,), prompt=False)
        except UsageError:
            return False
        # All of it is there, and not as Python would print a dictionary.
        return text.count(_MARK) == calls and text.count(_MARK_THOUGHT) == calls and f"{{'{_MARK_THOUGHT}'" not in text

    def shape(self, call: ToolCall, hide: Callable[[str], str]) -> dict[str, Any]:
        text = hide(call.arguments)
        value = load_object(text)
        arguments: Any = text
        if value is not None and not self._as_text:
            arguments = value
        elif value is None and not self._as_text:
            arguments = {"arguments": text}  # templates that take objects fail on anything else
        return {
            "id": self.id(call.id),
            "type": "function",
            "function": {"name": hide(call.name), "arguments": arguments},
        }

    def content(self, text: str) -> str | None:
        return None if self._no_content and not text else text

    def id(self, id: str) -> str:
        if not self._short_ids or _SHORT_ID.fullmatch(id):
            return id
        return hashlib.blake2b(id.encode("utf-8", "replace"), digest_size=8).hexdigest()[:9]


class ChatTemplate:
    """A compiled chat template with the helpers that templates expect, and nothing else within reach."""

    def __init__(self, source: str, tokens: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        # Fixed at load, so that a conversation running past midnight keeps its prompt.
        now = datetime.datetime.now()
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": now.strftime}
        try:
            self._template = environment.from_string(source)
            self.takes_tools = "tools" in jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise Unavailable(
                f"the chat template has a syntax error in line {error.lineno}: {error.message}"
            ) from error
        # Jinja looks them up in a chain of mappings, anew for each rendering.
        self._template.globals = dict(self._template.globals)
        #: Decides itself what becomes of earlier reasoning. Where a template does not, reasoning is text like any.
        self.takes_reasoning = "reasoning_content" in source or END_THINK in source
        self._variables = {**tokens, **extra}

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolSpec], *, prompt: bool) -> str:
        """Text of a conversation; with ``prompt``, ready for the assistant's next turn."""
        try:
            return self._template.render(
                messages=messages,
                tools=[dict(plain_tool(tool)) for tool in tools] or None,
                documents=None,
                add_generation_prompt=prompt,
                **self._variables,
            )
        except jinja2.TemplateError as error:
            raise UsageError(f"the chat template refuses these messages: {error.message}") from error
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError) as error:
            raise UsageError(f"the chat template fails on these messages: {error}") from error


def _shows_reasoning(reply: Message, template: ChatTemplate) -> bool:
    """Whether it is the template that decides about a reply's reasoning. Where it knows nothing of reasoning, that is
    text, which many templates leave out beside calls."""
    return bool(reply.reasoning) and (template.takes_reasoning or not reply.tool_calls)


def _marks(number: int) -> tuple[str, str]:
    """What stands for the words and the reasoning of one of several replies."""
    return (f"{_MARK}{number}x", f"{_MARK_THOUGHT}{number}x")


def _marked(reply: Message, number: int | None = None) -> Message:
    """The reply with its words replaced. The mark stands in the content; of a reply with calls in the last of them,
    which is all of it that matters, since every template writes it last."""
    call = reply.tool_calls[-1] if reply.tool_calls else None
    mark, thought = (_MARK, _MARK_THOUGHT) if number is None else _marks(number)
    return Message(
        role=reply.role,
        content=mark if call is None else "",
        reasoning=thought if reply.reasoning else None,
        tool_calls=() if call is None else (ToolCall(id=call.id, name=mark, arguments="{}"),),
        name=reply.name,
    )


def _tojson(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
    """Jinja's own filter escapes for HTML, which is wrong in a prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **how)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks what an assistant says; rendering needs only what is inside."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
