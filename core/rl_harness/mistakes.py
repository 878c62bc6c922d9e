"""Says what is wrong with a value that a model of settings refused, and what a right one looks like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SIZE = "it is not a size such as 1GiB or 512MiB"
_WHOLE = "it is not a whole number such as 8"
_NUMBER = "it is not a number such as 0.5"
_SWITCH = "it is neither true nor false"

#: By the kind of pydantic's error.
_WORDS = {
    "byte_size": _SIZE,
    "byte_size_unit": f"{_SIZE}; units are B, KiB, MiB, GiB, TiB, and KB, MB, GB, TB",
    "int_parsing": _WHOLE,
    "int_type": _WHOLE,
    "int_from_float": _WHOLE,
    "int_parsing_size": _WHOLE,
    "float_parsing": _NUMBER,
    "float_type": _NUMBER,
    "finite_number": "it is not a finite number",
    "bool_parsing": _SWITCH,
    "bool_type": _SWITCH,
    "string_type": "it is not text",
    "path_type": "it is not a path",
    "dict_type": "it is not a table of keys",
    "missing": "it is missing",
    "greater_than_equal": "it must be at least {ge}",
    "greater_than": "it must be more than {gt}",
    "less_than_equal": "it must be at most {le}",
    "less_than": "it must be less than {lt}",
    "literal_error": "it must be {expected}",
    "enum": "it must be {expected}",
}


def wrong(item: Mapping[str, Any]) -> str:
    """What one of ``ValidationError.errors()`` complains of."""
    context = item.get("ctx") or {}
    if item["type"] == "value_error":
        return str(context.get("error", item["msg"]))
    words = _WORDS.get(item["type"])
    if words is not None:
        return words.format(**context)
    message = str(item["msg"])
    return message.replace("Input should", "it should", 1)
