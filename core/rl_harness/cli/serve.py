"""``rl-harness serve``: the address that live assistants point at, and the model behind it that learns from rewards."""

from __future__ import annotations

import json
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rl_harness.cli.jobs import INTERRUPTED, job_options, say_on_stderr, start
from rl_harness.cli.options import resolve_configuration, serving_options

if TYPE_CHECKING:
    from rl_harness.jobs.outcome import Outcome
    from rl_harness.jobs.serve import Opened
    from rl_harness.jobs.stop import StopSignal
    from rl_harness.reports import View


@click.command()
@serving_options
@click.option("--new-admin-key", is_flag=True, help="Make another admin key instead of the one told before.")
@job_options
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

    def job(view: View, stop: StopSignal) -> Coroutine[Any, Any, Outcome]:
        from rl_harness.jobs.serve import serve as work

        def opened(told: Opened) -> None:
            if as_json:
                click.echo(json.dumps({"event": "serving", **told._asdict()}))
                return
            view.note(f"serving at {told.base_url}")
            if told.admin_key is not None:
                view.note(f"admin key, told only now: {told.admin_key}")

        return work(
            resolved.config, resolved.registry, view, opened=opened, fresh=fresh, new_admin=new_admin_key, stop=stop
        )

    outcome = start(resolved, job, dry_run=dry_run, as_json=as_json, lines=True)
    if dry_run:
        return 0
    if outcome is None:
        say_on_stderr("stopped at once; what was acknowledged is saved, and the same command continues")
        return INTERRUPTED
    say_on_stderr("stopped; the same command continues")
    return 0
