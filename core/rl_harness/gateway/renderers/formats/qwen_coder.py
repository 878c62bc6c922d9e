"""The format ``qwen_coder`` of Qwen3-Coder: XML-like calls whose values have no type but that of the tool's schema::

<tool_call>
<function=NAME>
<parameter=KEY>
value
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import re
from typing import ClassVar

from rl_harness.gateway.renderers.formats.base import Found, ToolFormat, ends_of, make_call, marked
from rl_harness.gateway.renderers.formats.hermes import CALL, END_CALL, Hermes
from rl_harness.gateway.schemas import Tools

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
_HEAD = re.compile(rf"(?:{CALL}\s*)?{FUNCTION}([^>\n]+)>")
_PARAMETER = re.compile(rf"\s*{PARAMETER}([^>\n]+)>")
_NEXT = re.compile(rf"\s*(?:{PARAMETER}[^>\n]+>|\Z)")

#: What these models write when they fall back into what most others do.
_JSON = Hermes()


class QwenCoder(ToolFormat):
    name: ClassVar[str] = "qwen_coder"
    tags: ClassVar[tuple[str, ...]] = (CALL, END_CALL)
    closers: ClassVar[str] = ">"

    def written_by(self, template: str) -> bool:
        return FUNCTION in template and PARAMETER in template

    def start(self, text: str, first: bool) -> int:
        # These models sometimes leave the outer tag out.
        return marked(text, (CALL, FUNCTION))

    def read(self, text: str, tools: Tools, *, last: bool, cut: bool) -> Found | None:
        head = _HEAD.match(text)
        if head is None:
            return self._no_head(text, tools, last, cut)
        name = head[1].strip()
        ends = list(ends_of(text, END_FUNCTION, head.end()))
        for end in ends:
            pairs = _pairs(text[head.end() : end])
            if pairs is not None:
                return self._whole(text, end, name, pairs, tools, last)
        if not last:
            return None
        # Nothing more will come: as much as can be made of it.
        if cut:
            return Found(len(text))
        end = ends[0] if ends else len(text)
        pairs = _pairs(text[head.end() : end], lenient=True)
        return self._whole(text, end, name, pairs or {}, tools, last)

    def _no_head(self, text: str, tools: Tools, last: bool, cut: bool) -> Found | None:
        """Not the beginning of a call, or not yet."""
        inner = text.removeprefix(CALL).lstrip()
        begun = inner.startswith(FUNCTION) and not {"\n", ">"} & set(inner)
        if not last and (CALL.startswith(text) or FUNCTION.startswith(inner) or begun):
            return None
        if text.startswith(CALL) and inner.startswith("{"):
            return _JSON.read(text, tools, last=last, cut=cut)
        return Found(min(len(text), len(CALL if text.startswith(CALL) else FUNCTION)))

    def _whole(self, text: str, end: int, name: str, pairs: dict[str, str], tools: Tools, last: bool) -> Found | None:
        size = min(end + len(END_FUNCTION), len(text))
        rest = text[size:]
        tail = rest.lstrip()
        if tail.startswith(END_CALL):
            size = len(text) - len(tail) + len(END_CALL)
        elif END_CALL.startswith(tail) and not last:
            return None
        arguments = {key: tools.typed(name, key, value) for key, value in pairs.items()}
        return Found(size, (make_call(name, arguments),))

    def opening(self, name: str | None) -> str:
        return f"{CALL}\n{FUNCTION}" if name is None else f"{CALL}\n{FUNCTION}{name}>\n"


def _pairs(body: str, *, lenient: bool = False) -> dict[str, str] | None:
    """The parameters of a call; None if the body is not made of whole ones, so that its end was none."""
    found: dict[str, str] = {}
    at = 0
    while body[at:].strip():
        head = _PARAMETER.match(body, at)
        if head is None:
            return found if lenient else None
        for end in ends_of(body, END_PARAMETER, head.end()):
            after = end + len(END_PARAMETER)
            if _NEXT.match(body, after):
                break
        else:
            if not lenient:
                return None
            following = body.find(PARAMETER, head.end())
            end = after = len(body) if following < 0 else following
        found[head[1].strip()] = body[head.end() : end].removeprefix("\n").removesuffix("\n")
        at = after
    return found
