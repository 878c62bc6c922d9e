"""When are two messages the same? Agents send a conversation back with call arguments re-serialised, call ids
rewritten, edges trimmed, reasoning dropped, empty content null: a digest that none of this changes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import accumulate

import msgspec

from rl_harness.contracts.renderer import ToolSpec
from rl_harness.gateway.arguments import load_object
from rl_harness.records.turn import Message

_encoder = msgspec.json.Encoder(order="sorted")
#: What agents put beside a tool for the sake of the API: it moves from call to call, and no model is told.
_MARKS = frozenset({"cache_control", "defer_loading", "eager_input_streaming"})
#: Arguments whose digest is remembered: a conversation's come back with every request, and parsing them is what costs.
_MOST_ARGUMENTS = 16_384
_arguments_seen: dict[bytes, bytes] = {}


def plain_tool(tool: ToolSpec) -> ToolSpec:
    """A tool as the model is told of it."""
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return tool
    marked = not (_MARKS.isdisjoint(tool) and _MARKS.isdisjoint(function))
    if not marked:
        return tool
    kept = {key: value for key, value in function.items() if key not in _MARKS}
    return {key: value for key, value in tool.items() if key not in _MARKS} | {"function": kept}


def digest_tools(tools: Sequence[ToolSpec]) -> bytes:
    """The start of a conversation's chain: which tools the model was told of."""
    if not tools:
        return _NO_TOOLS
    return _hash(_encoder.encode([dict(plain_tool(tool)) for tool in tools]))


def digest(message: Message) -> bytes:
    """16 bytes that stand for what was said."""
    calls = [[call.name, _arguments(call.arguments).hex()] for call in message.tool_calls]
    return _hash(_encoder.encode([message.role, message.content.strip(), calls]))


def chain(previous: bytes, message: bytes) -> bytes:
    """The digest of a conversation from that of all but its last message, and of the last."""
    return _hash(previous + message)


def links(start: bytes, digests: Sequence[bytes]) -> tuple[bytes, ...]:
    """The digests of a conversation's beginnings, from ``start`` on."""
    return tuple(accumulate(digests, chain, initial=start))


def _arguments(text: str) -> bytes:
    """A digest of the value that a call's arguments have."""
    written = _hash(text.encode("utf-8", "surrogatepass"))
    found = _arguments_seen.get(written)
    if found is None:
        value = load_object(text, number=_number)
        # What is no object comes back as one from protocols that have nothing else.
        found = _hash(_encoder.encode({"arguments": text.strip()} if value is None else value))
        if len(_arguments_seen) >= _MOST_ARGUMENTS:
            _arguments_seen.clear()
        _arguments_seen[written] = found
    return found


def _number(text: str) -> str:
    """A number's value, marked so that it is no string's; 1.0 comes back from JavaScript as 1."""
    value = float(text)
    exact = text if text.lstrip("-").isdigit() else str(int(value)) if value.is_integer() else repr(value)
    return f"\0{exact}"


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


_NO_TOOLS = _hash(b"[]")
