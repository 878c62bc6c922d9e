"""What the commands that start a job have in common: options beside the configuration's, ``--dry-run``, what is said of
settings that are not used, and how Ctrl-C ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import click

from rl_harness.cli.main import INTERRUPTED
from rl_harness.cli.options import debug_option, echo_json, echo_settings, json_option, settings_json

if TYPE_CHECKING:
    from rl_harness.jobs.outcome import Outcome
    from rl_harness.jobs.stop import StopSignal
    from rl_harness.reports import View
    from rl_harness.runs.resolve import Resolved

__all__ = ["INTERRUPTED", "job_options", "say_on_stderr", "start"]

F = TypeVar("F", bound=Callable[..., Any])


def job_options(function: F) -> F:
    """``--fresh``, ``--dry-run``, ``--json`` and ``--debug``."""
    for option in (
        debug_option,
        json_option,
        click.option("--dry-run", is_flag=True, help="Show what would be used, and start nothing."),
        click.option("--fresh", is_flag=True, help="Start anew instead of continuing an interrupted run."),
    ):
        function = option(function)
    return function


def start(
    resolved: Resolved,
    job: Callable[[View, StopSignal], Coroutine[Any, Any, Outcome]],
    *,
    dry_run: bool,
    as_json: bool,
    lines: bool = False,
) -> Outcome | None:
    """Run ``job``, or show what it would be given; its outcome, None if it was stopped at once or not started.

    ``lines``: with ``--json``, an object a line as things happen, for a job that has no end of its own.
    """
    if dry_run:
        if as_json:
            echo_json(settings_json(resolved))
        else:
            echo_settings(resolved)
        return None
    for setting in resolved.unused:
        if not setting.origin.startswith(str(resolved.file)):
            click.echo(f"note: {setting.key} is not used: {setting.origin}", err=True)

    from rl_harness.jobs.loop import run
    from rl_harness.jobs.stop import StopSignal
    from rl_harness.reports import make_view

    try:
        with make_view(json=as_json, lines=lines) as view:
            return run(job(view, StopSignal(say_on_stderr if as_json else view.note)))
    except asyncio.CancelledError:
        return None


def say_on_stderr(text: str) -> None:
    click.echo(text, err=True)
