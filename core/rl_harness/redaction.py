"""Secrets: what texts are known to be one, whether a text holds any, and text for people without them.

Known are the values of environment variables that are named as secrets, or whose names say so, and what has the shape
of a well-known kind of token. A secret in another spelling (base64, cut in two) is not recognised.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec

#: What keys of gateway sessions, and the secret parts of their paths, begin with: so that they are recognised.
KEY_MARK = "rlh-"
PATH_MARK = "rlp-"

#: Values that are shorter, or all letters and not long, would be found in any text: ``postgres``, ``not-needed``.
_SHORTEST = 8
_SHORTEST_GUESSED = 12
_LONG = 24
_SECRET_NAME = re.compile(r"(?:^|_)(?:API_?KEY|ACCESS_?KEY|SECRET|SECRET_?KEY|TOKEN|PASSWORD|PASSWD|CREDENTIALS?)$")

_T = TypeVar("_T")


class _Shape(NamedTuple):
    """A kind of token. One of ``marks`` is in every text that holds one. The pattern begins with a literal, which is
    searched for fast, and only then looks at what stands before it; it takes all that it looks at, so that texts made
    to be slow to search are not."""

    kind: str
    marks: tuple[str, ...]
    pattern: re.Pattern[str]


_SHAPES = (
    _Shape("session key", (KEY_MARK, PATH_MARK), re.compile(r"rl[hp]-(?<![\w-]....)[\w-]{20,}")),
    _Shape("API key", ("sk-",), re.compile(r"sk-(?<![A-Za-z0-9]...)[\w-]{20,}")),
    _Shape(
        "GitHub token",
        ("ghp_", "gho_", "ghu_", "ghs_", "ghr_"),
        re.compile(r"gh[pousr]_(?<![A-Za-z0-9]....)[A-Za-z0-9]{30,}"),
    ),
    _Shape("GitHub token", ("github_pat_",), re.compile(r"github_pat_(?<![A-Za-z0-9].{11})\w{30,}")),
    _Shape("GitLab token", ("glpat-",), re.compile(r"glpat-(?<![A-Za-z0-9].{6})[\w-]{20,}")),
    _Shape("AWS access key", ("AKIA", "ASIA"), re.compile(r"A(?:KIA|SIA)(?<![A-Za-z0-9]....)[0-9A-Z]{16}(?![0-9A-Z])")),
    _Shape("Google API key", ("AIza",), re.compile(r"AIza(?<![A-Za-z0-9]....)[\w-]{35}")),
    _Shape("Hugging Face token", ("hf_",), re.compile(r"hf_(?<![A-Za-z0-9]...)[A-Za-z0-9]{30,}")),
    _Shape("Slack token", ("xox",), re.compile(r"xox[abeprs]-(?<![A-Za-z0-9].{5})[A-Za-z0-9-]{10,}")),
    _Shape(
        "private key",
        ("PRIVATE KEY-----",),
        re.compile(r"-----BEGIN [A-Z ]{0,20}PRIVATE KEY-----[\s\S]{16,}?(?:-----END [A-Z ]{0,20}PRIVATE KEY-----|\Z)"),
    ),
    _Shape("JWT", ("eyJ",), re.compile(r"eyJ(?<![\w-]...)[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{8,}")),
)
#: Of what tells that a text may hold one, which kind: all of it is looked for in every text.
_MARKED = tuple((mark, shape) for shape in _SHAPES for mark in shape.marks)
#: In an address, whatever stands for the session may be its secret.
_PATH = re.compile(r"/s/[^/\s\"']+/")


class Secrets:
    """``values``: secret texts by name, beside those known by their shape."""

    def __init__(self, values: Mapping[str, str] | None = None) -> None:
        found = {value: name for name, value in (values or {}).items() if _telling(value, _SHORTEST)}
        # The longest first: one may be the beginning of another.
        self._values = dict(sorted(found.items(), key=lambda item: -len(item[0])))

    @classmethod
    def of_environment(cls, names: Iterable[str] = (), environment: Mapping[str, str] | None = None) -> Secrets:
        """The values of the variables in ``names``, and of those whose own names end in KEY, TOKEN, PASSWORD, …"""
        environment = os.environ if environment is None else environment
        known = {name: environment[name] for name in names if name in environment}
        for name, value in sorted(environment.items()):
            if _SECRET_NAME.search(name.upper()) and _telling(value, _SHORTEST_GUESSED):
                known.setdefault(name, value)
        return cls(known)

    def also(self, values: Mapping[str, str]) -> Secrets:
        """These and further ones."""
        return Secrets({name: value for value, name in self._values.items()} | dict(values))

    def find(self, text: str) -> list[str]:
        """The names of the secrets in ``text``."""
        found = [name for value, name in self._values.items() if value in text]
        for mark, shape in _MARKED:
            if mark in text and any(_is_one(shape, match) for match in shape.pattern.finditer(text)):
                found.append(shape.kind)
        return list(dict.fromkeys(found))

    def redact(self, text: str) -> str:
        """``text`` with each secret replaced by its name."""
        for value, name in self._values.items():
            if value in text:
                text = text.replace(value, f"[redacted: {name}]")
        for mark, shape in _MARKED:
            if mark in text:
                text = shape.pattern.sub(partial(_named, shape), text)
        return text

    def clean(self, value: _T) -> _T:
        """``value`` with every text in it redacted: strings, records, lists and mappings of them, keys included."""
        return self._clean(value)  # type: ignore[no-any-return]  # the same type goes in and out

    def _clean(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.redact(value)
        if isinstance(value, msgspec.Struct):
            fields = {name: getattr(value, name) for name in value.__struct_fields__}
            changed = {name: cleaned for name, old in fields.items() if (cleaned := self._clean(old)) is not old}
            return msgspec.structs.replace(value, **changed) if changed else value
        if isinstance(value, dict):
            return {self._clean(key): self._clean(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._clean(item) for item in value)
        return value


def _is_one(shape: _Shape, match: re.Match[str]) -> bool:
    """Not an ``sk-`` with words behind it only, which no key is."""
    return shape.kind != "API key" or any(character.isdigit() for character in match.group())


def _named(shape: _Shape, match: re.Match[str]) -> str:
    return f"[redacted: {shape.kind}]" if _is_one(shape, match) else match.group()


def _telling(value: str, shortest: int) -> bool:
    return len(value) >= shortest and (len(value) >= _LONG or any(character.isdigit() for character in value))


def _for_a_log(secrets: Secrets, text: str) -> str:
    return _PATH.sub("/s/[redacted]/", secrets.redact(text))


class RedactingFormatter(logging.Formatter):
    """Keeps secrets out of a log, wherever in a record or its traceback they are."""

    def __init__(self, format: str | None = None, secrets: Secrets | None = None) -> None:
        super().__init__(format)
        self._secrets = secrets or Secrets()

    def format(self, record: logging.LogRecord) -> str:
        return _for_a_log(self._secrets, super().format(record))


class RedactingFilter(logging.Filter):
    """The same for whoever else handles the records of one logger."""

    def __init__(self, secrets: Secrets | None = None) -> None:
        super().__init__()
        self._secrets = secrets or Secrets()

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = _for_a_log(self._secrets, record.getMessage())
        record.args = ()
        if record.exc_info and not record.exc_text:
            record.exc_text = _for_a_log(self._secrets, logging.Formatter().formatException(record.exc_info))
        return True
