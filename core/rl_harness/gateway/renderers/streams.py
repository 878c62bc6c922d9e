"""From sampled ids to text, reasoning and tool calls, incrementally. Each stage holds back only what is not yet
certain: an incomplete character, the beginning of a stop string, the beginning of a tag, an unfinished call."""

from __future__ import annotations

import codecs
import json
import secrets
from collections.abc import Sequence
from typing import Any

from rl_harness.contracts.renderer import Delta, StreamParser
from rl_harness.gateway.arguments import dump_object, load_object
from rl_harness.gateway.renderers.tokenizer import TokenizerFolder
from rl_harness.records.arrays import IdArray
from rl_harness.records.turn import Message, ToolCall

#: A tokenizer with byte fall-back spells a character in at most four tokens; more is not incomplete but garbage.
_MAX_PENDING = 4

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
_TAGS = frozenset({THINK, END_THINK, CALL, END_CALL})


class IncrementalDecoder:
    """Ids in, text out, such that the pieces put together are the text of all ids. Special tokens have none,
    unless they are one of the tags that structure a completion."""

    def __init__(self, folder: TokenizerFolder) -> None:
        self._folder = folder
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._window: list[int] = []  # without bytes: some ids whose text is out, as context, then those pending
        self._out = 0  # how many of the window are out

    def feed(self, token: int) -> str:
        special = self._folder.special_text(token)
        if special is not None:
            # A boundary: what was pending can no longer be completed.
            return self.finish() + (special if special in _TAGS else "")
        spelled = self._folder.token_bytes(token)
        if spelled is not None:
            return self._utf8.decode(spelled)
        self._window.append(token)
        known, text = self._texts()
        if text.endswith("\ufffd") and len(self._window) - self._out < _MAX_PENDING:
            return ""
        if len(text) <= len(known):
            return ""
        self._window = self._window[self._out :]
        self._out = len(self._window)
        return text[len(known) :]

    def finish(self) -> str:
        """The rest, with replacement characters for what stayed incomplete."""
        rest = self._utf8.decode(b"", final=True)
        if self._window:
            known, text = self._texts()
            self._window, self._out = [], 0
            rest += text[len(known) :]
        return rest

    def _texts(self) -> tuple[str, str]:
        known = self._folder.decode(self._window[: self._out], special=True)
        return known, self._folder.decode(self._window, special=True)


def held(text: str, markers: Sequence[str]) -> int:
    """How many trailing characters of ``text`` could be the beginning of one of ``markers``."""
    longest = max((len(marker) for marker in markers), default=0)
    for size in range(min(longest - 1, len(text)), 0, -1):
        tail = text[-size:]
        if any(marker.startswith(tail) for marker in markers):
            return size
    return 0


class StopCutter:
    """Passes text on up to the first stop string and swallows everything from there."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(s for s in stop if s)
        self._pending = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        if self.stopped:
            return ""
        if not self._stop:
            return text
        self._pending += text
        found = [at for s in self._stop if (at := self._pending.find(s)) >= 0]
        if found:
            self.stopped = True
            out, self._pending = self._pending[: min(found)], ""
            return out
        keep = len(self._pending) - held(self._pending, self._stop)
        out, self._pending = self._pending[:keep], self._pending[keep:]
        return out

    def finish(self) -> str:
        out, self._pending = self._pending, ""
        return out


def parse_call(text: str) -> ToolCall | None:
    """One call in the Hermes form, ``{"name": ..., "arguments": {...}}``; None if it is anything else."""
    value = load_object(text)
    if value is None or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments: Any = value.get("arguments", value.get("parameters"))
    if arguments is None:
        arguments = {}
    elif isinstance(arguments, str):
        arguments = load_object(arguments)
    if not isinstance(arguments, dict):
        return None
    return ToolCall(id=new_call_id(), name=value["name"], arguments=dump_object(arguments))


def opening(name: str | None) -> str:
    """How a call begins, up to where the model has to go on."""
    return f"{CALL}\n" if name is None else f'{CALL}\n{{"name": {json.dumps(name)}, "arguments":'


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class TaggedParser(StreamParser):
    """``<think>`` reasoning at the start, ``<tool_call>`` JSON calls anywhere after it, text elsewhere.

    With ``thinking`` the prompt has already opened the reasoning. Calls are looked for only with ``calls``; a
    malformed one is text. White space around reasoning and calls belongs to neither the text nor them.
    """

    def __init__(self, folder: TokenizerFolder, *, stop: Sequence[str], calls: bool, thinking: bool) -> None:
        self._decoder = IncrementalDecoder(folder)
        self._cutter = StopCutter(stop)
        self._calls = calls
        self._state = "thinking" if thinking else "start"
        self._buffer = ""
        self._fresh = thinking  # leading white space of a new section is still to be dropped
        self._gap = ""  # white space before a call, which is text again if the call turns out to be none
        self._seen = 0
        self._stopped_at: int | None = None
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._tool_calls: list[ToolCall] = []

    @property
    def stopped_at(self) -> int | None:
        return self._stopped_at

    def feed(self, ids: IdArray) -> list[Delta]:
        pieces: list[str] = []
        for token in ids.tolist():
            if self._stopped_at is not None:
                break
            self._seen += 1
            pieces.append(self._cutter.feed(self._decoder.feed(token)))
            if self._cutter.stopped:
                self._stopped_at = self._seen
        return self._advance("".join(pieces), last=False)

    def finish(self, finish_reason: str) -> list[Delta]:
        rest = self._cutter.feed(self._decoder.finish())
        return self._advance(rest + self._cutter.finish(), last=True)

    def message(self) -> Message:
        return Message(
            role="assistant",
            content="".join(self._text),
            reasoning="".join(self._reasoning) or None,
            tool_calls=tuple(self._tool_calls),
        )

    def _advance(self, text: str, *, last: bool) -> list[Delta]:
        self._buffer += text
        deltas: list[Delta] = []
        while self._step(deltas, last=last):
            pass
        return deltas

    def _step(self, deltas: list[Delta], *, last: bool) -> bool:
        """Consume some of the buffer; True when there may be more to do with what is left."""
        match self._state:
            case "start":
                return self._start(deltas, last)
            case "thinking":
                return self._thinking(deltas, last)
            case "call":
                return self._call(deltas, last)
            case _:
                return self._plain(deltas, last)

    def _start(self, deltas: list[Delta], last: bool) -> bool:
        """Before the first text: does the completion open with reasoning?"""
        stripped = self._buffer.lstrip()
        if stripped.startswith(THINK):
            self._buffer, self._state, self._fresh = stripped[len(THINK) :], "thinking", True
            return True
        if THINK.startswith(stripped) and not last:
            return False
        self._state = "text"
        return True

    def _thinking(self, deltas: list[Delta], last: bool) -> bool:
        at = self._buffer.find(END_THINK)
        if at >= 0:
            self._say(deltas, self._buffer[:at].rstrip(), reasoning=True)
            self._buffer, self._state, self._fresh = self._buffer[at + len(END_THINK) :], "text", True
            return True
        keep = self._certain((END_THINK,), last, spaces=True)
        self._say(deltas, keep, reasoning=True)
        return False

    def _plain(self, deltas: list[Delta], last: bool) -> bool:
        if not self._calls:
            out, self._buffer = self._buffer, ""
            self._say(deltas, out)
            return False
        at = self._buffer.find(CALL)
        if at >= 0:
            text = self._buffer[:at].rstrip()
            self._say(deltas, text)
            self._gap = self._buffer[len(text) : at]
            self._buffer, self._state = self._buffer[at + len(CALL) :], "call"
            return True
        self._say(deltas, self._certain((CALL,), last, spaces=True))
        return False

    def _call(self, deltas: list[Delta], last: bool) -> bool:
        at = self._buffer.find(END_CALL)
        if at < 0 and not last:
            return False
        body, rest = (self._buffer[:at], self._buffer[at + len(END_CALL) :]) if at >= 0 else (self._buffer, "")
        call = parse_call(body)
        self._buffer, self._state = rest, "text"
        if call is not None:
            self._tool_calls.append(call)
            deltas.append(Delta(tool_call=call))
            self._fresh = True
        else:
            self._fresh = False
            self._say(deltas, self._gap + CALL + body + (END_CALL if at >= 0 else ""))
        return bool(rest)

    def _certain(self, markers: tuple[str, ...], last: bool, *, spaces: bool) -> str:
        """Take from the buffer what can no longer become a marker or white space before one."""
        if last:
            out, self._buffer = self._buffer, ""
            return out
        keep = len(self._buffer) - held(self._buffer, markers)
        if spaces:
            keep = len(self._buffer[:keep].rstrip())
        out, self._buffer = self._buffer[:keep], self._buffer[keep:]
        return out

    def _say(self, deltas: list[Delta], text: str, *, reasoning: bool = False) -> None:
        if self._fresh:
            text = text.lstrip()
            if text and self._text and not reasoning:
                text = "\n" + text  # text before a call and text after it are not one word
        if not text:
            return
        self._fresh = False
        (self._reasoning if reasoning else self._text).append(text)
        deltas.append(Delta(reasoning=text) if reasoning else Delta(text=text))
