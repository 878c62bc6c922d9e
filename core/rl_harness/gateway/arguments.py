"""The arguments of a tool call as JSON text, which models and agents write in many ways."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any


def load_object(text: str, *, number: Callable[[str], Any] | None = None) -> dict[str, Any] | None:
    """The JSON object that ``text`` holds; None if it is anything else, or could not be written as UTF-8.

    ``number`` makes a value of the text of each number.
    """
    how: dict[str, Any] = {"parse_float": _finite} if number is None else {"parse_int": number, "parse_float": number}
    try:
        value = json.loads(text, parse_constant=_refuse, **how)
        if not isinstance(value, dict):
            return None
        if "\\ud" in text.lower():
            dump_object(value).encode()  # half of a surrogate pair cannot be sent to anybody
    except (ValueError, RecursionError):
        return None
    return value


def dump_object(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} has no value that could be written as JSON again")
    return value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
