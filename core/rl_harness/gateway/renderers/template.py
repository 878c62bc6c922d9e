"""The renderer ``template``: a model folder's own chat template, in sandboxed Jinja.

The template is a black box. :meth:`TemplateRenderer.extend` finds out whether it keeps what came before by
rendering the conversation with a marker in place of the recorded reply, and takes only the text after it.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from pydantic import Field

from rl_harness.contracts.common import Options
from rl_harness.contracts.renderer import Renderer, ToolSpec
from rl_harness.errors import ConfigError, Unavailable, UsageError
from rl_harness.gateway.arguments import load_object
from rl_harness.gateway.renderers.streams import CALL, END_THINK, THINK, TaggedParser, opening
from rl_harness.gateway.renderers.tokenizer import TokenizerFolder
from rl_harness.records.arrays import IdArray, ids
from rl_harness.records.turn import Message, ToolCall

#: Stands for a recorded reply while a template renders it; no template changes or splits such a word.
_MARK = "rlharness0reply0mark"
_MARK_THOUGHT = "rlharness0thought0mark"


class TemplateOptions(Options):
    template: Path | None = Field(None, description="a Jinja file to use instead of the model folder's own template")
    kwargs: dict[str, Any] = Field({}, description="variables for the template, such as enable_thinking")


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
        self._turn_end = self._find_turn_end()
        turn_end = () if self._turn_end is None else (self._folder.special[self._turn_end],)
        self._end_ids = tuple(dict.fromkeys(turn_end + self._folder.end_ids()))
        self._thinks = self._opens_reasoning()

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
            history = [self._shape(message, template, hidden) for message in messages[:-1]]
            after = [self._shape(message, template, hidden) for message in (_marked(reply), *new)]
            before = template.render(history, tools, prompt=True)
            whole = template.render(history + after, tools, prompt=True)
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
        closed = len(completion) > 0 and int(completion[-1]) == suffix[0]
        return ids(suffix[1:] if closed else suffix)

    def _after_reply(self, text: str, reply: Message) -> str | None:
        """What follows the marked reply and its end token in ``text``; None if the reply was not kept."""
        if text.count(_MARK) != 1 or (reply.reasoning and text.count(_MARK_THOUGHT) != 1):
            return None
        at = text.index(_MARK)
        if not reply.reasoning and not _mark_in_call(reply) and text[:at].strip():
            return None  # the template puts something before the reply that the model did not say
        rest = text[at + len(_MARK) :]
        if self._turn_end is None:
            return None if reply.tool_calls else rest
        _, found, rest = rest.partition(self._turn_end)
        return rest if found else None

    def parser(self, tools: Sequence[ToolSpec] = (), stop: Sequence[str] = ()) -> TaggedParser:
        return TaggedParser(self._folder, stop=stop, calls=bool(tools), thinking=self._thinks)

    def call_opening(self, name: str | None) -> IdArray | None:
        return None if self._thinks else ids(self._encode(opening(name), {}))

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
        if not self._tool_template.calls_as_json:
            raise UsageError(
                "this model's chat template has its tools called in another form than <tool_call> JSON, which this "
                "renderer cannot read",
                remedy="use a renderer made for this model family",
            )
        return self._tool_template

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
            shaped["tool_calls"] = [self._shape_call(call, hidden) for call in message.tool_calls]
        if message.tool_call_id is not None:
            shaped["tool_call_id"] = message.tool_call_id
        if message.name is not None:
            shaped["name"] = message.name
        return shaped

    def _shape_call(self, call: ToolCall, hidden: dict[str, str]) -> dict[str, Any]:
        text = self._hide(call.arguments, hidden)
        arguments = load_object(text)
        function = {"name": call.name, "arguments": text if arguments is None else arguments}
        return {"id": call.id, "type": "function", "function": function}

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

    def _opens_reasoning(self) -> bool:
        text, _ = self._text([Message(role="user", content="a")], (), prompt=True)
        return text.rstrip().endswith(THINK)


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
        others = ("<function=", "<arg_key>")  # the same tag, but around something else
        self.calls_as_json = CALL in source and not any(other in source for other in others)
        #: Decides itself what becomes of earlier reasoning. Where a template does not, reasoning is text like any.
        self.takes_reasoning = "reasoning_content" in source or END_THINK in source
        self._variables = {**tokens, **extra}

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolSpec], *, prompt: bool) -> str:
        """Text of a conversation; with ``prompt``, ready for the assistant's next turn."""
        try:
            return self._template.render(
                messages=messages,
                tools=[dict(tool) for tool in tools] or None,
                documents=None,
                add_generation_prompt=prompt,
                **self._variables,
            )
        except jinja2.TemplateError as error:
            raise UsageError(f"the chat template refuses these messages: {error.message}") from error
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError) as error:
            raise UsageError(f"the chat template fails on these messages: {error}") from error


def _mark_in_call(reply: Message) -> bool:
    return bool(reply.tool_calls) and not reply.content.strip()


def _marked(reply: Message) -> Message:
    """The reply with its words replaced: the mark stands in the content, or in the last call if that is all."""
    calls = reply.tool_calls
    content = _MARK
    if _mark_in_call(reply):
        content = ""
        calls = (*calls[:-1], ToolCall(id=calls[-1].id, name=_MARK, arguments=calls[-1].arguments))
    return Message(
        role=reply.role,
        content=content,
        reasoning=_MARK_THOUGHT if reply.reasoning else None,
        tool_calls=calls,
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
