"""What passes between protocols and policies: a model call, and its reply in pieces."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from rl_harness.contracts.renderer import Delta
from rl_harness.gateway.tree import Conversation
from rl_harness.records.turn import SamplingParams, Turn


class NamedTool(msgspec.Struct, frozen=True):
    name: str


ToolChoice = Literal["auto", "none", "required"] | NamedTool


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One model call, whatever protocol it came by.

    ``tool_choice``: the reply may call tools (``auto``), must not (``none``), must call one (``required``), or must
    call the one named; without ``parallel`` it ends with its first call. ``json_schema``: its text has to be JSON of
    that schema. ``n``: how many replies are wanted, of which this call is number ``choice``. ``retry``: its client says
    that it sends this again. ``reply`` is the id that its client will know the reply by. ``options`` are fields for the
    model behind a chat API, passed on as they are; what they do not have is made of the rest.
    """

    conversation: Conversation
    sampling: SamplingParams
    tool_choice: ToolChoice = "auto"
    parallel: bool = True
    json_schema: Mapping[str, Any] | None = None
    logprobs: bool = False
    n: int = 1
    choice: int = 0
    retry: bool = False
    reply: str = ""
    options: Mapping[str, Any] = {}


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """A sampled token, for clients that ask for log-probs."""

    text: str
    logp: float
    top: tuple[tuple[str, float], ...] = ()


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """What one chunk of the engine made certain; perhaps nothing.

    ``prompt_tokens`` and ``cached_tokens``, in a reply's first piece, are those of its prompt, where they are known
    that early. ``choice``: which of several replies it belongs to. ``final``: its Finish follows at once.
    """

    deltas: Sequence[Delta] = ()
    tokens: Sequence[Token] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    choice: int = 0
    final: bool = False


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a reply whose turn is recorded."""

    turn: Turn
    choice: int = 0


async def replay(turn: Turn) -> AsyncGenerator[Piece | Finish]:
    """The reply of a recorded turn once more."""
    message = turn.message
    deltas = [Delta(reasoning=message.reasoning)] if message.reasoning else []
    deltas += [Delta(text=message.content)] if message.content else []
    deltas += [Delta(tool_call=call) for call in message.tool_calls]
    yield Piece(deltas=deltas, prompt_tokens=turn.prompt_tokens, cached_tokens=turn.cached_tokens)
    yield Finish(turn=turn)
