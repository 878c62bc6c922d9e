"""What a tool format is: where a call begins in a completion, how it is read, and how one is opened for the model.

What models write is seldom quite right. A call that says which tool it wants is delivered, with its arguments as they
were written where they are no JSON object: agents answer such a call with an error, from which the model can go on, but
take a reply without calls for the end. What does not even name a tool is text.
"""

from __future__ import annotations

import abc
import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from rl_harness.gateway.arguments import dump_object, load_object
from rl_harness.gateway.schemas import Tools
from rl_harness.records.turn import ToolCall

_OWN_ID = re.compile(r"[A-Za-z0-9]{9}")
_JSON_PART = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[{}\[\]]', re.DOTALL)
#: The beginning of a call whose whole is no JSON.
_HEAD = re.compile(
    r'\s*\{\s*(?:"(?:type|id)"\s*:\s*"[^"]*"\s*,\s*)*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*'
)


class Found(msgspec.Struct, frozen=True):
    """What the first ``size`` characters are: some calls; nothing to be told, if ``silent``; otherwise text."""

    size: int
    calls: tuple[ToolCall, ...] = ()
    silent: bool = False


class ToolFormat(abc.ABC):
    """One family's calls. Without state: a parser asks again as text comes in."""

    name: ClassVar[str]
    #: Texts that structure calls. Where they are special tokens, nobody is shown them.
    tags: ClassVar[tuple[str, ...]] = ()
    #: Tokens by which a tokenizer gives the family away; none if it cannot.
    tokens: ClassVar[frozenset[str]] = frozenset()
    #: Characters one of which ends every call: without a new one there is nothing new to read.
    closers: ClassVar[str]

    @abc.abstractmethod
    def written_by(self, template: str) -> bool:
        """Whether a chat template's source writes calls like this."""

    @abc.abstractmethod
    def start(self, text: str, first: bool) -> int:
        """Where in ``text`` a call begins or may be about to; its length if nowhere. ``first``: no text came before."""

    @abc.abstractmethod
    def read(self, text: str, tools: Tools, *, last: bool, cut: bool) -> Found | None:
        """What ``text``, which begins where :meth:`start` said, turns out to be; None while that is open.

        ``last``: nothing more will come, and the answer is not None; with ``cut`` because the completion was too long,
        so that a call without its end is none.
        """

    @abc.abstractmethod
    def opening(self, name: str | None) -> str:
        """How a call of a tool (or of one the model chooses) begins, up to where the model has to go on."""


def held(text: str, markers: Sequence[str]) -> int:
    """How many trailing characters of ``text`` could be the beginning of one of ``markers``."""
    longest = max((len(marker) for marker in markers), default=0)
    for size in range(min(longest - 1, len(text)), 0, -1):
        tail = text[-size:]
        if any(marker.startswith(tail) for marker in markers):
            return size
    return 0


def marked(text: str, markers: Sequence[str]) -> int:
    """Where the first of ``markers`` begins in ``text``, or may be about to."""
    found = [at for marker in markers if (at := text.find(marker)) >= 0]
    return min(found) if found else len(text) - held(text, markers)


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def own_id(id: object) -> str | None:
    """The id that a model gave its call, if it is in the form of those that do (Mistral) and take it back."""
    return id if isinstance(id, str) and _OWN_ID.fullmatch(id) else None


def make_call(name: str, arguments: Any, *, id: str | None = None) -> ToolCall:
    """A call whose arguments are an object, its JSON text, or text that is no object and is kept as it is."""
    if arguments is None:
        text = "{}"
    elif isinstance(arguments, str):
        value = load_object(arguments)
        text = arguments.strip() if value is None else dump_object(value)
    else:
        text = dump_object(arguments) if isinstance(arguments, dict) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(id=id or new_call_id(), name=name, arguments=text)


def object_call(value: Mapping[str, Any]) -> ToolCall | None:
    """The call that a JSON object describes, as ``name`` and ``arguments`` or ``parameters``."""
    function = value.get("function")
    if isinstance(function, dict):
        value = function
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        return None
    return make_call(name, value.get("arguments", value.get("parameters")), id=own_id(value.get("id")))


def listed_calls(text: str) -> tuple[ToolCall, ...]:
    """The calls of a JSON list, or of one object; none if anything in it is no call."""
    wrapped = load_object(f'{{"calls": {text}}}')
    if wrapped is None:
        return ()
    values = wrapped["calls"] if isinstance(wrapped["calls"], list) else [wrapped["calls"]]
    calls = [object_call(value) if isinstance(value, dict) else None for value in values]
    return tuple(call for call in calls if call is not None) if all(calls) else ()


def json_call(text: str) -> ToolCall | None:
    """The call that a text describes: a JSON object, or one that is broken but names the tool."""
    value = load_object(text)
    if value is not None:
        return object_call(value)
    head = _HEAD.match(text)
    if head is None:
        return None
    try:
        name = json.loads(head[1])
    except ValueError:
        return None
    rest = text[head.end() :].strip()
    if load_object(rest) is None:
        rest = rest.removesuffix("}").rstrip()
    return make_call(name, rest) if name.strip() else None


def json_end(text: str, start: int = 0) -> int | None:
    """Where the JSON object or list that begins at ``start`` ends; None if it does not end yet."""
    depth = 0
    for part in _JSON_PART.finditer(text, start):
        if part[0] in ("{", "["):
            depth += 1
        elif part[0] in ("}", "]"):
            depth -= 1
            if depth <= 0:
                return part.end()
    return None


def ends_of(text: str, tag: str, start: int = 0) -> Iterator[int]:
    """Every place where ``tag`` begins."""
    at = text.find(tag, start)
    while at >= 0:
        yield at
        at = text.find(tag, at + 1)
