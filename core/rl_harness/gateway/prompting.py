"""Which ids a request's prompt is made of: what was sampled is replayed id by id, only what is new is rendered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from rl_harness.contracts.renderer import Renderer
from rl_harness.errors import UsageError
from rl_harness.gateway import canonical
from rl_harness.gateway.tree import Conversation, Place, TurnTree
from rl_harness.records.arrays import IdArray
from rl_harness.records.turn import Message, Turn

#: Replies whose places in a prompt are told to the tree: the last, and one more for a reply that is taken back.
_PLACES = 2


@dataclass(frozen=True, slots=True)
class Prompt:
    """``parent`` and ``shared`` as a turn records them. ``follows`` is the turn whose reply the history holds
    last, also when the prompt is a branch because the template rewrote that history. ``conversation`` is what the
    prompt says, ``replies`` where recorded replies end in it, both for :meth:`TurnTree.add`."""

    ids: IdArray
    parent: str | None
    shared: int
    follows: Turn | None
    conversation: Conversation
    replies: Sequence[tuple[int, Turn, int]] = ()


def build_prompt(renderer: Renderer, tree: TurnTree, conversation: Conversation, opening: IdArray) -> Prompt:
    """Continue a recorded turn where the request does; otherwise a branch, with what ids it shares. ``opening`` are
    ids that the reply has to begin with; they end the prompt.

    Raises ``UsageError`` for messages the renderer refuses.
    """
    tree.meet(conversation)
    conversation = tree.recognised(conversation)
    replies = _replies(tree, conversation)
    found = tree.continued_by(conversation)
    history = None
    if found is not None:
        place, length = found
        replies[length - 1] = place.said
        history = _continued(renderer, tree, conversation, replies, place, length - 1)
    elif replies:
        history = _spliced(renderer, tree, conversation, replies)
    follows = replies[max(replies)] if replies else None
    if history is None:
        history = _History(_anew(renderer, tree, conversation, replies))
    ids = np.concatenate([history.ids, opening]) if len(opening) else history.ids
    begins = (history.parent, history.shared)
    if history.parent is None:
        begins = tree.shared_prefix(ids, history.place)
    return Prompt(ids, *begins, follows, conversation, history.replies)


@dataclass(frozen=True, slots=True)
class _History:
    """A prompt's ids, whole; the turn whose sequence they begin with, where that is known without looking, or a place
    to look from; where recorded replies end in them."""

    ids: IdArray
    parent: str | None = None
    shared: int = 0
    place: Place | None = None
    replies: Sequence[tuple[int, Turn, int]] = ()


def _replies(tree: TurnTree, conversation: Conversation) -> dict[int, Turn]:
    """Position -> turn, for every message that a turn of this session said. What precedes the first is a prompt."""
    found = conversation.replies
    messages, digests = conversation.messages, conversation.digests
    for position in range(max(found, default=0) + 1, len(messages)):
        message = messages[position]
        if message.role == "assistant":
            turn = tree.reply(digests[position], message)
            if turn is not None and turn.exact:
                found[position] = turn
    return found


def _continued(
    renderer: Renderer,
    tree: TurnTree,
    conversation: Conversation,
    replies: Mapping[int, Turn],
    place: Place,
    start: int,
) -> _History | None:
    """Recorded ids up to the reply at message ``start``, and what follows it."""
    pieces = _pieces(renderer, tree, conversation, replies, start)
    if pieces is None:
        return None
    recorded = tree.sequence(place.holder)[: place.length]
    ids, ends = _joined([(-1, recorded), *pieces[1:]], replies)
    if ends or place.length < place.holder.prompt_tokens + place.holder.completion_tokens:
        return _History(ids, place=place, replies=ends)  # another turn may share more of it
    return _History(ids, place.holder.id, place.length, replies=ends)


def _spliced(
    renderer: Renderer, tree: TurnTree, conversation: Conversation, replies: Mapping[int, Turn]
) -> _History | None:
    """A prompt whose history was changed before the first recorded reply: the replies keep their ids."""
    first = min(replies)
    pieces = _pieces(renderer, tree, conversation, replies, first, again=True)
    if pieces is None:
        return None
    try:
        head = renderer.render(conversation.messages[:first], conversation.tools)
    except UsageError:
        return None  # the whole may be fine, or says better what is wrong
    ids, ends = _joined([(-1, head), *pieces], replies)
    return _History(ids, replies=ends)


def _anew(renderer: Renderer, tree: TurnTree, conversation: Conversation, replies: Mapping[int, Turn]) -> IdArray:
    """A prompt rendered from the start, with the replies' own ids where the renderer can put them in."""
    if replies:
        own = {position: tree.own_ids(turn) for position, turn in replies.items()}
        replayed = renderer.replay(_as_said(conversation, replies, 0), own, conversation.tools)
        if replayed is not None:
            return replayed
    return renderer.render(conversation.messages, conversation.tools)


def _pieces(
    renderer: Renderer,
    tree: TurnTree,
    conversation: Conversation,
    replies: Mapping[int, Turn],
    start: int,
    *,
    again: bool = False,
) -> list[tuple[int, IdArray]] | None:
    """The ids from the reply at message ``start`` on: each reply's own, with its position, then what was said until
    the next. ``again``: all of it has to be put together for every request, so that it is kept.

    The renderer sees recorded replies as they were said, with the reasoning that the agent may have dropped.
    """
    messages = _as_said(conversation, replies, start)
    tools, digests = conversation.links[0], conversation.digests
    ordered = sorted(position for position in replies if position >= start)
    pieces: list[tuple[int, IdArray]] = []
    for position, end in zip(ordered, [*ordered[1:], len(messages)], strict=True):
        turn = replies[position]
        key = canonical.links(tools, digests[position + 1 : end])[-1] if again else b""
        suffix = tree.rendered_after(turn, key) if again else None
        if suffix is None:
            new = messages[position + 1 : end]
            suffix = renderer.extend(messages[: position + 1], turn.completion, new, conversation.tools)
            if suffix is None:
                return None
            if again:
                tree.keep_after(turn, key, suffix)
        pieces += [(position, tree.own_ids(turn)), (-1, suffix)]
    return pieces


def _as_said(conversation: Conversation, replies: Mapping[int, Turn], start: int) -> list[Message]:
    """The messages with recorded replies as they were recorded, and from ``start`` on with results under the ids that
    their calls have there: agents give calls other ids."""
    messages = list(conversation.messages)
    for position, turn in replies.items():
        messages[position] = turn.message
    renamed: dict[str | None, str] = {}
    open_calls: list[str] = []
    for position in range(start, len(messages)):
        message = messages[position]
        if message.role == "assistant":
            theirs = [call.id for call in conversation.messages[position].tool_calls]
            open_calls = [call.id for call in message.tool_calls]
            renamed = dict(zip(theirs, open_calls, strict=False)) if len(set(theirs)) == len(theirs) else {}
        elif message.role == "tool" and open_calls:
            own = renamed.get(message.tool_call_id)
            if own not in open_calls:
                own = open_calls[0]  # by its place
            open_calls.remove(own)
            if own != message.tool_call_id:
                messages[position] = msgspec.structs.replace(message, tool_call_id=own)
    return messages


def _joined(
    pieces: Sequence[tuple[int, IdArray]], replies: Mapping[int, Turn]
) -> tuple[IdArray, list[tuple[int, Turn, int]]]:
    """The pieces as one, and where the last replies end in it."""
    ends: list[tuple[int, Turn, int]] = []
    length = 0
    for position, piece in pieces:
        length += len(piece)
        if position >= 0:
            ends.append((position, replies[position], length))
    return np.concatenate([piece for _, piece in pieces]), ends[-_PLACES:]
