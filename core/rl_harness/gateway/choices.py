"""Several replies to one call, sampled at the same time: each is a turn of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from rl_harness.gateway.calls import Call, Finish, Piece
from rl_harness.gateway.sessions import Policy, Session


async def several(policy: Policy, session: Session, call: Call) -> AsyncGenerator[Piece | Finish]:
    """Pieces of all ``call.n`` replies as they come, each with the number of its reply, and a Finish of each.

    Where one of them fails, the others are cancelled and its error is raised.
    """
    ready: asyncio.Queue[Piece | Finish | BaseException] = asyncio.Queue(maxsize=call.n)

    async def answer(number: int) -> None:
        try:
            async with aclosing(policy.answer(session, msgspec.structs.replace(call, choice=number))) as pieces:
                async for piece in pieces:
                    await ready.put(msgspec.structs.replace(piece, choice=number))
        except BaseException as error:
            if not closing:
                await ready.put(error)

    tasks = [asyncio.create_task(answer(number)) for number in range(call.n)]
    left = call.n
    closing = False
    try:
        while left:
            piece = await ready.get()
            if isinstance(piece, BaseException):
                raise piece
            left -= isinstance(piece, Finish)
            yield piece
    finally:
        closing = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
