"""Turns partial implementations of Modal's services into servable ones: faults and authorization around each method,
and UNIMPLEMENTED for the rest."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from grpclib import GRPCError, Status
from grpclib.const import Handler

from modal_standin.faults import Empty, Faults

Authorize = Callable[[str, Any], None]


async def unimplemented(self: object, stream: Any) -> None:
    raise GRPCError(Status.UNIMPLEMENTED, "the stand-in does not have this")


def complete(base: type) -> type:
    """``base`` with every abstract method answering UNIMPLEMENTED, to derive from."""
    return type(f"Complete{base.__name__}", (base,), dict.fromkeys(base.__abstractmethods__, unimplemented))


class Guarded:
    def __init__(self, mapping: dict[str, Handler]) -> None:
        self._mapping = mapping

    def __mapping__(self) -> dict[str, Handler]:
        return self._mapping


def guarded(service: Any, faults: Faults, authorize: Authorize | None) -> Guarded:
    def guard(name: str, serve: Callable[[Any], Awaitable[None]], reply: Any) -> Callable[[Any], Awaitable[None]]:
        async def call(stream: Any) -> None:
            try:
                lost = await faults.before(name)
            except Empty:
                await stream.recv_message()
                await stream.send_message(reply())
                return
            if authorize is not None:
                authorize(name, stream.metadata)
            if lost is not None:
                stream = AnswerLost(stream, lost)
            try:
                await serve(stream)
            except GRPCError:
                raise
            except Exception:
                logging.error("in %s:\n%s", name, traceback.format_exc())
                raise

        return call

    return Guarded(
        {
            path: handler._replace(func=guard(path.rpartition("/")[2], handler.func, handler.reply_type))
            for path, handler in service.__mapping__().items()
        }
    )


class AnswerLost:
    """A call whose work is done and whose answer does not arrive."""

    def __init__(self, stream: Any, error: GRPCError) -> None:
        self._stream = stream
        self._error = error
        self.metadata = stream.metadata

    async def recv_message(self) -> Any:
        return await self._stream.recv_message()

    async def send_message(self, message: object) -> None:
        raise self._error
