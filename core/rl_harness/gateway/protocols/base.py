"""What a protocol is: a body in, a call out; a reply's pieces in, bytes out. Knows nothing of HTTP, sessions' turns or
ids."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from rl_harness.gateway.calls import Call, Finish, Piece
from rl_harness.gateway.errors import ApiError
from rl_harness.gateway.sessions import Session
from rl_harness.records.turn import Turn


class Reply(abc.ABC):
    """Writes the reply to one request: whole from its turns, or as server-sent events."""

    def collect(self, piece: Piece) -> None:
        """Keep what only the whole reply needs of a piece."""

    @abc.abstractmethod
    def whole(self, turns: Sequence[Turn]) -> bytes:
        """The body of a reply that is not streamed; as many turns as the call asked for."""

    @abc.abstractmethod
    def first(self, piece: Piece) -> bytes:
        """Events that open a stream, whose first piece is still to be written."""

    @abc.abstractmethod
    def piece(self, piece: Piece) -> bytes:
        """Events for what became certain; empty if nothing did."""

    @abc.abstractmethod
    def last(self, finish: Finish) -> bytes:
        """Events that close one of the call's replies, and with the last of them the stream."""

    @abc.abstractmethod
    def failed(self, error: ApiError) -> bytes:
        """Events that tell of an error after a stream began."""

    def counted(self, tokens: int) -> bytes:
        """The body that says how many tokens a request's prompt has."""
        raise NotImplementedError("this protocol counts no tokens")


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed request: the call, how to answer it, and which of its wishes the session overrides. With ``counts`` only
    the tokens of its prompt are asked for."""

    call: Call
    reply: Reply
    stream: bool
    counts: bool = False
    overridden: tuple[str, ...] = ()


class Protocol(abc.ABC):
    """``name`` is the word for it in a harness's capabilities; ``path`` where it is posted to, below ``/v1``."""

    name: ClassVar[str]
    path: ClassVar[str]

    @abc.abstractmethod
    def parse(self, data: bytes, session: Session, *, retry: bool) -> Request:
        """Raises :class:`ApiError` (400) naming the field for anything that cannot be honoured."""

    @abc.abstractmethod
    def error(self, error: ApiError) -> bytes:
        """The body that tells of an error."""

    def models(self, name: str) -> bytes:
        """The body that lists the one model there is."""
        return msgspec.json.encode({"object": "list", "data": [msgspec.Raw(self.model(name))]})

    def model(self, name: str) -> bytes:
        """The body that describes a model."""
        return msgspec.json.encode({"id": name, "object": "model", "created": 0, "owned_by": "rl-harness"})


def sse(data: bytes, event: bytes = b"") -> bytes:
    """One server-sent event."""
    return b"event: %b\ndata: %b\n\n" % (event, data) if event else b"data: %b\n\n" % data
