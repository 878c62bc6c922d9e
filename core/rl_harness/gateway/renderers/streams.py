"""From sampled ids to text, reasoning and tool calls, incrementally. Each stage holds back only what is not yet
certain: an incomplete character, the beginning of a stop string, the beginning of a tag, an unfinished call."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Mapping, Sequence

from rl_harness.contracts.renderer import Delta, StreamParser, ToolSpec
from rl_harness.gateway.arguments import load_object
from rl_harness.gateway.renderers.formats.base import ToolFormat, held
from rl_harness.gateway.renderers.tokenizer import TokenizerFolder
from rl_harness.gateway.schemas import Tools
from rl_harness.records.arrays import IdArray
from rl_harness.records.turn import Message, ToolCall

#: A tokenizer with byte fall-back spells a character in at most four tokens; more is not incomplete but garbage.
_MAX_PENDING = 4

#: Characters in which a call that is none would have shown itself.
_LONG_CALL = 256
_VERY_LONG_CALL = 4096

THINK, END_THINK = "<think>", "</think>"
THOUGHTS: Mapping[str, str] = {THINK: END_THINK, "[THINK]": "[/THINK]"}
"""What opens reasoning, and what closes it."""
_THOUGHT_TAGS = (*THOUGHTS, *THOUGHTS.values())
_THOUGHT_STARTS = frozenset(opening[0] for opening in THOUGHTS)
_Utf8 = codecs.getincrementaldecoder("utf-8")


class IncrementalDecoder:
    """Ids in, text out, such that the pieces put together are the text of all ids. Special tokens have none,
    unless they are one of ``tags``, which structure a completion."""

    def __init__(self, folder: TokenizerFolder, tags: Collection[str] = ()) -> None:
        self._folder = folder
        self._tags = tags
        self._utf8 = _Utf8(errors="replace")
        self._window: list[int] = []  # without bytes: some ids whose text is out, as context, then those pending
        self._out = 0  # how many of the window are out

    def feed_all(self, tokens: Sequence[int]) -> str:
        table = self._folder.spelled
        spelled = [table[token] for token in tokens]
        if None not in spelled:
            return self._utf8.decode(b"".join(spelled))  # type: ignore[arg-type]  # none of them is None
        return "".join(map(self.feed, tokens))

    def feed(self, token: int) -> str:
        spelled = self._folder.spelled[token]
        if spelled is not None:
            return self._utf8.decode(spelled)
        special = self._folder.special_text(token)
        if special is not None:
            # A boundary: what was pending can no longer be completed.
            return self.finish() + (special if special in self._tags else "")
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


class StopCutter:
    """Passes text on up to the first stop string and swallows everything from there."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(s for s in stop if s)
        self._pending = ""
        self.cuts = bool(self._stop)  # there is anything to look for
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


class TaggedParser(StreamParser):
    """Reasoning at the start, calls in the model family's ``form`` anywhere after it, text elsewhere.

    ``thought`` is what the prompt has already opened reasoning with. Without a ``form`` no calls are looked for.
    White space around reasoning and calls belongs to neither the text nor them.
    """

    def __init__(
        self,
        folder: TokenizerFolder,
        *,
        stop: Sequence[str] = (),
        form: ToolFormat | None = None,
        tools: Sequence[ToolSpec] = (),
        thought: str | None = None,
    ) -> None:
        tags = (*_THOUGHT_TAGS, *form.tags) if form else _THOUGHT_TAGS
        self._decoder = IncrementalDecoder(folder, tags)
        self._specials = [tag for tag in tags if tag in folder.special]
        self._cutter = StopCutter(stop)
        self._form = form
        self._tools = Tools(tools)
        self._state = "start" if thought is None else "thinking"
        self._opened = self._end = ""
        if thought is not None:
            self._opened, self._end = thought, THOUGHTS[thought]
        self._buffer = ""
        self._read = 0  # characters of the buffer in which no call ends
        self._tried = 0  # characters of the buffer when it was last read as a call
        self._cut = False  # the completion was too long
        self._fresh = thought is not None  # leading white space of a new section is still to be dropped
        self._seen = 0
        self._stopped_at: int | None = None
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._tool_calls: list[ToolCall] = []
        self._problems: list[str] = []

    @property
    def stopped_at(self) -> int | None:
        return self._stopped_at

    def feed(self, ids: IdArray) -> list[Delta]:
        if not self._cutter.cuts:
            self._seen += len(ids)
            return self._advance(self._decoder.feed_all(ids.tolist()), last=False)
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
        self._cut = finish_reason == "length"
        rest = self._cutter.feed(self._decoder.finish())
        return self._advance(rest + self._cutter.finish(), last=True)

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(self._problems)

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
                return self._start(last)
            case "thinking":
                return self._thinking(deltas, last)
            case _:
                return self._plain(deltas, last)

    def _start(self, last: bool) -> bool:
        """Before the first text: does the completion open with reasoning?"""
        stripped = self._buffer.lstrip()
        if stripped and stripped[0] not in _THOUGHT_STARTS:
            self._state = "text"
            return True
        for opening, end in THOUGHTS.items():
            if stripped.startswith(opening):
                self._buffer, self._state, self._fresh = stripped[len(opening) :], "thinking", True
                self._end = end
                return True
        if not last and any(opening.startswith(stripped) for opening in THOUGHTS):
            return False
        self._state = "text"
        return True

    def _thinking(self, deltas: list[Delta], last: bool) -> bool:
        if self._opened:
            # The prompt has opened it; some models do so again.
            stripped = self._buffer.lstrip()
            if stripped.startswith(self._opened):
                self._buffer = stripped[len(self._opened) :]
            elif self._opened.startswith(stripped) and not last:
                return False
            self._opened = ""
        at = self._buffer.find(self._end)
        if at >= 0:
            self._say(deltas, self._buffer[:at].rstrip(), reasoning=True)
            self._buffer, self._state, self._fresh = self._buffer[at + len(self._end) :], "text", True
            return True
        certain = len(self._buffer) - (0 if last else held(self._buffer, (self._end,)))
        self._take(deltas, certain, last, reasoning=True)
        return False

    def _plain(self, deltas: list[Delta], last: bool) -> bool:
        if self._form is None:
            out, self._buffer = self._buffer, ""
            self._say(deltas, out)
            return False
        at = self._form.start(self._buffer, not self._text)
        if at == len(self._buffer):
            self._take(deltas, at, last)
            self._read = self._tried = 0
            return False
        if self._buffer[:at].strip():
            at -= self._take(deltas, at, False)
            self._read = self._tried = 0
        if not last and not self._worth_reading(len(self._buffer) - at):
            return False
        found = self._form.read(self._buffer[at:], self._tools, last=last, cut=self._cut)
        if found is None:
            self._read = self._tried = len(self._buffer)
            return False
        self._read = self._tried = 0
        end = at + found.size
        if found.calls or found.silent:
            self._call(deltas, found.calls)
        else:
            self._say(deltas, self._buffer[:end])
        self._buffer = self._buffer[end:]
        return bool(self._buffer)

    def _worth_reading(self, pending: int) -> bool:
        """Whether a call of so many characters so far is to be read again: far into one, only its end is news, and very
        far into one not every possible end is looked at, since reading it again and again would cost its square."""
        if not self._tried or pending <= _LONG_CALL or self._form is None:
            return True
        new = self._buffer[self._read :]
        if not any(closer in new for closer in self._form.closers):
            self._read = len(self._buffer)
            return False
        return pending <= _VERY_LONG_CALL or (len(self._buffer) - self._tried) * 16 > pending

    def _call(self, deltas: list[Delta], calls: Sequence[ToolCall]) -> None:
        self._fresh = True
        for call in calls:
            self._tool_calls.append(call)
            deltas.append(Delta(tool_call=call))
            problem = self._tools.problem(call.name, load_object(call.arguments))
            if problem is not None:
                self._problems.append(problem)

    def _take(self, deltas: list[Delta], count: int, last: bool, *, reasoning: bool = False) -> int:
        """Say the first ``count`` characters of the buffer, but for white space at their end, which a call or the end
        of reasoning may still swallow; how many these were."""
        text = self._buffer[:count] if last else self._buffer[:count].rstrip()
        self._buffer = self._buffer[len(text) :]
        self._say(deltas, text, reasoning=reasoning)
        return len(text)

    def _say(self, deltas: list[Delta], text: str, *, reasoning: bool = False) -> None:
        for tag in self._specials:
            text = text.replace(tag, "")
        if self._fresh:
            text = text.lstrip()
            if text and self._text and not reasoning:
                text = "\n" + text  # text before a call and text after it are not one word
        if not text:
            return
        self._fresh = False
        (self._reasoning if reasoning else self._text).append(text)
        deltas.append(Delta(reasoning=text) if reasoning else Delta(text=text))
