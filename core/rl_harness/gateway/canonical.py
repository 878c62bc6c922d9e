"""When are two messages the same? Agents send a conversation back with call arguments re-serialised, call ids
rewritten, edges trimmed, reasoning dropped, empty content null: a digest that none of this changes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from rl_harness.contracts.renderer import ToolSpec
from rl_harness.gateway.arguments import load_object
from rl_harness.records.turn import Message

_encoder = msgspec.json.Encoder(order="sorted")


def digest_tools(tools: Sequence[ToolSpec]) -> bytes:
    """The start of a conversation's chain: which tools the model was told of."""
    return _hash(_encoder.encode([dict(tool) for tool in tools]))


def digest(message: Message) -> bytes:
    """16 bytes that stand for what was said."""
    calls = [[call.name, _arguments(call.arguments)] for call in message.tool_calls]
    return _hash(_encoder.encode([message.role, message.content.strip(), calls]))


def chain(previous: bytes, message: bytes) -> bytes:
    """The digest of a conversation from that of all but its last message, and of the last."""
    return _hash(previous + message)


def _arguments(text: str) -> Any:
    value = load_object(text, number=_number)
    return text.strip() if value is None else value


def _number(text: str) -> str:
    """A number's value, marked so that it is no string's; 1.0 comes back from JavaScript as 1."""
    value = float(text)
    exact = text if text.lstrip("-").isdigit() else str(int(value)) if value.is_integer() else repr(value)
    return f"\0{exact}"


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
