"""The formats of DeepSeek models: ``deepseek_v3`` (V3 and R1: a type, a name, and JSON in a code fence) and
``deepseek_v31`` (a name and bare JSON), in the same special tokens. Either reads both."""

from __future__ import annotations

import re
from typing import ClassVar

from rl_harness.gateway.renderers.formats.base import Found, ToolFormat, make_call, marked
from rl_harness.gateway.schemas import Tools

CALLS, END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, END_CALL, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_STARTS = (CALLS, CALL, END_CALLS)
_FENCED = re.compile(r"\s*([^\n`{]+?)\s*\n```(?:json)?[ \t]*\n(.*?)\n?```\s*\Z", re.DOTALL)
_FENCE_BEGUN = re.compile(r"\s*([^\n`{]+?)\s*\n```(?:json)?[ \t]*\n(.*)\Z", re.DOTALL)


class _DeepSeek(ToolFormat):
    tags: ClassVar[tuple[str, ...]] = (CALLS, END_CALLS, CALL, END_CALL, SEP)
    tokens: ClassVar[frozenset[str]] = frozenset({CALLS, CALL, SEP})
    closers: ClassVar[str] = ">"

    def start(self, text: str, first: bool) -> int:
        return marked(text, _STARTS)

    def read(self, text: str, tools: Tools, *, last: bool, cut: bool) -> Found | None:
        for tag in (CALLS, END_CALLS):
            if text.startswith(tag):
                return Found(len(tag), silent=True)
        if not text.startswith(CALL):
            return Found(len(text)) if last else None
        end = text.find(END_CALL)
        if end < 0:
            if not last:
                return None
            if cut:
                return Found(len(text))
        body = text[len(CALL) : len(text) if end < 0 else end].removesuffix(END_CALLS)
        size = len(text) if end < 0 else end + len(END_CALL)
        kind, sep, rest = body.partition(SEP)
        fenced = _FENCED.match(rest) or _FENCE_BEGUN.match(rest)
        name, arguments = (fenced[1], fenced[2]) if fenced else (kind.strip(), rest.strip())
        if not sep or not name or "\n" in name:
            return Found(size)
        return Found(size, (make_call(name, arguments or None),))


class DeepSeekV3(_DeepSeek):
    name: ClassVar[str] = "deepseek_v3"

    def written_by(self, template: str) -> bool:
        return CALLS in template and "```json" in template

    def opening(self, name: str | None) -> str:
        return f"{CALLS}{CALL}function{SEP}" if name is None else f"{CALLS}{CALL}function{SEP}{name}\n```json\n"


class DeepSeekV31(_DeepSeek):
    name: ClassVar[str] = "deepseek_v31"

    def written_by(self, template: str) -> bool:
        return CALLS in template

    def opening(self, name: str | None) -> str:
        return f"{CALLS}{CALL}" if name is None else f"{CALLS}{CALL}{name}{SEP}"
