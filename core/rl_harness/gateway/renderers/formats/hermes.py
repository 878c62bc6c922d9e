"""The format ``hermes`` of Hermes and Qwen models: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

from __future__ import annotations

import json
import re
from typing import ClassVar

from rl_harness.gateway.arguments import load_object
from rl_harness.gateway.renderers.formats.base import Found, ToolFormat, json_call, marked
from rl_harness.gateway.schemas import Tools

CALL, END_CALL = "<tool_call>", "</tool_call>"
_PART = re.compile(rf'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|{END_CALL}', re.DOTALL)


class Hermes(ToolFormat):
    name: ClassVar[str] = "hermes"
    tags: ClassVar[tuple[str, ...]] = (CALL, END_CALL)
    tokens: ClassVar[frozenset[str]] = frozenset({CALL, END_CALL})
    closers: ClassVar[str] = ">"

    def written_by(self, template: str) -> bool:
        # Others use the same tag around something else.
        return CALL in template and not any(other in template for other in ("<function=", "<arg_key>"))

    def start(self, text: str, first: bool) -> int:
        return marked(text, (CALL,))

    def read(self, text: str, tools: Tools, *, last: bool, cut: bool) -> Found | None:
        if not text.startswith(CALL):
            return Found(len(text)) if last else None
        end = self._end(text, last)
        if end is None:
            if not last:
                return None
            body, size = text[len(CALL) :], len(text)
            # Whole, though its tag is missing?
            call = json_call(body) if load_object(body) is not None or not cut else None
        else:
            body, size = text[len(CALL) : end], end + len(END_CALL)
            call = json_call(body)
        return Found(size, () if call is None else (call,))

    def _end(self, text: str, last: bool) -> int | None:
        """Where the call's closing tag begins: the first, unless that is within a string and another follows."""
        first = text.find(END_CALL)
        for part in _PART.finditer(text, len(CALL)):
            if part[0] == END_CALL:
                # A string that is never closed is no string, and does not make one call of two.
                whole = part.start() == first or load_object(text[len(CALL) : part.start()]) is not None
                return part.start() if whole else first
        return first if first >= 0 and last else None

    def opening(self, name: str | None) -> str:
        return f"{CALL}\n" if name is None else f'{CALL}\n{{"name": {json.dumps(name)}, "arguments":'
