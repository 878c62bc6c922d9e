"""What is known of a sandbox, as Modal's tags: short names and values of few letters, found by equality."""

from __future__ import annotations

import re
from collections.abc import Mapping

_PLAIN = re.compile(r"[A-Za-z0-9.-]")
_ESCAPED = re.compile(r"_([0-9a-f]{2})")
_LENGTH = 60
_EMPTY = "_"


def encode(fields: Mapping[str, str]) -> dict[str, str]:
    """One tag for each field, more for a long one. The same field always makes the same tags."""
    tags = {}
    for name, value in fields.items():
        text = _escape(value) or _EMPTY
        for start in range(0, len(text), _LENGTH):
            tags[f"{_escape(name)}.{start // _LENGTH}"] = text[start : start + _LENGTH]
    return tags


def decode(tags: Mapping[str, str]) -> dict[str, str]:
    """The fields that :func:`encode` made tags of; other people's tags are left out."""
    parts: dict[str, dict[int, str]] = {}
    for tag, value in tags.items():
        name, _, number = tag.rpartition(".")
        if name and number.isascii() and number.isdigit():
            parts.setdefault(name, {})[int(number)] = value
    fields = {}
    for name, values in parts.items():
        text = "".join(values[number] for number in sorted(values))
        fields[_unescape(name)] = "" if text == _EMPTY else _unescape(text)
    return fields


def _escape(text: str) -> str:
    return "".join(
        letter if _PLAIN.match(letter) else "".join(f"_{byte:02x}" for byte in letter.encode("utf-8", "surrogatepass"))
        for letter in text
    )


def _unescape(text: str) -> str:
    raw = _ESCAPED.sub(lambda found: chr(int(found[1], 16)), text)
    return raw.encode("latin-1").decode("utf-8", "replace")
