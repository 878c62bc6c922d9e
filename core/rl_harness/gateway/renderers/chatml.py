"""The renderer ``chatml``: ChatML with tools in the system message and calls as ``<tool_call>`` JSON (the form of
Hermes and Qwen models), for models that know ChatML but whose own template ignores tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from rl_harness.contracts.common import Options
from rl_harness.contracts.renderer import Renderer, ToolSpec
from rl_harness.errors import Unavailable, UsageError
from rl_harness.gateway.arguments import dump_object, load_object
from rl_harness.gateway.canonical import plain_tool
from rl_harness.gateway.renderers.formats.hermes import CALL, END_CALL, Hermes
from rl_harness.gateway.renderers.streams import END_THINK, THINK, TaggedParser
from rl_harness.gateway.renderers.tokenizer import TokenizerFolder
from rl_harness.records.arrays import IdArray, ids
from rl_harness.records.turn import Message, ToolCall

_FORM = Hermes()
START, END = "<|im_start|>", "<|im_end|>"

_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{signatures}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


class ChatMLOptions(Options):
    system: str | None = Field(None, description="system message for conversations that bring none")


class ChatMLRenderer(Renderer):
    """Keeps every conversation's history as it was, so that it always extends."""

    api = 1
    Options = ChatMLOptions

    def __init__(self, options: ChatMLOptions) -> None:
        super().__init__(options)
        self._options = options

    def load(self, path: Path) -> None:
        self._folder = folder = TokenizerFolder(path)
        missing = [token for token in (START, END) if token not in folder.special]
        if missing:
            raise Unavailable(
                f"the tokenizer of {path} has no special token {' and no '.join(missing)}: the model knows no ChatML",
                remedy="use the model's own template: -o renderer.name=template",
            )
        self._start, self._end = folder.special[START], folder.special[END]
        self._newline = folder.encode_plain("\n")
        self._end_ids = tuple(dict.fromkeys((self._end, *folder.end_ids())))

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        return self._end_ids

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> IdArray:
        rest = list(messages)
        system = rest.pop(0).content if rest and rest[0].role == "system" else self._options.system
        if tools:
            signatures = "\n".join(json.dumps(dict(plain_tool(tool)), ensure_ascii=False) for tool in tools)
            listing = _TOOLS.format(signatures=signatures)
            system = f"{system}\n\n{listing}" if system else listing
        head = [] if system is None else self._block("system", system)
        return ids(head + self._blocks(rest))

    def extend(
        self,
        messages: Sequence[Message],
        completion: IdArray,
        new: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
    ) -> IdArray | None:
        closed = len(completion) > 0 and int(completion[-1]) == self._end
        closing = self._newline if closed else [self._end, *self._newline]
        return ids(closing + self._blocks(new))

    def parser(self, tools: Sequence[ToolSpec] = (), stop: Sequence[str] = ()) -> TaggedParser:
        return TaggedParser(self._folder, stop=stop, form=_FORM if tools else None, tools=tools)

    def call_opening(self, name: str | None) -> IdArray | None:
        return ids(self._folder.encode(_FORM.opening(name)))

    def count(self, text: str) -> int:
        return self._folder.count(text)

    def decode(self, ids: IdArray) -> str:
        return self._folder.decode(ids, special=True)

    def _blocks(self, messages: Sequence[Message]) -> list[int]:
        """Messages and the opening of the assistant's next turn. Tool results that follow each other share a
        user block."""
        tokens: list[int] = []
        results: list[str] = []
        for message in messages:
            if message.role == "tool":
                results.append(f"<tool_response>\n{message.content}\n</tool_response>")
                continue
            tokens += self._results(results)
            if message.role == "assistant":
                tokens += self._block("assistant", _said(message))
            elif message.role in ("user", "system"):
                tokens += self._block(message.role, message.content)
            else:
                raise UsageError(f"ChatML has no role {message.role!r}")
        tokens += self._results(results)
        return [*tokens, self._start, *self._folder.encode_plain("assistant\n")]

    def _results(self, results: list[str]) -> list[int]:
        if not results:
            return []
        text = "\n".join(results)
        results.clear()
        return self._block("user", text)

    def _block(self, role: str, text: str) -> list[int]:
        # Role and text are encoded together, as a model saw them in training.
        return [self._start, *self._folder.encode_plain(f"{role}\n{text}"), self._end, *self._newline]


def _said(message: Message) -> str:
    parts = [f"{THINK}\n{message.reasoning}\n{END_THINK}\n"] if message.reasoning else []
    if message.content:
        parts.append(message.content)
    parts += [_call(call) for call in message.tool_calls]
    return "\n".join(parts)


def _call(call: ToolCall) -> str:
    value = load_object(call.arguments)
    arguments = dump_object(value) if value is not None else json.dumps(call.arguments, ensure_ascii=False)
    name = json.dumps(call.name, ensure_ascii=False)
    return f'{CALL}\n{{"name": {name}, "arguments": {arguments}}}\n{END_CALL}'
