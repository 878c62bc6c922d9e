"""The turns of one session as a tree: which recorded turn a request continues, and which ids turns share.

Everything is kept once. A turn stores the ids that follow its parent's; two indexes, one by what was said and
one by ids, find a turn in time proportional to the request, not to the number of turns.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl_harness.contracts.renderer import ToolSpec
from rl_harness.gateway import canonical
from rl_harness.records.arrays import IdArray
from rl_harness.records.turn import Message, Turn, prompt_of

_CALL_ID = re.compile(r"call_[0-9a-f]{24}")
#: Characters that an agent may put around a call that it tells as text.
_AROUND_A_CALL = 400
#: Sequences kept whole, for the conversations that are being continued.
_RECENT = 4

_MOST_TOOLS = 256
_tools: dict[bytes, tuple[ToolSpec, ...]] = {}


def texts(message: Message) -> list[str]:
    """All that a message says."""
    said = [message.content]
    if message.reasoning:
        said.append(message.reasoning)
    for call in message.tool_calls:
        said += (call.name, call.arguments)
    return said


class Conversation:
    """A request's messages, and digests of them once somebody asks. What costs is done once for what a session has seen
    before: see :meth:`TurnTree.meet`."""

    __slots__ = ("_digests", "_key", "_links", "messages", "replies", "tools")

    def __init__(self, messages: Sequence[Message], tools: Sequence[ToolSpec], key: bytes | None = None) -> None:
        self.messages = tuple(messages)
        self.tools = tuple(tools)
        #: Turns whose replies are known to be messages: position -> turn; of the first ones at least.
        self.replies: dict[int, Turn] = {}
        self._digests: tuple[bytes, ...] = ()
        self._links: tuple[bytes, ...] = ()
        self._key = key

    @classmethod
    def of(cls, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Conversation:
        return cls(messages, tools)

    @property
    def digests(self) -> tuple[bytes, ...]:
        """One a message."""
        known = len(self._digests)
        if known < len(self.messages):
            self._digests += tuple(map(canonical.digest, self.messages[known:]))
        return self._digests

    @property
    def links(self) -> tuple[bytes, ...]:
        """``links[i]`` stands for the tools and the first i messages."""
        if not self._links:
            start = canonical.digest_tools(self.tools)
            if self.tools:
                self.tools = _shared(start, self.tools)
            self._links = (start,)
        if len(self._links) <= len(self.messages):
            self._links += canonical.links(self._links[-1], self.digests[len(self._links) - 1 :])[1:]
        return self._links

    @property
    def key(self) -> bytes:
        """The same for two requests that ask the same."""
        return self.links[-1] if self._key is None else self._key

    @property
    def size(self) -> int:
        """Characters in its messages."""
        size = 0
        for message in self.messages:
            size += len(message.content)
            if message.reasoning or message.tool_calls:
                size += sum(map(len, texts(message)[1:]))
        return size

    def begin_with(self, other: Conversation, same: Sequence[bool]) -> None:
        """Take over what is known of another conversation, of which the messages marked in ``same`` are this one's."""
        mine, theirs = self.messages, other.messages
        count = len(same)
        # Texts need not be in memory twice.
        self.messages = (*(theirs[n] if same[n] else mine[n] for n in range(count)), *mine[count:])
        known = other.digests
        self._digests = tuple(known[n] if same[n] else canonical.digest(mine[n]) for n in range(count))
        if self.tools == other.tools:
            self.tools = other.tools
            first = next((n for n in range(count) if not same[n]), count)
            self._links = other.links[: first + 1]
        self.replies = {
            position: turn for position, turn in other.replies.items() if position < count and same[position]
        }


def _shared(digest: bytes, tools: tuple[ToolSpec, ...]) -> tuple[ToolSpec, ...]:
    """One object for the same tools, of which agents send some hundred kilobytes, and every session's are the same."""
    if len(_tools) >= _MOST_TOOLS:
        _tools.clear()
    known = _tools.setdefault(digest, tools)
    return known if known == tools else tools  # they may differ in marks


@dataclass(slots=True)
class _Node:
    turn: Turn
    request: bytes  # Conversation.key of the request it answered
    link: bytes  # of that request's messages
    opening: int  # ids at the prompt's end that its reply had to begin with
    follows: str | None  # the turn that the request goes on from
    owner: str | None = None  # the turn whose part of the radix tree its sequence ends in
    start: int = 0  # where its own part of it begins, if it has one
    continued: bool = False  # a later turn's history holds its reply


@dataclass(frozen=True, slots=True)
class Place:
    """Where a history is in recorded ids: ``said`` is the turn whose reply it ends with; the first ``length`` ids of
    the sequence of the turn ``holder`` are it."""

    said: Turn
    holder: Turn
    length: int


@dataclass(frozen=True, slots=True)
class Standing:
    """What a tree knows of a turn beside the turn: the ``key`` and the last of the ``links`` of the conversation it
    answered, how many ids its reply had to begin with, and the id of the turn it goes on from. With it the turn can be
    put into another tree, in another process."""

    request: bytes
    link: bytes
    opening: int
    follows: str | None


class TurnTree:
    """Recorded turns of one session, in the order they were completed. ``first`` turns of the session came before, and
    are not in it."""

    def __init__(self, first: int = 0) -> None:
        self._first = first
        self.turns: list[Turn] = []
        self._nodes: dict[str, _Node] = {}
        self._by_link: dict[bytes, list[Place]] = {}
        self._by_reply: dict[bytes, list[_Node]] = {}
        self._by_request: dict[bytes, list[_Node]] = {}
        self._by_call: dict[str, Turn] = {}
        self._recent: dict[str, IdArray] = {}
        self._met: list[Conversation] = []
        # What was rendered after a turn's reply: only for histories that had to be put together from their replies.
        self._after: dict[tuple[str, bytes], IdArray] = {}
        # A radix tree over sequences: (turn, position, next id) -> a turn whose sequence leaves that turn's there,
        # and the ids from there on.
        self._branches: dict[tuple[str | None, int, int], tuple[str, IdArray]] = {}

    @property
    def next_index(self) -> int:
        """The index of the turn that is completed next."""
        return self._first + len(self.turns)

    def __contains__(self, id: str) -> bool:
        return id in self._nodes

    def turn(self, id: str) -> Turn:
        return self._nodes[id].turn

    def sequence(self, turn: Turn) -> IdArray:
        """Prompt and completion of a turn."""
        found = self._recent.get(turn.id)
        if found is None:
            before = self._recent.get(turn.parent) if turn.parent is not None else None
            prompt = prompt_of(turn, self.turn) if before is None else (before[: turn.shared], turn.context)
            found = np.concatenate([*prompt, turn.completion] if before is not None else [prompt, turn.completion])
            found.flags.writeable = False
            self._recent[turn.id] = found
            for old in list(self._recent)[:-_RECENT]:
                self._recent.pop(old, None)
        return found

    def meet(self, conversation: Conversation) -> None:
        """Spare a conversation what has been found out about its beginning when that was asked before."""
        if conversation in self._met:
            return
        best: Conversation | None = None
        most: list[bool] = []
        met = self._met  # replaced, never changed: prompts of long conversations are built in other threads
        for other in met:
            same = [one == another for one, another in zip(other.messages, conversation.messages, strict=False)]
            if sum(same) > sum(most):
                best, most = other, same
        if best is not None:
            conversation.begin_with(best, most)
            if len(most) == len(best.messages):
                met = [other for other in met if other is not best]
        self._met = [*met, conversation][-_RECENT:]

    def own_ids(self, turn: Turn) -> IdArray:
        """The ids of a turn's reply, with those that it had to begin with."""
        opening = self._nodes[turn.id].opening
        if not opening:
            return turn.completion
        return np.concatenate([turn.context[len(turn.context) - opening :], turn.completion])

    def recognised(self, conversation: Conversation) -> Conversation:
        """The conversation with replies that an agent tells as text (which call it made, under which id) as they were
        said."""
        if not self._by_call:
            return conversation
        told: dict[int, Message] = {}
        for position, message in enumerate(conversation.messages):
            if message.role == "assistant" and not message.tool_calls and "call_" in message.content:
                turn = self._told(message.content)
                if turn is not None:
                    told[position] = turn.message
        if not told:
            return conversation
        messages = [told.get(position, message) for position, message in enumerate(conversation.messages)]
        return Conversation(messages, conversation.tools, conversation.key)

    def _told(self, text: str) -> Turn | None:
        """The turn whose reply ``text`` tells: its words and its calls, and little else."""
        named = dict.fromkeys(_CALL_ID.findall(text))
        turn = next((self._by_call[id] for id in named if id in self._by_call), None)
        if turn is None:
            return None
        said = turn.message
        calls = said.tool_calls
        known = len(said.content) + sum(2 * len(call.arguments) + _AROUND_A_CALL for call in calls)
        whole = [call.id for call in calls] == list(named) and all(call.name in text for call in calls)
        return turn if whole and said.content.strip() in text and len(text) <= known else None

    def continued_by(self, conversation: Conversation) -> tuple[Place, int] | None:
        """Where the longest beginning of a conversation that ends with a reply is recorded, and its length."""
        for length in range(len(conversation.messages), 0, -1):
            places = self._by_link.get(conversation.links[length])
            if places:
                return _best(places, conversation.messages[length - 1]), length
        return None

    def reply(self, digest: bytes, message: Message) -> Turn | None:
        """A turn that said ``message``."""
        nodes = self._by_reply.get(digest)
        return _best([Place(node.turn, node.turn, 0) for node in nodes], message).said if nodes else None

    def rendered_after(self, turn: Turn, new: bytes) -> IdArray | None:
        """What :meth:`keep_after` kept."""
        return self._after.get((turn.id, new))

    def keep_after(self, turn: Turn, new: bytes, rendered: IdArray) -> None:
        """Keep what messages with the link ``new`` were rendered to after a turn's reply."""
        self._after[turn.id, new] = rendered

    def answered(self, conversation: Conversation) -> list[Turn]:
        """Turns that answered exactly this request."""
        return [node.turn for node in self._by_request.get(conversation.key, ())]

    def unused_answer(self, conversation: Conversation) -> Turn | None:
        """The latest turn that answered exactly this request, unless the conversation went on from one."""
        nodes = self._by_request.get(conversation.key)
        if not nodes or any(node.continued for node in nodes):
            return None
        return nodes[-1].turn

    def shared_prefix(self, tokens: IdArray, place: Place | None = None) -> tuple[str | None, int]:
        """The turn whose sequence has the longest beginning in common with ``tokens``, and how long that is.
        ``place``: where a beginning of them is known to be."""
        if place is not None:
            holder = place.holder
            node = self._nodes[holder.id]
            if node.owner == holder.id and place.length > node.start:
                return self._leave(tokens[place.length :], holder.id, place.length)
        return self._descend(tokens, None, 0)

    def _leave(self, tokens: IdArray, owner: str | None, start: int) -> tuple[str | None, int]:
        """Where ``tokens``, which follow position ``start`` in the own part of a turn, leave the radix tree."""
        if owner is not None:
            same = _common(self.sequence(self.turn(owner))[start:], tokens)
            tokens, start = tokens[same:], start + same
        return self._descend(tokens, owner, start)

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

    def add(
        self,
        turn: Turn,
        conversation: Conversation,
        follows: Turn | None,
        *,
        opening: int = 0,
        replies: Sequence[tuple[int, Turn, int]] = (),
    ) -> None:
        """Record a turn. ``follows``: the turn its prompt continues, whose history is this one's beginning.
        ``opening``: how many ids at the end of the prompt belong to the reply. ``replies``: where in the conversation
        and in the prompt's ids other turns' replies end, as far as nobody knows yet."""
        for position, said, length in replies:
            self._by_link.setdefault(conversation.links[position + 1], []).append(Place(said, turn, length))
        follows_id = None if follows is None else follows.id
        self.restore(turn, Standing(conversation.key, conversation.links[-1], opening, follows_id))

    def standing(self, id: str) -> Standing:
        node = self._nodes[id]
        return Standing(node.request, node.link, node.opening, node.follows)

    def restore(self, turn: Turn, standing: Standing) -> None:
        """Record a turn that another tree had. Its parent must be here; the turn that it goes on from may not be."""
        before = self._nodes.get(standing.follows or "")
        if before is not None:
            before.continued = True
        node = _Node(turn, standing.request, standing.link, standing.opening, standing.follows)
        reply = canonical.digest(turn.message)
        self.turns.append(turn)
        self._nodes[turn.id] = node
        length = turn.prompt_tokens + turn.completion_tokens
        self._by_link.setdefault(canonical.chain(standing.link, reply), []).append(Place(turn, turn, length))
        self._by_reply.setdefault(reply, []).append(node)
        self._by_request.setdefault(standing.request, []).append(node)
        for call in turn.message.tool_calls:
            self._by_call[call.id] = turn
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
            # What it shares ends in a part of the radix tree that is its parent's own.
            start = turn.shared if turn.parent is not None else 0
            owner, position = self._leave(own, turn.parent, start)
        # The tree has at least what the turn shares with its parent, so that the rest is all the turn's own.
        rest = own[position - start :]
        if len(rest):
            self._branches[owner, position, int(rest[0])] = (turn.id, rest)
            owner = turn.id
            node.start = position
        node.owner = owner


def _best(places: Sequence[Place], message: Message) -> Place:
    """Of turns that said the same, the one whose call ids and reasoning agree too; then the latest."""
    if len(places) == 1:
        return places[0]
    calls = [call.id for call in message.tool_calls]

    def likeness(place: Place) -> tuple[bool, bool]:
        said = place.said.message
        return calls == [call.id for call in said.tool_calls], message.reasoning == said.reasoning

    return max(reversed(places), key=likeness)


def _common(a: IdArray, b: IdArray) -> int:
    size = min(len(a), len(b))
    if not size:
        return 0
    differs = a[:size] != b[:size]
    first = int(differs.argmax())
    return first if differs[first] else size
