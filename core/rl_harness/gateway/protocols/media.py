"""What of a conversation is no text: refused where the model takes text only, else kept as a chat API takes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from rl_harness.gateway.protocols.fields import ChatPart, stand_in, text_only
from rl_harness.gateway.upstream import as_openai
from rl_harness.records.turn import Message

Part = TypeVar("Part", bound="Any")
"""A protocol's own part of a message: a text, or something with a ``type``."""


class Media(Generic[Part]):
    """Content that is more than text, by the number of its message.

    ``exact``: the model takes text only. ``plain`` gives a part as text, or None for what is none, and ``chat_part``
    makes of the latter, found at a place in the request, what a chat API takes.
    """

    def __init__(
        self,
        exact: bool,
        plain: Callable[[Part | str], str | None],
        chat_part: Callable[[Part, str], ChatPart],
    ) -> None:
        self._exact = exact
        self._plain = plain
        self._chat_part = chat_part
        self._kept: dict[int, list[ChatPart]] = {}

    def text(self, message: int, parts: Iterable[tuple[str, Part | str]]) -> str:
        """The text of a message's parts, each given with its place in the request."""
        texts: list[str] = []
        shaped: list[ChatPart] = []
        more = False
        for where, part in parts:
            text = self._plain(part)
            if text is not None:
                texts.append(text)
                shaped.append({"type": "text", "text": text})
                continue
            assert not isinstance(part, str)
            if self._exact:
                raise text_only(where, part.type)
            shaped.append(self._chat_part(part, where))
            texts.append(stand_in(part.type, shaped[-1]))
            more = True
        if more:
            self._kept[message] = shaped
        return "\n".join(texts)

    def messages(self, messages: Sequence[Message]) -> list[dict[str, Any]] | None:
        """What a chat API is sent in the place of ``messages``; None if they hold nothing but text."""
        if not self._kept:
            return None
        shaped = [as_openai(message) for message in messages]
        for position, parts in self._kept.items():
            shaped[position]["content"] = parts
        return shaped
