"""A turn: one model call, recorded exactly, and how its full token sequence is put together.

A turn does not repeat its prompt. It names an earlier turn of the session whose sequence it starts with
(``parent``, ``shared`` leading ids of it) and stores only the ids that follow, so a conversation of n turns
costs O(total new tokens), not O(n²).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from rl_harness.records.arrays import IdArray, LogpArray, finite


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one completion is sampled.

    ``temperature`` 0 is greedy. ``top_k`` 0 and ``top_p`` 1 switch truncation off. ``stop`` strings end the
    completion after the token that completes them. ``seed`` makes the completion reproducible whatever else
    runs in the same batch; None draws a fresh one.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    top_logprobs: int = 0


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call the model asked for. ``arguments`` is the JSON text as the client receives it."""

    id: str
    name: str
    arguments: str


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A chat message in the one form that renderers take.

    ``role`` is ``system``, ``user``, ``assistant`` or ``tool``. ``content`` is plain text.
    """

    role: str
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


class Turn(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One model call.

    ``logps[i]`` is the log-probability (nats) of ``completion[i]`` under the distribution it was sampled from,
    i.e. after temperature and truncation; ``versions[i]`` is the policy version that sampled it. A turn of a
    model behind a remote API has ``exact=False`` and empty arrays: it can be reported but not trained on.
    ``parent`` and ``shared``: the prompt starts with the first ``shared`` ids of the parent's prompt+completion
    and continues with ``context``. ``message`` is what the client was given. Where the history a turn goes on
    from was rewritten by the chat template (earlier reasoning dropped, say), so that the ids do not tell,
    ``extra["follows"]`` names that turn. A turn that held a secret has ``exact=False`` and no ids either, its message
    is redacted, and ``extra["secrets"]`` names what it held.
    """

    id: str
    session: str
    index: int
    policy: str
    sampling: SamplingParams
    parent: str | None
    shared: int
    context: IdArray
    completion: IdArray
    logps: LogpArray
    versions: IdArray
    finish_reason: str
    message: Message
    prompt_tokens: int
    completion_tokens: int
    exact: bool = True
    cached_tokens: int = 0
    started_at: float = 0.0
    seconds: float = 0.0
    first_token_seconds: float | None = None
    extra: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if len(self.logps) != len(self.completion) or len(self.versions) != len(self.completion):
            raise ValueError(f"turn {self.id}: completion, logps and versions differ in length")
        if self.exact and self.completion_tokens != len(self.completion):
            raise ValueError(f"turn {self.id}: completion_tokens is not the number of completion ids")
        if not finite(self.logps):
            raise ValueError(f"turn {self.id}: a log-prob is not finite")

    @property
    def quarantined(self) -> tuple[str, ...]:
        """What secrets it held, by name: it is shown without them, and neither trained on nor exported."""
        return tuple(self.extra.get("secrets", ()))


def sequence_of(turn: Turn, lookup: Callable[[str], Turn]) -> IdArray:
    """Prompt and completion ids of a turn, ``int32[prompt_tokens + completion_tokens]``."""
    return np.concatenate([prompt_of(turn, lookup), turn.completion])


def prompt_of(turn: Turn, lookup: Callable[[str], Turn]) -> IdArray:
    """The exact prompt ids of a turn, ``int32[prompt_tokens]``; ``lookup`` finds a turn by id."""
    pieces: list[IdArray] = [turn.context]
    parent, shared = turn.parent, turn.shared
    while parent is not None and shared > 0:
        node = lookup(parent)
        own_start = node.shared if node.parent is not None else 0
        if shared > own_start:
            own = np.concatenate([node.context, node.completion])
            pieces.append(own[: shared - own_start])
            shared = own_start
        parent = node.parent
    pieces.reverse()
    prompt = np.concatenate(pieces)
    if len(prompt) != turn.prompt_tokens:
        raise ValueError(f"turn {turn.id}: prompt has {len(prompt)} ids, {turn.prompt_tokens} were recorded")
    return prompt


def continued_turn(turn: Turn, turns: Mapping[str, Turn]) -> str | None:
    """Id of the turn that ``turn`` goes on from: the nearest one whose completion its prompt contains.

    ``Turn.parent`` says whose ids are shared, which may be no more than a system prompt. A prompt that shares
    nothing of a completion does not go on from it: it is another branch (a sub-agent, a rewritten history). Where
    a chat template did the rewriting, the recorded turn says itself what it follows.
    """
    follows = turn.extra.get("follows")
    if follows in turns:
        return str(follows)
    parent, shared = turn.parent, turn.shared
    while parent is not None:
        node = turns[parent]
        if shared > node.prompt_tokens:
            return parent
        parent, shared = node.parent, min(shared, node.shared)
    return None
