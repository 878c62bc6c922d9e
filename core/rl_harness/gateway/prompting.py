"""Which ids a request's prompt is made of: what was sampled is replayed id by id, only what is new is rendered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rl_harness.contracts.renderer import Renderer
from rl_harness.gateway.tree import Conversation, TurnTree
from rl_harness.records.arrays import IdArray
from rl_harness.records.turn import Turn


@dataclass(frozen=True, slots=True)
class Prompt:
    """``parent`` and ``shared`` as a turn records them. ``follows`` is the turn whose reply the history holds
    last, also when the prompt is a branch because the template rewrote that history."""

    ids: IdArray
    parent: str | None
    shared: int
    follows: Turn | None


def build_prompt(renderer: Renderer, tree: TurnTree, conversation: Conversation, opening: IdArray) -> Prompt:
    """Continue a recorded turn where the request does; otherwise a branch, with what ids it shares. ``opening`` are
    ids that the reply has to begin with; they end the prompt.

    Raises ``UsageError`` for messages the renderer refuses.
    """
    found = tree.continued_by(conversation)
    follows = None
    if found is not None:
        follows, length = found
        recorded = tree.sequence(follows)
        replies = tree.replies_before(follows)
        rest = _replayed(tree, conversation, replies, length)
        pieces = _extend(renderer, conversation, replies | rest, length - 1)
        if pieces is not None:
            return Prompt(np.concatenate([recorded, *pieces[1:], opening]), follows.id, len(recorded), follows)
    ids = _spliced(renderer, tree, conversation) if follows is None else None
    if ids is None:
        ids = renderer.render(conversation.messages, conversation.tools)
    ids = np.concatenate([ids, opening])
    parent, shared = tree.shared_prefix(ids)
    return Prompt(ids, parent, shared, follows)


def _spliced(renderer: Renderer, tree: TurnTree, conversation: Conversation) -> IdArray | None:
    """A prompt whose history was changed before or between recorded replies: these keep their ids."""
    replies = _replayed(tree, conversation, {}, 1)
    if not replies:
        return None
    first = min(replies)
    pieces = _extend(renderer, conversation, replies, first)
    if pieces is None:
        return None
    return np.concatenate([renderer.render(conversation.messages[:first], conversation.tools), *pieces])


def _replayed(tree: TurnTree, conversation: Conversation, known: Mapping[int, Turn], start: int) -> dict[int, Turn]:
    """Recorded replies at or after message ``start`` that are not yet known."""
    found: dict[int, Turn] = {}
    for position in range(start, len(conversation.messages)):
        message = conversation.messages[position]
        if message.role == "assistant" and position not in known:
            turn = tree.reply(conversation.digests[position], message)
            if turn is not None and turn.exact:
                found[position] = turn
    return found


def _extend(
    renderer: Renderer, conversation: Conversation, replies: Mapping[int, Turn], start: int
) -> list[IdArray] | None:
    """The ids from the reply at message ``start`` on: each reply's own, then what was said until the next.

    The renderer sees recorded replies as they were said, with the reasoning that the agent may have dropped.
    """
    messages = list(conversation.messages)
    for position, turn in replies.items():
        messages[position] = turn.message
    ordered = sorted(position for position in replies if position >= start)
    pieces: list[IdArray] = []
    for position, end in zip(ordered, [*ordered[1:], len(messages)], strict=True):
        completion = replies[position].completion
        suffix = renderer.extend(messages[: position + 1], completion, messages[position + 1 : end], conversation.tools)
        if suffix is None:
            return None
        pieces += [completion, suffix]
    return pieces
