"""Reads a TOML file strictly: every key is asked for by name and type, and what nobody asked for is an error that
names file, line, key, the reason, and the nearest known key.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rl_harness.errors import TaskError
from rl_harness.textfile import read_text

_HEADER = re.compile(r"^\s*(\[\[?)\s*(.+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(r"""^\s*((?:"[^"]*"|'[^']*'|[A-Za-z0-9_-]+)(?:\s*\.\s*(?:"[^"]*"|'[^']*'|[A-Za-z0-9_-]+))*)\s*=""")
_PART = re.compile(r""""([^"]*)"|'([^']*)'|([A-Za-z0-9_-]+)""")

Path_ = tuple[str, ...]


class Toml:
    """A parsed file and the line on which each of its keys stands."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            text = read_text(path)
        except FileNotFoundError:
            raise TaskError(f"{path}: there is no such file") from None
        except (OSError, ValueError) as error:
            raise TaskError(f"{path}: cannot be read: {error}") from None
        try:
            self.data: dict[str, Any] = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            found = re.search(r"\(at line (\d+), column \d+\)", str(error))
            where = f"{path}:{found.group(1)}" if found else str(path)
            raise TaskError(f"{where}: not valid TOML: {error}") from None
        except RecursionError:
            raise TaskError(f"{path}: not valid TOML: nested too deeply") from None
        self._text = text

    def line(self, key: Path_) -> int | None:
        """The line of ``key``, or of the nearest table around it that has one."""
        lines = _key_lines(self._text)
        while key:
            if key in lines:
                return lines[key]
            key = key[:-1]
        return None

    def error(self, key: Path_, reason: str, remedy: str | None = None) -> TaskError:
        line = self.line(key)
        where = f"{self.path}:{line}" if line else str(self.path)
        return TaskError(f"{where}: {show_key(key)}: {reason}", remedy=remedy)

    def root(self) -> Table:
        return Table(self, (), self.data)


def show_key(key: Path_) -> str:
    """``("environment", "cpus")`` as people write it: ``[environment] cpus``."""
    if len(key) <= 1:
        return key[0] if key else "the file"
    return f"[{'.'.join(key[:-1])}] {key[-1]}"


class Table:
    """One table being consumed. Ask for each key, then call :meth:`finish`."""

    def __init__(self, toml: Toml, key: Path_, data: Mapping[str, Any]) -> None:
        self.toml = toml
        self.key = key
        self.data = data
        self._asked: dict[str, None] = {}

    def error(self, name: str, reason: str, remedy: str | None = None) -> TaskError:
        return self.toml.error((*self.key, name), reason, remedy)

    def has(self, name: str) -> bool:
        self._asked[name] = None
        return name in self.data

    def get(self, name: str) -> Any:
        self._asked[name] = None
        return self.data.get(name)

    def _wrong(self, name: str, wanted: str) -> TaskError:
        value = self.data[name]
        kind = {dict: "a table", list: "an array", str: "a string", bool: "a boolean"}.get(type(value))
        return self.error(name, f"must be {wanted}, not {kind or type(value).__name__} ({value!r:.60})")

    def string(self, name: str) -> str | None:
        value = self.get(name)
        if name not in self.data:
            return None
        if not isinstance(value, str):
            raise self._wrong(name, "a string")
        return value

    def boolean(self, name: str) -> bool | None:
        value = self.get(name)
        if name not in self.data:
            return None
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def integer(self, name: str, *, least: int = 0) -> int | None:
        value = self.get(name)
        if name not in self.data:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, "a whole number")
        if value < least:
            raise self.error(name, f"must be at least {least}, not {value}")
        return value

    def positive(self, name: str) -> float | None:
        """A finite number above zero."""
        value = self.get(name)
        if name not in self.data:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, "a number")
        if not math.isfinite(value) or value <= 0:
            raise self.error(name, f"must be a number above 0, not {value}")
        return float(value)

    def strings(self, name: str) -> tuple[str, ...] | None:
        value = self.get(name)
        if name not in self.data:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(name, "an array of strings")
        return tuple(value)

    def string_map(self, name: str) -> dict[str, str]:
        value = self.get(name)
        if name not in self.data:
            return {}
        if not isinstance(value, dict):
            raise self._wrong(name, "a table of strings")
        for key, item in value.items():
            if not isinstance(item, str):
                raise self.toml.error((*self.key, name, key), f"must be a string, not {item!r:.60}")
        return dict(value)

    def table(self, name: str) -> Table | None:
        value = self.get(name)
        if name not in self.data:
            return None
        if not isinstance(value, dict):
            raise self._wrong(name, f"a table, written [{'.'.join((*self.key, name))}]")
        return Table(self.toml, (*self.key, name), value)

    def refuse(self, name: str, reason: str, remedy: str | None = None) -> None:
        """A key of the schema that cannot be honoured: an error when it is there (and not empty)."""
        if self.get(name) not in (None, [], {}, ""):
            raise self.error(name, reason, remedy)

    def finish(self, elsewhere: Mapping[str, str] | None = None) -> None:
        """Refuse every key that was not asked for. ``elsewhere`` maps keys to the place where they belong."""
        for name in self.data:
            if name in self._asked:
                continue
            where = (elsewhere or {}).get(name)
            if where and where != show_key((*self.key, name)):
                raise self.error(name, "is not a key of this table", remedy=f"write it as {where}")
            raise self.error(name, "is not a known key", remedy=nearest(name, self._asked))


def nearest(name: str, known: Iterable[str], what: str = "known keys") -> str:
    """A sentence that offers the nearest known name, or all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"{what}: {', '.join(known)}"


def _parts(dotted: str) -> Path_:
    return tuple(a or b or c for a, b, c in _PART.findall(dotted))


def _key_lines(text: str) -> dict[Path_, int]:
    """Line of every table and key. Values that span lines are skipped by their quotes and brackets."""
    lines: dict[Path_, int] = {}
    table: Path_ = ()
    scan = _ValueScanner()
    for number, line in enumerate(text.splitlines(), 1):
        if scan.inside:
            scan.feed(line)
            continue
        if header := _HEADER.match(line):
            table = _parts(header.group(2))
            lines.setdefault(table, number)
        elif key := _KEY.match(line):
            full = (*table, *_parts(key.group(1)))
            for end in range(len(table) + 1, len(full) + 1):
                lines.setdefault(full[:end], number)
            for inner in re.finditer(r"[{,]\s*([A-Za-z0-9_-]+)\s*=", line[key.end() :]):
                lines.setdefault((*full, inner.group(1)), number)
            scan.feed(line[key.end() :])
    return lines


class _ValueScanner:
    """Tells whether a value goes on after the end of a line: an open bracket or a triple-quoted string."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""

    @property
    def inside(self) -> bool:
        return bool(self._quote) or self._depth > 0

    def feed(self, line: str) -> None:
        at = 0
        while at < len(line):
            if self._quote:
                if line[at] == "\\" and self._quote[0] == '"':
                    at += 2
                elif line.startswith(self._quote, at):
                    at += len(self._quote)
                    self._quote = ""
                else:
                    at += 1
                continue
            char = line[at]
            if char == "#":
                break
            if char in "\"'":
                self._quote = char * 3 if line.startswith(char * 3, at) else char
                at += len(self._quote)
                continue
            self._depth += (char in "[{") - (char in "]}")
            at += 1
        if len(self._quote) == 1:
            self._quote = ""
