"""The turns of one session as a tree: which recorded turn a request continues, and which ids turns share.

Everything is kept once. A turn stores the ids that follow its parent's; two indexes, one by what was said and
one by ids, find a turn in time proportional to the request, not to the number of turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl_harness.contracts.renderer import ToolSpec
from rl_harness.gateway import canonical
from rl_harness.records.arrays import IdArray
from rl_harness.records.turn import Message, Turn, sequence_of


@dataclass(frozen=True, slots=True)
class Conversation:
    """A request's messages with their digests. ``links[i]`` stands for the tools and the first i messages."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    digests: tuple[bytes, ...]
    links: tuple[bytes, ...]

    @classmethod
    def of(cls, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Conversation:
        digests = tuple(canonical.digest(message) for message in messages)
        links = [canonical.digest_tools(tools)]
        for one in digests:
            links.append(canonical.chain(links[-1], one))
        return cls(tuple(messages), tuple(tools), digests, tuple(links))

    @property
    def size(self) -> int:
        """Characters in it, about."""
        return sum(
            len(message.content) + sum(len(call.arguments) for call in message.tool_calls) for message in self.messages
        )

    @property
    def key(self) -> bytes:
        """The same for two requests that ask the same."""
        return self.links[-1]


@dataclass(slots=True)
class _Node:
    turn: Turn
    request: bytes  # Conversation.key of the request it answered
    length: int  # messages up to and including its reply
    follows: _Node | None  # the turn whose reply its request's history holds last, if that history is its own
    owner: str | None = None  # the turn whose part of the radix tree its sequence ends in
    continued: bool = False  # a later turn's history holds its reply


class TurnTree:
    """Recorded turns of one session, in the order they were completed."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self._nodes: dict[str, _Node] = {}
        self._by_link: dict[bytes, list[_Node]] = {}
        self._by_reply: dict[bytes, list[_Node]] = {}
        self._by_request: dict[bytes, list[_Node]] = {}
        # A radix tree over sequences: (turn, position, next id) -> a turn whose sequence leaves that turn's there,
        # and the ids from there on.
        self._branches: dict[tuple[str | None, int, int], tuple[str, IdArray]] = {}

    def turn(self, id: str) -> Turn:
        return self._nodes[id].turn

    def sequence(self, turn: Turn) -> IdArray:
        """Prompt and completion of a turn."""
        return sequence_of(turn, self.turn)

    def continued_by(self, conversation: Conversation) -> tuple[Turn, int] | None:
        """The turn whose request and reply are the longest beginning of a conversation, and its length."""
        for length in range(len(conversation.messages), 0, -1):
            nodes = self._by_link.get(conversation.links[length])
            if nodes:
                return _best(nodes, conversation.messages[length - 1]).turn, length
        return None

    def reply(self, digest: bytes, message: Message) -> Turn | None:
        """A turn that said ``message``."""
        nodes = self._by_reply.get(digest)
        return _best(nodes, message).turn if nodes else None

    def replies_before(self, turn: Turn) -> dict[int, Turn]:
        """Position in the conversation -> turn, for ``turn`` and all it follows."""
        found: dict[int, Turn] = {}
        node: _Node | None = self._nodes[turn.id]
        while node is not None:
            found[node.length - 1] = node.turn
            node = node.follows
        return found

    def answered(self, conversation: Conversation) -> list[Turn]:
        """Turns that answered exactly this request."""
        return [node.turn for node in self._by_request.get(conversation.key, ())]

    def unused_answer(self, conversation: Conversation) -> Turn | None:
        """The latest turn that answered exactly this request, unless the conversation went on from one."""
        nodes = self._by_request.get(conversation.key)
        if not nodes or any(node.continued for node in nodes):
            return None
        return nodes[-1].turn

    def shared_prefix(self, tokens: IdArray) -> tuple[str | None, int]:
        """The turn whose sequence has the longest beginning in common with ``tokens``, and how long that is."""
        return self._descend(tokens, None, 0)

    def _descend(self, tokens: IdArray, owner: str | None, start: int) -> tuple[str | None, int]:
        """How far the radix tree has ``tokens``, which follow position ``start`` of a sequence that it has, and in
        whose sequence that ends."""
        position = start
        while position - start < len(tokens):
            branch = self._branches.get((owner, position, int(tokens[position - start])))
            if branch is None:
                break
            owner, own = branch
            position += _common(own, tokens[position - start :])
        return owner, position

    def add(self, turn: Turn, conversation: Conversation, follows: Turn | None) -> None:
        """Record a turn. ``follows``: the turn its prompt continues, whose history is this one's beginning."""
        before = None if follows is None else self._nodes[follows.id]
        if before is not None:
            before.continued = True
        node = _Node(turn, conversation.key, len(conversation.messages) + 1, before)
        reply = canonical.digest(turn.message)
        self.turns.append(turn)
        self._nodes[turn.id] = node
        self._by_link.setdefault(canonical.chain(conversation.key, reply), []).append(node)
        self._by_reply.setdefault(reply, []).append(node)
        self._by_request.setdefault(conversation.key, []).append(node)
        if turn.exact:
            self._index(node)

    def _index(self, node: _Node) -> None:
        turn = node.turn
        own = np.concatenate([turn.context, turn.completion])
        parent = None if turn.parent is None else self._nodes[turn.parent]
        if parent is not None and turn.shared == parent.turn.prompt_tokens + parent.turn.completion_tokens:
            # It continues its parent, whose whole sequence is known to be in the tree.
            start = turn.shared
            owner, position = self._descend(own, parent.owner, start)
        else:
            start = turn.shared if turn.parent is not None else 0
            owner, position = self.shared_prefix(self.sequence(turn))
        # The tree has at least what the turn shares with its parent, so that the rest is all the turn's own.
        rest = own[position - start :]
        if len(rest):
            self._branches[owner, position, int(rest[0])] = (turn.id, rest)
            owner = turn.id
        node.owner = owner


def _best(nodes: Sequence[_Node], message: Message) -> _Node:
    """Of turns that said the same, the one whose call ids and reasoning agree too; then the latest."""
    if len(nodes) == 1:
        return nodes[0]
    calls = [call.id for call in message.tool_calls]

    def likeness(node: _Node) -> tuple[bool, bool]:
        said = node.turn.message
        return calls == [call.id for call in said.tool_calls], message.reasoning == said.reasoning

    return max(reversed(nodes), key=likeness)


def _common(a: IdArray, b: IdArray) -> int:
    size = min(len(a), len(b))
    differs = np.flatnonzero(a[:size] != b[:size])
    return int(differs[0]) if len(differs) else size
