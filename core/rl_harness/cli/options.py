"""Options that several commands share, and how they become configuration."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from rl_harness.runs.layers import Key
    from rl_harness.runs.resolve import Resolved, Setting

F = TypeVar("F", bound=Callable[..., Any])

_Flag = tuple[str, str, str, str | None, str]
#: Flag, key, metavar, kind of plugin whose names complete it, help.
_FLAGS: tuple[_Flag, ...] = (
    ("--harness", "harness.name", "NAME", "harnesses", "The agent: shell, python:MODULE:FUNCTION, ..."),
    ("--sandbox", "sandbox.name", "NAME", "sandboxes", "Where it acts: local, ..."),
    ("--model", "model", "MODEL", None, "A folder, a hub id, or a remote model's name with --base-url."),
    ("--engine", "engine.name", "NAME", "engines", "What runs the model: torch, ..."),
    ("--base-url", "base_url", "URL", None, "An OpenAI-compatible address that serves the model."),
    ("--api-key-env", "api_key_env", "VARIABLE", None, "Environment variable that holds that address's key."),
    ("--trainer", "trainer.name", "NAME", "algorithms", "Train with this algorithm: grpo, ...; none evaluates only."),
    ("--backend", "backend.name", "NAME", "backends", "What computes the weight updates: torch, ..."),
    ("--split", "split", "NAME", None, "Split to evaluate."),
    ("--limit", "limit", "N", None, "Only the first N tasks in an order decided by the seed; none is all."),
    ("--samples", "samples", "N", None, "Episodes a task, for pass@k."),
    ("--temperature", "sampling.temperature", "T", None, "0 is greedy."),
    ("--max-tokens", "sampling.max_tokens", "N", None, "Completion tokens a turn."),
    ("--max-turns", "max_turns", "N", None, "Turns an episode."),
    ("--concurrency", "concurrency", "N", None, "Episodes at once."),
    ("--seed", "seed", "N", None, "Seed of the run."),
    ("--name", "name", "NAME", None, "Name of the run."),
    ("--runs-dir", "runs_dir", "DIR", None, "Where run directories are made."),
)


#: What ``serve`` takes of these, and its own.
_SERVE_TAKES = frozenset(
    {"model", "engine.name", "base_url", "api_key_env", "trainer.name", "backend.name"}
    | {"sampling.temperature", "sampling.max_tokens", "seed", "name", "runs_dir"}
)
_SERVE_FLAGS: tuple[_Flag, ...] = (
    ("--host", "serving.host", "ADDRESS", None, "Address to listen on; 127.0.0.1 unless given."),
    ("--port", "serving.port", "N", None, "Port to listen on; any free one unless given."),
    ("--admin-key-env", "serving.admin_key_env", "VARIABLE", None, "Environment variable that holds the admin key."),
    ("--batch-size", "online.batch_size", "N", None, "Rewarded episodes in one update."),
    ("--areal", "serving.areal_routes", "", None, "Also answer the routes of AReaL's proxy."),
    *(flag for flag in _FLAGS if flag[1] in _SERVE_TAKES),
)


def _parameter(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _completer(kind: str) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
        from rl_harness.plugins import load_registry

        return [name for name in load_registry().names(kind) if name.startswith(incomplete)]

    return complete


def _set_debug(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        context.obj["debug"] = True


debug_option = click.option(
    "--debug", is_flag=True, expose_value=False, callback=_set_debug, help="Show tracebacks of unexpected errors."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
plugin_option = click.option(
    "-p",
    "--plugin",
    "plugin_files",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Load a local plugin file.",
)


def configuration_options(function: F) -> F:
    """Everything that sets the configuration of ``run``: targets, flags, ``-o``, ``-p``, ``--config``."""
    function = _configured_by(_FLAGS)(function)
    return click.argument("targets", nargs=-1, metavar="[BENCHMARK[@VERSION] | TASK_DIR...]")(function)


def serving_options(function: F) -> F:
    """Everything that sets the configuration of ``serve``."""
    return _configured_by(_SERVE_FLAGS)(function)


def _configured_by(flags: Sequence[_Flag]) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        function = click.option(
            "--config",
            "config_path",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Configuration file instead of the nearest rl-harness.toml.",
        )(function)
        function = plugin_option(function)
        function = click.option(
            "-o",
            "--option",
            "options",
            multiple=True,
            metavar="KEY=VALUE",
            help="Set any key, as in -o sandbox.memory=4GiB.",
        )(function)
        for flag, _, metavar, kind, text in reversed(flags):
            complete = _completer(kind) if kind else None
            how: dict[str, Any] = {"metavar": metavar} if metavar else {"flag_value": "true", "is_flag": True}
            function = click.option(
                flag, _parameter(flag), help=text, shell_complete=complete, default=None, type=str, **how
            )(function)
        return function

    return decorate


def resolve_configuration(
    targets: Sequence[str],
    options: Sequence[str],
    plugin_files: Sequence[Path],
    config_path: Path | None,
    flags: dict[str, str | None],
    *,
    strict: bool = True,
    serve: bool = False,
) -> Resolved:
    """The configuration that these command-line values and everything below them come to."""
    from rl_harness.runs.layers import Text
    from rl_harness.runs.resolve import resolve

    given: dict[Key, tuple[str, Any]] = {}
    for flag, key, *_ in _SERVE_FLAGS if serve else _FLAGS:
        value = flags[_parameter(flag)]
        if value is not None:
            given[tuple(key.split("."))] = (flag, Text(value))
    if plugin_files:
        given["plugins",] = ("-p", [str(file) for file in plugin_files])
    given |= _targets(targets, plugin_files)
    return resolve(given, options, config=config_path, strict=strict, serve=serve)


def _targets(targets: Sequence[str], plugin_files: Sequence[Path]) -> dict[Key, tuple[str, Any]]:
    """One benchmark by name, or any number of task directories.

    A bare word is a benchmark where there is one of that name, whatever lies in the working directory.
    """
    names = [target for target in targets if "/" not in target and not Path(target).is_dir()]
    words = [target for target in targets if "/" not in target and target not in names]
    if words:
        from rl_harness.plugins import load_registry

        names += sorted(set(words) & set(load_registry(plugin_files).names("benchmarks")))
    directories = [target for target in targets if target not in names]
    if len(names) > 1 or (names and directories):
        which = "are benchmarks or not there" if len(names) > 1 else "is a benchmark or not there"
        raise click.UsageError(
            f"give one benchmark, or task directories: {', '.join(names)} {which}; "
            "a directory named like a benchmark is written ./NAME"
        )
    if names:
        return {("benchmark",): ("command line", names[0])}
    return {("tasks",): ("command line", directories)} if directories else {}


def echo_json(data: Any) -> None:
    click.echo(json.dumps(data, indent=2, ensure_ascii=False, default=str))


def echo_table(rows: Iterable[Sequence[str]], indent: str = "") -> None:
    """Left-aligned columns, the last one as long as it is."""
    listed = [list(row) for row in rows]
    if not listed:
        return
    widths = [max(len(row[column]) for row in listed) for column in range(len(listed[0]))]
    for row in listed:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        click.echo(indent + "  ".join(cells).rstrip())


def echo_settings(resolved: Resolved) -> None:
    """Every value with its origin; then what was given and is not used, and what is wrong."""
    echo_table((setting.key, _shown(setting), setting.origin) for setting in resolved.settings)
    if resolved.unused:
        click.echo("\nnot used:")
        echo_table(((setting.key, _shown(setting), setting.origin) for setting in resolved.unused), indent="  ")
    for error in resolved.errors:
        click.echo(f"\nerror: {error}", err=True)


def settings_json(resolved: Resolved) -> dict[str, Any]:
    def listed(settings: Sequence[Setting]) -> list[dict[str, Any]]:
        return [{"key": s.key, "value": _plain(s.value), "origin": s.origin} for s in settings]

    return {
        "file": str(resolved.file) if resolved.file else None,
        "settings": listed(resolved.settings),
        "unused": listed(resolved.unused),
        "errors": [str(error) for error in resolved.errors],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _shown(setting: Setting) -> str:
    value = _plain(setting.value)
    return "unset" if value is None else json.dumps(value, ensure_ascii=False)
