"""``rl-harness run``: evaluate an agent, or train the model behind it."""

from __future__ import annotations

from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rl_harness.cli.jobs import INTERRUPTED, job_options, say_on_stderr, start
from rl_harness.cli.options import configuration_options, resolve_configuration

if TYPE_CHECKING:
    from rl_harness.jobs.outcome import Outcome
    from rl_harness.jobs.stop import StopSignal
    from rl_harness.reports import View


@click.command()
@configuration_options
@job_options
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

    def job(view: View, stop: StopSignal) -> Coroutine[Any, Any, Outcome]:
        if resolved.config.trains:
            from rl_harness.jobs.train import train as work
        else:
            from rl_harness.jobs.evaluate import evaluate as work
        return work(resolved.config, resolved.registry, view, fresh=fresh, stop=stop)

    outcome = start(resolved, job, dry_run=dry_run, as_json=as_json)
    if dry_run:
        return 0
    code = INTERRUPTED if outcome is None else outcome.exit_code
    if code == INTERRUPTED:
        say_on_stderr("stopped; what was finished is saved, and the same command continues")
    return code
