"""A policy that tells somebody of every turn before the client has the end of its reply."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from rl_harness.gateway.calls import Call, Finish, Piece
from rl_harness.gateway.sessions import Policy, Session
from rl_harness.records import Turn

#: Told the session, the turn, and the id that the client knows the reply by; of several replies to one call, the later
#: ones by that id with their number behind it.
Recorder = Callable[[Session, Turn, str], Awaitable[None]]


class RecordingPolicy:
    """``policy``, whose turns are given to ``record``: what a client was told is complete is on record."""

    def __init__(self, policy: Policy, record: Recorder) -> None:
        self._policy = policy
        self._record = record
        self.name = policy.name
        self.protocol = policy.protocol

    async def answer(self, session: Session, call: Call) -> AsyncGenerator[Piece | Finish]:
        async with aclosing(self._policy.answer(session, call)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Finish):
                    session.completed(call, piece.turn)
                    reply = f"{call.reply}/{call.choice}" if call.choice else call.reply
                    await self._record(session, piece.turn, reply)
                yield piece

    async def count(self, session: Session, call: Call) -> int:
        return await self._policy.count(session, call)
