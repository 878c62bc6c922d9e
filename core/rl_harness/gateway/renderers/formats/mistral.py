"""The formats of Mistral models: ``mistral`` (``[TOOL_CALLS] [{"name": ..., "arguments": {...}}]``) and
``mistral_args`` of version 11 and later (``[TOOL_CALLS]name[ARGS]{...}``, once for each call). Either reads both."""

from __future__ import annotations

import json
import re
from typing import ClassVar

from rl_harness.gateway.renderers.formats.base import (
    Found,
    ToolFormat,
    json_call,
    json_end,
    listed_calls,
    make_call,
    marked,
    own_id,
)
from rl_harness.gateway.schemas import Tools

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"([\w.\-:/]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\]\s*|(?=\{))")
_NAME_SO_FAR = re.compile(r"[\w.\-:/]*\s*(?:\[[A-Z_]*(?:\]\s*\w*\s*(?:\[[A-Z]*)?)?)?\Z")


class _Mistral(ToolFormat):
    tags: ClassVar[tuple[str, ...]] = (CALLS, ARGS, CALL_ID)
    closers: ClassVar[str] = "}]"

    def start(self, text: str, first: bool) -> int:
        return marked(text, (CALLS,))

    def read(self, text: str, tools: Tools, *, last: bool, cut: bool) -> Found | None:
        if not text.startswith(CALLS):
            return Found(len(text)) if last else None
        body = text[len(CALLS) :]
        at = len(text) - len(body.lstrip())
        body = text[at:]
        if body[:1] in ("[", "{"):
            return self._list(text, at, last, cut)
        head = _NAME.match(body)
        if head is None:
            if not last and _NAME_SO_FAR.match(body):
                return None
            return Found(len(CALLS))
        start = at + head.end()
        end, following = json_end(text, start), text.find(CALLS, start)
        if end is None or not text[start:].startswith("{"):
            if following < 0 and not last:
                return None
            if following < 0 and cut:
                return Found(len(text))
            end = len(text) if following < 0 else following
        return Found(end, (make_call(head[1], text[start:end].strip() or None, id=own_id(head[2])),))

    def _list(self, text: str, at: int, last: bool, cut: bool) -> Found | None:
        end = json_end(text, at)
        if end is None:
            if not last:
                return None
            call = None if cut else json_call(text[at:].removeprefix("["))
            return Found(len(text), () if call is None else (call,))
        calls = listed_calls(text[at:end])
        if not calls:  # of a broken list, the first
            call = json_call(text[at:end].removeprefix("[").removesuffix("]"))
            calls = () if call is None else (call,)
        return Found(end, calls)


class Mistral(_Mistral):
    name: ClassVar[str] = "mistral"
    tokens: ClassVar[frozenset[str]] = frozenset({CALLS})

    def written_by(self, template: str) -> bool:
        return CALLS in template

    def opening(self, name: str | None) -> str:
        return f"{CALLS} [{{" if name is None else f'{CALLS} [{{"name": {json.dumps(name)}, "arguments":'


class MistralArgs(_Mistral):
    name: ClassVar[str] = "mistral_args"
    tokens: ClassVar[frozenset[str]] = frozenset({CALLS, ARGS})

    def written_by(self, template: str) -> bool:
        return CALLS in template and ARGS in template

    def opening(self, name: str | None) -> str:
        return CALLS if name is None else f"{CALLS}{name}{ARGS}"
