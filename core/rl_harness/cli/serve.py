"""``rl-harness serve``: the address that live assistants point at, and the model behind it that learns from rewards."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rl_harness.cli.options import (
    debug_option,
    echo_json,
    echo_settings,
    json_option,
    resolve_configuration,
    serving_options,
    settings_json,
)

if TYPE_CHECKING:
    from rl_harness.jobs.serve import Opened
    from rl_harness.runs.resolve import Resolved

INTERRUPTED = 130


@click.command()
@serving_options
@click.option("--new-admin-key", is_flag=True, help="Make another admin key instead of the one told before.")
@click.option("--fresh", is_flag=True, help="Start anew instead of continuing the run that was stopped.")
@click.option("--dry-run", is_flag=True, help="Show what would be used, and start nothing.")
@json_option
@debug_option
def serve(
    options: tuple[str, ...],
    plugin_files: tuple[Path, ...],
    config_path: Path | None,
    new_admin_key: bool,
    fresh: bool,
    dry_run: bool,
    as_json: bool,
    **flags: Any,
) -> int:
    """Serve a model to live assistants; with --trainer, train it on the rewards they are given.

    Ctrl-C once finishes what runs and saves; twice stops now. The same command continues: sessions, keys, turns,
    rewards and training are kept.
    """
    resolved = resolve_configuration((), options, plugin_files, config_path, flags, serve=True)
    if dry_run:
        if as_json:
            echo_json(settings_json(resolved))
        else:
            echo_settings(resolved)
        return 0
    for setting in resolved.unused:
        if not setting.origin.startswith(str(resolved.file)):
            click.echo(f"note: {setting.key} is not used: {setting.origin}", err=True)
    return _start(resolved, new_admin_key=new_admin_key, fresh=fresh, as_json=as_json)


def _start(resolved: Resolved, *, new_admin_key: bool, fresh: bool, as_json: bool) -> int:
    from rl_harness.jobs.serve import serve as job
    from rl_harness.jobs.stop import StopSignal
    from rl_harness.reports import make_view

    try:
        with make_view(json=as_json, lines=True) as view:
            stop = StopSignal(_say_on_stderr if as_json else view.note)

            def opened(told: Opened) -> None:
                if as_json:
                    click.echo(json.dumps({"event": "serving", **told._asdict()}))
                    return
                view.note(f"serving at {told.base_url}")
                if told.admin_key is not None:
                    view.note(f"admin key, told only now: {told.admin_key}")

            asyncio.run(
                job(
                    resolved.config,
                    resolved.registry,
                    view,
                    opened=opened,
                    fresh=fresh,
                    new_admin=new_admin_key,
                    stop=stop,
                )
            )
    except asyncio.CancelledError:
        _say_on_stderr("stopped at once; what was acknowledged is saved, and the same command continues")
        return INTERRUPTED
    _say_on_stderr("stopped; the same command continues")
    return 0


def _say_on_stderr(text: str) -> None:
    click.echo(text, err=True)
