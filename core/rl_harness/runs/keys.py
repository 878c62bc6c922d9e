"""The keys of the core's configuration: which there are, what type each wants, how a text becomes that type."""

from __future__ import annotations

import difflib
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rl_harness.kinds import KINDS
from rl_harness.runs.config import PluginChoice, RunConfig
from rl_harness.runs.layers import Key, Text, dotted

#: The tables that choose a plugin, with its kind.
SECTIONS = {kind.section: kind for kind in KINDS.values()}

_SECRET_WORDS = ("api_key", "apikey", "secret", "password", "_token")


def unknown_key(key: Key) -> str | None:
    """What is wrong with a key, with a suggestion; None for one that can be set. Options of plugins are not judged."""
    model: type[BaseModel] = RunConfig
    for depth, part in enumerate(key):
        field = model.model_fields.get(part)
        if field is None:
            return f"there is no key {dotted(key)!r}{_hint(key, depth, model)}"
        inner = model_of(field.annotation)
        last = depth == len(key) - 1
        if inner is None:
            return (
                None
                if last
                else f"{dotted(key[: depth + 1])!r} is a value, not a table with {dotted(key[depth + 1 :])!r}"
            )
        if last:
            return f"{dotted(key)!r} is a table; set one of {', '.join(inner.model_fields)}"
        if issubclass(inner, PluginChoice):
            return None
        model = inner
    return None


def _hint(key: Key, depth: int, model: type[BaseModel]) -> str:
    part = key[depth]
    if part.lower().endswith(_SECRET_WORDS):
        return "; secrets are never written here: name the environment variable that holds it, as in api_key_env"
    near = difflib.get_close_matches(part, model.model_fields, n=1)
    if near:
        return f"; did you mean {dotted((*key[:depth], near[0]))!r}?"
    elsewhere = [path for path in known_keys() if path[-1] == part]
    if elsewhere:
        return f"; did you mean {dotted(elsewhere[0])!r}?"
    return ""


def known_keys(model: type[BaseModel] = RunConfig, prefix: Key = ()) -> Iterator[Key]:
    """Every key of the core's own configuration."""
    for name, field in model.model_fields.items():
        inner = model_of(field.annotation)
        if inner is None:
            yield (*prefix, name)
        else:
            yield from known_keys(inner, (*prefix, name))


def model_of(annotation: Any) -> type[BaseModel] | None:
    """The model that a key's value is, also where it may be absent."""
    return next((a for a in types_of(annotation) if isinstance(a, type) and issubclass(a, BaseModel)), None)


def field_of(key: Key) -> FieldInfo:
    """The field that a known key of the core's configuration sets."""
    model: type[BaseModel] = RunConfig
    for part in key[:-1]:
        model = model_of(model.model_fields[part].annotation) or model
    return model.model_fields[key[-1]]


def annotation_of(key: Key) -> Any:
    """The type that a key's value has."""
    if key[0] in SECTIONS and key[1:] not in ((), ("name",)):
        return Any  # an option of a plugin, typed when its model is known
    return field_of(key).annotation


def types_of(annotation: Any) -> set[Any]:
    """The members of a union; annotations stripped, a literal as the types of its values."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return {inner for part in get_args(annotation) for inner in types_of(part)}
    if origin is Annotated:
        return types_of(get_args(annotation)[0])
    if origin is Literal:
        return {type(value) for value in get_args(annotation)}
    return {annotation}


def parse(value: Any, annotation: Any) -> Any:
    """Type a :class:`Text` as its key wants it: TOML syntax, ``none`` where nothing is allowed, else the bare text.

    A list may be given as one bare item. A text for a plugin's option (``Any``) stays as it is until then.
    """
    allowed = types_of(annotation)
    if type(value) is str and value == "none" and type(None) in allowed and str not in allowed:
        return None
    if not isinstance(value, Text) or annotation is Any:
        return value
    text = str(value)
    if text == "none" and type(None) in allowed:
        return None
    try:
        parsed = tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        parsed = text
    if not isinstance(parsed, str | list) and allowed & {str, Path} and type(parsed) not in allowed:
        parsed = text
    wants_list = any(get_origin(part) in (list, tuple, set, frozenset) for part in allowed)
    return [parsed] if wants_list and not isinstance(parsed, list) else parsed


def option_annotation(model: type[BaseModel], path: Key) -> Any:
    """The type of one option, also inside nested models and tables."""
    annotation: Any = model
    for part in path:
        inner = model_of(annotation)
        if inner is not None:
            fields = {field.alias or name: field.annotation for name, field in inner.model_fields.items()}
            annotation = fields.get(part, object)
        elif get_origin(annotation) is dict:
            annotation = get_args(annotation)[1]
        else:
            return object
    return annotation
