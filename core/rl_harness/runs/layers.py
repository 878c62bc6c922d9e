"""Where configuration values come from: a TOML file, ``RL_HARNESS_*`` variables, ``-o key=value``. Each source becomes
a :class:`Layer` of dotted keys that remember their origin; merging them is :mod:`rl_harness.runs.resolve`'s business.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rl_harness.errors import ConfigError
from rl_harness.textfile import read_text

Key = tuple[str, ...]

FILE_NAME = "rl-harness.toml"
PREFIX = "RL_HARNESS_"
CONFIG_VARIABLE = "RL_HARNESS_CONFIG"

#: Variables with our prefix that are not configuration keys.
OTHER_VARIABLES = frozenset(
    {CONFIG_VARIABLE, "RL_HARNESS_DISABLE_PLUGINS", "RL_HARNESS_REQUIRE", "RL_HARNESS_REWARD_KEY"}
)


class Text(str):
    """A value typed on a command line or in a variable, whose type the key decides."""

    __slots__ = ()


class Value(NamedTuple):
    value: Any
    origin: str


class Layer(NamedTuple):
    """One source of values. ``name`` is for messages about the source as a whole."""

    name: str
    values: dict[Key, Value]


def dotted(key: Key) -> str:
    return ".".join(key)


def find_file(start: Path) -> Path | None:
    """The nearest ``rl-harness.toml`` in ``start`` or a directory above it."""
    for directory in (start, *start.parents):
        if (directory / FILE_NAME).is_file():
            return directory / FILE_NAME
    return None


def file_layer(file: Path) -> Layer:
    """The values of a TOML file; each origin is ``file:line``. Raises :class:`ConfigError` naming file and line."""
    try:
        text = read_text(file)
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {file}", remedy="check --config") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the configuration file {file}: {error}") from None
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: {error}", remedy="fix the TOML syntax there") from None
    except RecursionError:
        raise ConfigError(f"{file}: nested too deeply", remedy="fix the TOML syntax there") from None
    lines = key_lines(text)

    def origin(key: Key) -> str:
        line = next((lines[key[:n]] for n in range(len(key), 0, -1) if key[:n] in lines), None)
        return f"{file}:{line}" if line else str(file)

    return Layer(str(file), {key: Value(value, origin(key)) for key, value in flatten(data)})


def environment_layer(environment: Mapping[str, str]) -> Layer:
    """``RL_HARNESS_SANDBOX__MEMORY=4GiB`` sets ``sandbox.memory``: two underscores are a dot."""
    values: dict[Key, Value] = {}
    for variable in sorted(environment):
        if variable.startswith(PREFIX) and variable not in OTHER_VARIABLES:
            key = tuple(variable.removeprefix(PREFIX).lower().split("__"))
            values[key] = Value(Text(environment[variable]), f"${variable}")
    return Layer("environment", values)


def option_layer(flags: Mapping[Key, tuple[str, Any]], options: Iterable[str]) -> Layer:
    """The command line: ``flags`` are key to (flag, value), ``options`` the ``key=value`` of every ``-o``.

    A key given both ways, or twice, counts as given last: ``-o`` after flags.
    """
    values = {key: Value(value, flag) for key, (flag, value) in flags.items()}
    for option in options:
        name, separator, text = option.partition("=")
        key = tuple(part.strip() for part in name.split("."))
        if not separator or not all(key):
            raise ConfigError(f"-o {option}: not of the form key=value", remedy="such as -o sandbox.memory=4GiB")
        values[key] = Value(Text(text.strip()), f"-o {name.strip()}")
    return Layer("command line", values)


def flatten(data: Mapping[str, Any], prefix: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Leaves of nested tables with their paths; an empty table is a leaf."""
    for name, value in data.items():
        key = (*prefix, name)
        if isinstance(value, Mapping) and value:
            yield from flatten(value, key)
        else:
            yield key, value


def nest(values: Mapping[Key, Any]) -> dict[str, Any]:
    """The nested tables that :func:`flatten` came from."""
    root: dict[str, Any] = {}
    for key, value in values.items():
        table = root
        for part in key[:-1]:
            table = table.setdefault(part, {})
        table[key[-1]] = value
    return root


def key_lines(text: str) -> dict[Key, int]:
    """Line numbers of table headers and keys. Good enough to point at: text inside multi-line strings can only
    add keys that are not there."""
    lines: dict[Key, int] = {}
    table: Key = ()
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if line.startswith("["):
            table = _parse_key(line.partition("#")[0].strip().strip("[]")) or table
            lines.setdefault(table, number)
        elif "=" in line and not line.startswith("#"):
            key = _parse_key(line.partition("=")[0])
            if key:
                lines.setdefault((*table, *key), number)
    return lines


def _parse_key(text: str) -> Key | None:
    try:
        data: Any = tomllib.loads(f"{text.strip()} = 0")
    except (tomllib.TOMLDecodeError, RecursionError):
        return None
    key: list[str] = []
    while isinstance(data, dict) and data:
        name, data = next(iter(data.items()))
        key.append(name)
    return tuple(key)


def config_file(given: Path | None, environment: Mapping[str, str] = os.environ) -> Path | None:
    """``--config``, else ``$RL_HARNESS_CONFIG``, else the nearest file."""
    if given is not None:
        return given
    named = environment.get(CONFIG_VARIABLE)
    return Path(named) if named else find_file(Path.cwd())
