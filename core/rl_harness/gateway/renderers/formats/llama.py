"""The formats of Llama models, which nothing but their beginning tells from text: ``llama`` (3.x: a bare JSON object,
perhaps after ``<|python_tag|>``) and ``llama_pythonic`` (3.2 and 4: a list of Python calls). Either reads both."""

from __future__ import annotations

import ast
import json
import re
from typing import Any, ClassVar

from rl_harness.gateway.arguments import load_object
from rl_harness.gateway.renderers.formats.base import (
    Found,
    ToolFormat,
    held,
    json_call,
    json_end,
    listed_calls,
    make_call,
)
from rl_harness.gateway.schemas import Tools
from rl_harness.records.turn import ToolCall

PYTHON_TAG, PYTHON_START, PYTHON_END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"
_STARTS = (PYTHON_TAG, PYTHON_START)
_KEYS = frozenset({"name", "parameters", "arguments", "type", "function", "id"})
_NAME = r"[A-Za-z_][\w.\-]*"
_LIST = re.compile(rf"\[\s*{_NAME}\s*\(")
_LIST_SO_FAR = re.compile(rf"\[\s*(?:{_NAME}\s*)?\Z")
_CALL = re.compile(rf"{_NAME}\s*\(")
_CALL_SO_FAR = re.compile(rf"{_NAME}\s*\Z")
_KEY = re.compile(r'\{\s*"([^"]*)"')
_KEY_SO_FAR = re.compile(r'\{\s*(?:"[^"]*)?\Z')
_PYTHON_PART = re.compile(r"'(?:[^'\\]|\\.)*(?:'|\\?\Z)|\"(?:[^\"\\]|\\.)*(?:\"|\\?\Z)|[()\[\]{}]", re.DOTALL)
_CONSTANTS = {"true": True, "false": False, "null": None}


class _Llama(ToolFormat):
    tags: ClassVar[tuple[str, ...]] = (PYTHON_TAG, PYTHON_START, PYTHON_END)
    closers: ClassVar[str] = "})]>"

    def start(self, text: str, first: bool) -> int:
        found = [at for tag in _STARTS if (at := text.find(tag)) >= 0]
        if first:
            stripped = text.lstrip()
            if stripped[:1] in ("{", "["):
                found.append(len(text) - len(stripped))
        return min(found) if found else len(text) - held(text, _STARTS)

    def read(self, text: str, tools: Tools, *, last: bool, cut: bool) -> Found | None:
        tag = next((tag for tag in _STARTS if text.startswith(tag)), "")
        if not tag and text[:1] == "<":  # no more than the beginning of a tag
            return Found(len(text)) if last else None
        body = text[len(tag) :]
        at = len(text) - len(body.lstrip())
        body = text[at:]
        if body.startswith("{"):
            found = self._object(text, at, bool(tag), last, cut)
        elif body.startswith("["):
            found = self._list(text, at, tools, bool(tag), last)
        elif tag:
            found = self._call(text, tag, at, tools, last)
        else:
            found = Found(max(len(tag), 1))
        if found is None:
            # Some of it may be whole although the end is missing; otherwise it was text.
            return Found(len(text)) if last else None
        return found

    def _object(self, text: str, at: int, tagged: bool, last: bool, cut: bool) -> Found | None:
        """One ``{"name": ..., "parameters": ...}``. More of them follow after a semicolon."""
        body = text[at:]
        key = _KEY.match(body)
        if key is None and not _KEY_SO_FAR.match(body):
            return Found(at + 1)
        if key is not None and key[1] not in _KEYS:
            return Found(at + 1)
        end = json_end(body)
        if end is None:
            call = None if not last or cut else json_call(body)
            return None if call is None else Found(len(text), (call,))
        call = json_call(body[:end]) if tagged or _is_call(body[:end]) else None
        if call is None:
            return Found(at + end)
        rest = text[at + end :]
        after = rest.lstrip()
        if not after and not last:
            return None  # a semicolon that separates calls is nobody's text
        size = len(text) - len(after)
        return Found(size + 1 if after.startswith(";") else at + end, (call,))

    def _list(self, text: str, at: int, tools: Tools, tagged: bool, last: bool) -> Found | None:
        """``[f(a=1), g(b="x")]``; or JSON calls as a list."""
        body = text[at:]
        if body[1:].lstrip()[:1] == "{":
            end = json_end(body)
            if end is None:
                return None
            return Found(at + end, listed_calls(body[:end]))
        if not _LIST.match(body):
            return None if _LIST_SO_FAR.match(body) and not last else Found(at + 1)
        end = _python_end(body)
        if end is None:
            return None
        return self._closed(text, at + end, _python_calls(body[:end], tools), last)

    def _call(self, text: str, tag: str, at: int, tools: Tools, last: bool) -> Found | None:
        """After the tag: a single ``name.call(a=1)``."""
        body = text[at:]
        if not _CALL.match(body):
            return None if (not body or _CALL_SO_FAR.match(body)) and not last else Found(len(tag))
        end = _python_end(body)
        if end is None:
            return None
        return self._closed(text, at + end, _python_calls(f"[{body[:end]}]", tools), last)

    def _closed(self, text: str, end: int, calls: tuple[ToolCall, ...], last: bool) -> Found | None:
        """Calls that end at ``end``, together with the tag that closes them."""
        after = text[end:].lstrip()
        if after.startswith(PYTHON_END):
            end = len(text) - len(after) + len(PYTHON_END)
        elif text.startswith(PYTHON_START) and PYTHON_END.startswith(after) and not last:
            return None
        return Found(end, calls)


class Llama(_Llama):
    name: ClassVar[str] = "llama"
    tokens: ClassVar[frozenset[str]] = frozenset({PYTHON_TAG})

    def written_by(self, template: str) -> bool:
        return PYTHON_TAG in template or ("<|start_header_id|>" in template and '"parameters"' in template)

    def opening(self, name: str | None) -> str:
        return '{"name": "' if name is None else f'{{"name": {json.dumps(name)}, "parameters":'


class LlamaPythonic(_Llama):
    name: ClassVar[str] = "llama_pythonic"
    tokens: ClassVar[frozenset[str]] = frozenset({PYTHON_START, PYTHON_END})

    def written_by(self, template: str) -> bool:
        return PYTHON_START in template or "func_name1(" in template

    def opening(self, name: str | None) -> str:
        return "[" if name is None else f"[{name}("


def _is_call(text: str) -> bool:
    """Whether an object that no tag introduces is a call: JSON is also what models answer with."""
    value = load_object(text)
    if value is None:
        return json_call(text) is not None  # broken, but it says so itself
    return value.keys() <= _KEYS and len(value) > 1


def _python_end(text: str) -> int | None:
    depth = 0
    for part in _PYTHON_PART.finditer(text):
        if part[0] in ("(", "[", "{"):
            depth += 1
        elif part[0] in (")", "]", "}"):
            depth -= 1
            if depth <= 0:
                return part.end()
    return None


def _python_calls(text: str, tools: Tools) -> tuple[ToolCall, ...]:
    """The calls of a list of Python calls; none if it holds anything else."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return ()
    if not isinstance(tree, ast.List) or not tree.elts:
        return ()
    calls: list[ToolCall] = []
    for element in tree.elts:
        if not isinstance(element, ast.Call):
            return ()
        try:
            name = ast.unparse(element.func).removesuffix(".call")
            positional = zip(tools.keys(name), element.args, strict=False)
            arguments = {key: _value(node) for key, node in positional}
            arguments |= {word.arg: _value(word.value) for word in element.keywords if word.arg is not None}
            calls.append(make_call(name, arguments))
        except (ValueError, TypeError, RecursionError, MemoryError):
            return ()
    return tuple(calls)


def _value(node: ast.expr) -> Any:
    """A literal, with JSON's constants beside Python's. Raises ``ValueError`` for anything else."""
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {str(_value(key)): _value(value) for key, value in _items(node)}
    value = ast.literal_eval(node)
    json.dumps(value, allow_nan=False)
    return value


def _items(node: ast.Dict) -> list[tuple[ast.expr, ast.expr]]:
    pairs = list(zip(node.keys, node.values, strict=True))
    return [(key, value) for key, value in pairs if key is not None]
