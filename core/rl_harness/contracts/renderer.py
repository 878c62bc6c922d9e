"""Renderer plugins: chat messages and tools to token ids and back, for a model family.

A renderer owns tokenisation; nothing else in the project turns text into ids. It never re-tokenises what a model
sampled: a conversation is continued by :meth:`Renderer.extend`, which only renders the new messages.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rl_harness.contracts.common import Plugin
from rl_harness.records.arrays import IdArray
from rl_harness.records.turn import Message, ToolCall

ToolSpec = Mapping[str, Any]
"""A tool as OpenAI's ``{"type": "function", "function": {...}}``."""


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """Newly certain output: some text, some reasoning, or one whole tool call."""

    text: str = ""
    reasoning: str = ""
    tool_call: ToolCall | None = None


class StreamParser(abc.ABC):
    """Turns one completion's ids into text, reasoning and tool calls, incrementally.

    Text is held back only while it could still become a tool call, a stop string or an incomplete character.
    """

    @abc.abstractmethod
    def feed(self, ids: IdArray) -> list[Delta]: ...

    @abc.abstractmethod
    def finish(self, finish_reason: str) -> list[Delta]:
        """What was held back."""

    @property
    def stopped_at(self) -> int | None:
        """How many ids it took to complete a stop string, once one was seen: the completion ends there."""
        return None

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong with the calls so far: unknown tools, arguments that do not fit a tool's schema."""
        return ()

    @abc.abstractmethod
    def message(self) -> Message:
        """The whole assistant message; only after :meth:`finish`."""


class Renderer(Plugin):
    """Loaded once per model with :meth:`load`; then pure and safe to share."""

    @abc.abstractmethod
    def load(self, path: Path) -> None:
        """Read ``tokenizer.json``, ``tokenizer_config.json`` and the chat template of a model folder.

        Raises ``Unavailable`` naming the file that is missing."""

    @property
    @abc.abstractmethod
    def end_token_ids(self) -> tuple[int, ...]:
        """Ids that end an assistant turn."""

    @abc.abstractmethod
    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> IdArray:
        """A whole prompt, ready for the assistant's next turn. Raises ``UsageError`` for messages the template
        refuses."""

    @abc.abstractmethod
    def extend(
        self,
        messages: Sequence[Message],
        completion: IdArray,
        new: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
    ) -> IdArray | None:
        """Ids to append after a recorded turn (its prompt ids + ``completion``) so that ``new`` messages follow.

        ``messages`` is the conversation up to and including that turn's assistant message. The result begins
        with whatever closes the turn if ``completion`` does not end with an end token (context, never trained).
        None when the template rewrites what came before: the caller then renders anew, as a branch.
        """

    def replay(
        self, messages: Sequence[Message], completions: Mapping[int, IdArray], tools: Sequence[ToolSpec] = ()
    ) -> IdArray | None:
        """:meth:`render` for a history that cannot be extended, in which the replies at some positions are the ids that
        were sampled, but for reasoning that the template drops. None where a renderer cannot do that: then the text of
        these replies is tokenised."""
        return None

    @abc.abstractmethod
    def parser(self, tools: Sequence[ToolSpec] = (), stop: Sequence[str] = ()) -> StreamParser:
        """A parser for one completion. A stop string at the end of the completion is cut from the text."""

    def call_opening(self, name: str | None) -> IdArray | None:
        """Ids that leave a completion nothing but to call a tool (``name``, or any of its choice), to be put at the
        prompt's end; a parser is fed them before the completion. None where there are no such ids."""
        return None

    def count(self, text: str) -> int | None:
        """How many ids a piece of text has by itself, for a guess at how long a prompt would be; None where a renderer
        cannot tell."""
        return None

    @abc.abstractmethod
    def decode(self, ids: IdArray) -> str:
        """Text of some ids, special tokens included; for people to read."""
