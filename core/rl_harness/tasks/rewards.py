"""Reads what a verifier left in ``/logs/verifier`` strictly: a finite number, or named finite numbers. Anything else
is not a grade, and says why.

``reward.json`` holds a number or an object of named numbers, ``reward.txt`` one decimal number. When both are there
they must agree on the reward that counts.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

#: More than any real grade needs; a file beyond it is not read.
SIZE_LIMIT = 64 << 10
MAIN = "reward"

_DECIMAL = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)


class InvalidReward(ValueError):
    """The file is there and is no reward; the message says why."""


def parse_json(data: bytes) -> dict[str, float]:
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_constant)
    except InvalidReward:
        raise
    except (ValueError, RecursionError) as error:
        raise InvalidReward(f"reward.json is not JSON: {error}") from None
    if not isinstance(value, dict):
        return {MAIN: _number(value, "reward.json")}
    if not value:
        raise InvalidReward("reward.json names no reward")
    return {name: _number(item, f"reward.json: {name!r}") for name, item in value.items()}


def parse_text(data: bytes) -> dict[str, float]:
    text = data.decode("utf-8", "replace").strip()
    if not _DECIMAL.fullmatch(text):
        raise InvalidReward(f"reward.txt must hold one decimal number, not {text[:60]!r}")
    value = float(text)
    if not math.isfinite(value):
        raise InvalidReward(f"reward.txt: {text[:60]} is not finite")
    return {MAIN: value}


def combine(from_json: bytes | None, from_text: bytes | None) -> dict[str, float] | None:
    """The named rewards, or None when neither file is there."""
    rewards = parse_json(from_json) if from_json is not None else None
    text = parse_text(from_text) if from_text is not None else None
    if rewards is None or text is None:
        return rewards if rewards is not None else text
    if main_reward(rewards) != text[MAIN]:
        raise InvalidReward(f"reward.json says {main_reward(rewards)} and reward.txt says {text[MAIN]}")
    return rewards


def main_reward(rewards: dict[str, float]) -> float:
    """The reward that counts: the one named ``reward``, or the only one, or the mean of all."""
    if MAIN in rewards:
        return rewards[MAIN]
    return math.fsum(rewards.values()) / len(rewards)


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidReward(f"{where} must be a number, not {json.dumps(value):.60}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InvalidReward(f"{where} is not finite")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(names := {name for name, _ in pairs}) != len(pairs):
        raise InvalidReward(f"reward.json gives one name twice, of {', '.join(sorted(names))}")
    return dict(pairs)


def _constant(name: str) -> float:
    raise InvalidReward(f"reward.json holds {name}, which is not a number")
