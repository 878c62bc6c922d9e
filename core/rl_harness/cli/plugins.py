"""``rl-harness plugins``: what is installed, what each plugin offers, and whether it works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rl_harness.cli.options import debug_option, echo_json, echo_table, json_option, plugin_option

if TYPE_CHECKING:
    from rl_harness.plugins import Entry, LoadedPlugin, Registry

#: Seconds that importing one plugin target may take.
CHECK_TIMEOUT = 120


@click.group()
def plugins() -> None:
    """List, show and check plugins."""


@plugins.command("list")
@plugin_option
@json_option
@debug_option
def list_(plugin_files: tuple[Path, ...], as_json: bool) -> None:
    """List every installed plugin, what it registers, and what is wrong with it."""
    from rl_harness.plugins import DISABLE_VARIABLE, load_registry

    registry = load_registry(plugin_files)
    loaded = registry.plugins()
    if as_json:
        echo_json([_described(plugin) for plugin in loaded])
        return
    for plugin in loaded:
        click.echo(plugin.label + (f"  disabled by {DISABLE_VARIABLE}" if plugin.disabled else ""))
        echo_table(((e.kind, e.name, e.extension.summary) for e in plugin.entries), indent="  ")
        for problem in plugin.problems:
            click.echo(f"  PROBLEM: {problem}")
    for name in registry.unknown_disabled():
        click.echo(f"note: {DISABLE_VARIABLE} names {name}, which is not installed", err=True)


def _described(plugin: LoadedPlugin) -> dict[str, Any]:
    return {
        "distribution": plugin.distribution,
        "version": plugin.version,
        "source": plugin.source,
        "disabled": plugin.disabled,
        "problems": plugin.problems,
        "provides": [{"kind": e.kind, "name": e.name, "summary": e.extension.summary} for e in plugin.entries],
    }


@plugins.command()
@click.argument("name")
@plugin_option
@json_option
@debug_option
def show(name: str, plugin_files: tuple[Path, ...], as_json: bool) -> None:
    """Show what NAME is, whose it is, and its options. NAME may be DISTRIBUTION:NAME."""
    from rl_harness.plugins import load_registry

    registry = load_registry(plugin_files)
    shown = [_details(registry, entry) for entry in _matching(registry, name)]
    if as_json:
        echo_json(shown)
        return
    for item in shown:
        click.echo(f"{item['kind']}: {item['name']}  from {item['distribution']} {item['version']}")
        click.echo(f"  {item['summary']}")
        click.echo(f"  {item['load']}")
        if item["error"]:
            click.echo(f"  ERROR: {item['error']}")
        elif item["options"]:
            click.echo("  options:")
            rows = ((f"{item['section']}.{o['key']}", o["type"], o["default"], o["help"]) for o in item["options"])
            echo_table(rows, indent="    ")
        else:
            click.echo("  no options")


def _matching(registry: Registry, name: str) -> list[Entry]:
    """Entries of that name of any kind; a name of none is told by the kind that has the nearest."""
    import difflib

    from rl_harness.errors import UnknownName
    from rl_harness.kinds import KINDS

    owner, _, bare = name.rpartition(":")
    every = [entry for kind in KINDS for entry in registry.entries(kind)]
    found = [e for e in every if e.name == bare and (not owner or e.plugin.is_called(owner))]
    if not found:
        near = difflib.get_close_matches(bare, [entry.name for entry in every], n=3)
        hint = f"did you mean {' or '.join(dict.fromkeys(near))}?" if near else "see rl-harness plugins list"
        raise UnknownName(f"no plugin registers {name!r}", remedy=hint)
    return found


def _details(registry: Registry, entry: Entry) -> dict[str, Any]:
    from rl_harness.errors import RlHarnessError
    from rl_harness.kinds import KINDS

    kind = KINDS[entry.kind]
    details: dict[str, Any] = {
        "kind": kind.singular,
        "section": kind.section,
        "name": entry.name,
        "summary": entry.extension.summary,
        "load": entry.extension.load,
        "distribution": entry.plugin.distribution,
        "version": entry.plugin.version,
        "options": [],
        "error": None,
    }
    try:
        cls = registry.load(entry.kind, entry.full_name)
    except RlHarnessError as error:
        details["error"] = str(error)
        return details
    for name, field in cls.Options.model_fields.items():
        default = (
            "required" if field.is_required() else json.dumps(field.get_default(call_default_factory=True), default=str)
        )
        details["options"].append(
            {
                "key": field.alias or name,
                "type": _type_text(field.annotation),
                "default": default,
                "help": field.description or "",
            }
        )
    return details


def _type_text(annotation: Any) -> str:
    """A type as a user may read it: ``int | none``, ``"disk" | "memory"``, ``list of str``."""
    from types import NoneType, UnionType
    from typing import Annotated, Literal, Union, get_args, get_origin

    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return " | ".join(_type_text(part) for part in arguments)
    if origin is Literal:
        return " | ".join(json.dumps(value) for value in arguments)
    if origin is Annotated:
        return _type_text(arguments[0])
    if origin in (list, tuple, set, frozenset):
        return f"list of {_type_text(arguments[0])}"
    if origin is dict:
        return f"table of {_type_text(arguments[1])}"
    if annotation is NoneType:
        return "none"
    name = str(getattr(annotation, "__name__", annotation))
    return {"str": "text", "bool": "true | false", "Path": "path", "ByteSize": "size"}.get(name, name)


@plugins.command()
@click.argument("distributions", nargs=-1)
@plugin_option
@json_option
@debug_option
def check(distributions: tuple[str, ...], plugin_files: tuple[Path, ...], as_json: bool) -> int:
    """Import everything that plugins register, each in a process of its own, and check it against its contract."""
    from rl_harness.discovery import canonical
    from rl_harness.errors import UnknownName
    from rl_harness.plugins import load_registry

    loaded = load_registry(plugin_files).plugins()
    if distributions:
        wanted = {canonical(name) for name in distributions}
        unknown = wanted - {canonical(plugin.distribution) for plugin in loaded}
        if unknown:
            raise UnknownName(
                f"no plugin of {', '.join(sorted(unknown))} is installed", remedy="rl-harness plugins list"
            )
        loaded = [plugin for plugin in loaded if canonical(plugin.distribution) in wanted]
    rows: list[dict[str, str | None]] = [
        {"plugin": plugin.label, "what": "registration", "error": problem}
        for plugin in loaded
        for problem in plugin.problems
    ]
    entries = [entry for plugin in loaded for entry in plugin.entries]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        errors = pool.map(lambda entry: _check_entry(entry, plugin_files), entries)
        for entry, error in zip(entries, errors, strict=True):
            rows.append({"plugin": entry.plugin.label, "what": f"{entry.kind} {entry.name}", "error": error})
    if as_json:
        echo_json(rows)
    else:
        echo_table((str(row["what"]), str(row["plugin"]), row["error"] or "ok") for row in rows)
    return 1 if any(row["error"] for row in rows) else 0


def _check_entry(entry: Entry, plugin_files: Sequence[Path]) -> str | None:
    """What is wrong with one target, or None. A crash or a hang of its import is an answer too."""
    command = [
        sys.executable,
        "-m",
        "rl_harness.cli.check_target",
        entry.kind,
        entry.full_name,
        *map(str, plugin_files),
    ]
    try:
        done = subprocess.run(command, capture_output=True, timeout=CHECK_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return f"importing it takes more than {CHECK_TIMEOUT} s"
    if done.returncode == 0:
        return None
    said = done.stderr.decode("utf-8", "replace").strip()
    if done.returncode < 0:
        return f"the process died of signal {-done.returncode}; {said.splitlines()[-1] if said else 'it said nothing'}"
    return said or f"exit code {done.returncode}"
