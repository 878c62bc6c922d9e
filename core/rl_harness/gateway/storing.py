"""Recorded turns as they may be kept on disk: none that holds a secret, none whose reply nobody received.

Token ids are text in another spelling, so a turn that holds a secret keeps none: it can be shown, with its message
redacted, and never be trained on. Turns that shared ids with one that goes get these as their own.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from rl_harness.records.arrays import ids, logps
from rl_harness.records.turn import Turn, continued_turn, prompt_of
from rl_harness.redaction import Secrets


def storable(
    turns: Sequence[Turn],
    *,
    held: Mapping[str, tuple[str, ...]],
    undelivered: Container[str],
    secrets: Secrets,
) -> list[Turn]:
    """``turns`` without those ``undelivered`` that no later one goes on from, and with those that ``held`` a secret
    (turn id to names of what) quarantined."""
    if not held and not undelivered:
        return list(turns)
    known = {turn.id: turn for turn in turns}
    follows = {turn.id: continued_turn(turn, known) for turn in turns}
    dropped = {turn.id for turn in turns if turn.id in undelivered} - set(follows.values())
    hollow = dropped | held.keys()
    kept: list[Turn] = []
    for turn in turns:
        if turn.id in dropped:
            continue
        if turn.id in held:
            kept.append(_quarantined(turn, follows[turn.id], held[turn.id], secrets))
        elif turn.parent in hollow:
            kept.append(_on_its_own(turn, follows[turn.id], known, hollow))
        else:
            kept.append(turn)
    return kept


def _on_its_own(turn: Turn, follows: str | None, known: Mapping[str, Turn], hollow: Container[str]) -> Turn:
    """The turn with the ids that it shared with ``hollow`` turns."""
    parent, shared = turn.parent, turn.shared
    while parent is not None and parent in hollow:
        node = known[parent]
        parent, shared = node.parent, min(shared, node.shared)
    prompt = prompt_of(turn, known.__getitem__)
    if parent is None:
        shared = 0
    return msgspec.structs.replace(
        turn,
        parent=parent,
        shared=shared,
        context=prompt[shared:],
        extra=_extra(turn, follows),
    )


def _quarantined(turn: Turn, follows: str | None, names: tuple[str, ...], secrets: Secrets) -> Turn:
    none = np.zeros(0)
    return msgspec.structs.replace(
        turn,
        exact=False,
        parent=follows,
        shared=0,
        context=ids(none),
        completion=ids(none),
        logps=logps(none),
        versions=ids(none),
        sampling=secrets.clean(turn.sampling),
        message=secrets.clean(turn.message),
        extra=secrets.clean(_extra(turn, follows)) | {"secrets": list(names)},
    )


def _extra(turn: Turn, follows: str | None) -> dict[str, Any]:
    """Say what the turn goes on from, where its ids no longer tell."""
    return dict(turn.extra) if follows is None else {**turn.extra, "follows": follows}
