"""Tools' JSON schemas: whether one is a schema, whether arguments fit one, and what type it gives to a value.

A part of JSON Schema, on purpose: schemas come from agents, so nothing here follows a remote reference, runs a
pattern or a format, or takes longer than a fixed number of steps. What is not understood is taken to fit.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rl_harness.contracts.renderer import ToolSpec

_TYPES = ("string", "number", "integer", "boolean", "array", "object", "null")
_SCHEMA = ("items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else", "propertyNames")
_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_BOUNDS = ("minimum", "maximum")
_MOST_STEPS = 5_000
_DEEPEST = 64


class Tools:
    """The tools of one request, by name."""

    def __init__(self, specs: Sequence[ToolSpec] = ()) -> None:
        self._specs = specs
        self._found: dict[str, Any] | None = None

    def schema(self, name: str) -> Any:
        """The schema of a tool's arguments. Raises ``KeyError`` for a tool that there is not."""
        if self._found is None:
            functions = [spec.get("function") or {} for spec in self._specs]
            self._found = {str(function.get("name")): function.get("parameters") for function in functions}
        return self._found[name]

    def keys(self, name: str) -> list[str]:
        """The names of a tool's arguments, in the order of its schema."""
        return list(self._properties(name))

    def typed(self, name: str, key: str, text: str) -> Any:
        """The value that ``text`` stands for as an argument of a tool, in a format that does not tell strings from
        others. Text that is none of what the schema wants stays text."""
        properties = self._properties(name)
        if key not in properties:
            return text
        return _typed(text, _kinds(properties[key], self.schema(name), 0))

    def problem(self, name: str, arguments: Any) -> str | None:
        """What is wrong with a call, or None. ``arguments`` is None where they are no JSON object."""
        try:
            schema = self.schema(name)
        except KeyError:
            return f"{name}: there is no such tool"
        if arguments is None:
            return f"{name}: the arguments are no JSON object"
        found = None if schema is None else _Check(schema).problem(arguments)
        return None if found is None else f"{name}: {found}"

    def _properties(self, name: str) -> Mapping[str, Any]:
        try:
            schema = self.schema(name)
        except KeyError:
            return {}
        properties = schema.get("properties") if isinstance(schema, dict) else None
        return properties if isinstance(properties, dict) else {}


def schema_problem(schema: Any) -> str | None:
    """Why something is no JSON schema, with the place, or None."""
    stack: list[tuple[str, Any]] = [("", schema)]
    while stack:
        path, one = stack.pop()
        if isinstance(one, bool):
            continue
        if not isinstance(one, dict):
            return f"{path or 'it'} is no schema but {_short(one)}"
        found = _keyword_problem(one)
        if found is not None:
            key, meaning = found
            return f"{_join(path, key)} is {_short(one[key])}, not {meaning}"
        stack += [(_join(path, key), inner) for key, inner in _parts(one)]
    return None


def _keyword_problem(schema: Mapping[str, Any]) -> tuple[str, str] | None:
    """A keyword whose value is not of its kind, and what it should be."""
    for key, value in schema.items():
        if key == "type":
            several = value if isinstance(value, list) and value else [value]
            if not all(isinstance(one, str) and one in _TYPES for one in several):
                return key, f"one or more of {', '.join(_TYPES)}"
        elif key in _NAMED:
            if not isinstance(value, dict):
                return key, "an object of schemas"
        elif key in _SCHEMAS:
            if not isinstance(value, list):
                return key, "a list of schemas"
        elif key == "required":
            if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                return key, "a list of names"
        elif key == "enum":
            if not isinstance(value, list):
                return key, "a list of values"
        elif key == "$ref":
            if not isinstance(value, str):
                return key, "a reference"
        elif key in _COUNTS:
            if not _is("integer", value) or value < 0:
                return key, "a count"
        elif key in _BOUNDS and not _is("number", value):
            return key, "a number"
    return None


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas within a schema, with their places."""
    for key, value in schema.items():
        if key in _NAMED:
            yield from ((f"{key}.{name}", inner) for name, inner in value.items())
        elif key in _SCHEMAS or (key == "items" and isinstance(value, list)):
            yield from ((f"{key}[{number}]", inner) for number, inner in enumerate(value))
        elif key in _SCHEMA:
            yield key, value


class _TooMuch(Exception):
    """More steps than a call is worth."""


class _Check:
    """One check of a value against a schema."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._steps = 0

    def problem(self, value: Any) -> str | None:
        try:
            return self._problem(value, self._root, "", 0)
        except (_TooMuch, TypeError, AttributeError):  # or a schema that nobody checked
            return None

    def _problem(self, value: Any, schema: Any, path: str, depth: int) -> str | None:
        self._steps += 1
        if self._steps > _MOST_STEPS or depth > _DEEPEST:
            raise _TooMuch
        if schema is False:
            return f"{path or 'it'} is not allowed"
        if not isinstance(schema, dict):
            return None
        if "$ref" in schema:
            found = self._problem(value, resolve(self._root, schema["$ref"]), path, depth + 1)
            if found is not None:
                return found
        return (
            _value_problem(value, schema, path)
            or self._inside(value, schema, path, depth)
            or self._combined(value, schema, path, depth)
        )

    def _inside(self, value: Any, schema: Mapping[str, Any], path: str, depth: int) -> str | None:
        if isinstance(value, dict):
            properties = schema.get("properties") or {}
            others = True if schema.get("patternProperties") else schema.get("additionalProperties", True)
            for key, inner in value.items():
                found = self._problem(inner, properties.get(key, others), _join(path, key), depth + 1)
                if found is not None:
                    return found
        elif isinstance(value, list) and not schema.get("prefixItems"):
            for number, inner in enumerate(value):
                found = self._problem(inner, schema.get("items"), f"{path}[{number}]", depth + 1)
                if found is not None:
                    return found
        return None

    def _combined(self, value: Any, schema: Mapping[str, Any], path: str, depth: int) -> str | None:
        for one in schema.get("allOf") or ():
            found = self._problem(value, one, path, depth + 1)
            if found is not None:
                return found
        for key in ("anyOf", "oneOf"):
            found_all = [self._problem(value, one, path, depth + 1) for one in schema.get(key) or ()]
            if found_all and all(found_all):
                return found_all[0] if len(found_all) == 1 else f"{path or 'it'} fits none of {key}"
        return None


def _value_problem(value: Any, schema: Mapping[str, Any], path: str) -> str | None:
    where = path or "it"
    kinds = schema.get("type")
    if kinds is not None:
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if not any(_is(kind, value) for kind in kinds):
            return f"{where} is {_short(value)}, not of type {' or '.join(map(str, kinds))}"
    for key, allowed in (("enum", schema.get("enum")), ("const", [schema["const"]] if "const" in schema else None)):
        if allowed is not None and not any(_same(value, one) for one in allowed):
            return f"{where} is {_short(value)}, which is not in its {key}"
    if isinstance(value, dict):
        missing = [name for name in schema.get("required") or () if name not in value]
        if missing:
            return f"{_join(path, missing[0])} is missing"
    if _is("number", value):
        if value < schema.get("minimum", value):
            return f"{where} is {value}, less than {schema['minimum']}"
        if value > schema.get("maximum", value):
            return f"{where} is {value}, more than {schema['maximum']}"
    for kind, least, most in ((str, "minLength", "maxLength"), (list, "minItems", "maxItems")):
        if isinstance(value, kind) and not schema.get(least, 0) <= len(value) <= schema.get(most, len(value)):
            return f"{where} has a length of {len(value)}"
    return None


def resolve(root: Any, reference: str) -> Any:
    """What a reference within a schema stands for; None if it leads anywhere else."""
    if reference == "#":
        return root
    if not reference.startswith("#/"):
        return None
    found = root
    for part in reference[2:].split("/"):
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found


def _is(kind: str, value: Any) -> bool:
    match kind:
        case "string":
            return isinstance(value, str)
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            whole = isinstance(value, float) and value.is_integer()
            return (isinstance(value, int) and not isinstance(value, bool)) or whole
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "array":
            return isinstance(value, list)
        case "object":
            return isinstance(value, dict)
        case _:
            return value is None


def _same(a: Any, b: Any) -> bool:
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)


def _kinds(schema: Any, root: Any, depth: int) -> frozenset[str]:
    """The types that a schema allows at its top; empty if it does not say."""
    if not isinstance(schema, dict) or depth > 8:
        return frozenset()
    kinds = schema.get("type")
    if kinds is not None:
        return frozenset(kinds if isinstance(kinds, list) else [kinds])
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    if values:
        return frozenset(kind for value in values for kind in _TYPES if _is(kind, value))
    if "$ref" in schema:
        return _kinds(resolve(root, schema["$ref"]), root, depth + 1)
    return frozenset().union(
        *(_kinds(one, root, depth + 1) for key in ("anyOf", "oneOf", "allOf") for one in schema.get(key) or ())
    )


def _typed(text: str, kinds: frozenset[str]) -> Any:
    stripped = text.strip()
    if "null" in kinds and stripped.lower() in ("null", "none"):
        return None
    if not kinds:  # anything: what looks like a structure is one
        kinds = frozenset({"object", "array", "string"}) if stripped[:1] in ("{", "[") else frozenset({"string"})
    elif "string" in kinds:
        return text
    if "boolean" in kinds and stripped.lower() in ("true", "false"):
        return stripped.lower() == "true"
    value = _literal(stripped)
    return value if any(_is(kind, value) for kind in kinds if kind not in ("string", "null", "boolean")) else text


def _literal(text: str) -> Any:
    """A JSON value, or a Python one as templates write it; None if it is neither."""
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text)
            json.dumps(value, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        return value
    return None


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def tools_problem(tools: Sequence[ToolSpec]) -> str | None:
    """Why the tools of a request cannot be used, naming the first that cannot, or None."""
    for position, tool in enumerate(tools):
        function = tool.get("function") or {}
        schema = function.get("parameters")
        found = None if schema is None else schema_problem(schema)
        if found is None and isinstance(schema, bool):
            found = f"it is {_short(schema)}, not an object"
        if found is not None:
            return f"tools[{position}]: the parameters of {function.get('name')!r} are no JSON schema: {found}"
    return None
