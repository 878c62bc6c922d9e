"""``rl-harness run``: evaluate an agent, or train the model behind it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rl_harness.cli.options import (
    configuration_options,
    debug_option,
    echo_json,
    echo_settings,
    json_option,
    resolve_configuration,
    settings_json,
)

if TYPE_CHECKING:
    from rl_harness.runs.resolve import Resolved

INTERRUPTED = 130


@click.command()
@configuration_options
@click.option("--fresh", is_flag=True, help="Start anew instead of continuing an interrupted run.")
@click.option("--dry-run", is_flag=True, help="Show what would be used, and start nothing.")
@json_option
@debug_option
def run(
    targets: tuple[str, ...],
    options: tuple[str, ...],
    plugin_files: tuple[Path, ...],
    config_path: Path | None,
    fresh: bool,
    dry_run: bool,
    as_json: bool,
    **flags: Any,
) -> int:
    """Evaluate an agent on a benchmark or on task directories; with --trainer, train the model behind it.

    Ctrl-C once finishes what runs and saves; twice stops now. The same command continues an interrupted run.
    """
    resolved = resolve_configuration(targets, options, plugin_files, config_path, flags)
    if dry_run:
        if as_json:
            echo_json(settings_json(resolved))
        else:
            echo_settings(resolved)
        return 0
    for setting in resolved.unused:
        if not setting.origin.startswith(str(resolved.file)):
            click.echo(f"note: {setting.key} is not used: {setting.origin}", err=True)
    return _start(resolved, fresh=fresh, as_json=as_json)


def _start(resolved: Resolved, *, fresh: bool, as_json: bool) -> int:
    from rl_harness.jobs.stop import StopSignal
    from rl_harness.reports import make_view

    if resolved.config.trains:
        from rl_harness.jobs.train import train as job
    else:
        from rl_harness.jobs.evaluate import evaluate as job
    try:
        with make_view(json=as_json) as view:
            stop = StopSignal(_say_on_stderr if as_json else view.note)
            outcome = asyncio.run(job(resolved.config, resolved.registry, view, fresh=fresh, stop=stop))
        code = outcome.exit_code
    except asyncio.CancelledError:
        code = INTERRUPTED
    if code == INTERRUPTED:
        _say_on_stderr("stopped; what was finished is saved, and the same command continues")
    return code


def _say_on_stderr(text: str) -> None:
    click.echo(text, err=True)
