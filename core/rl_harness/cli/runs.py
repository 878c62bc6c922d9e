"""``rl-harness runs``: what was run, and how two runs compare."""

from __future__ import annotations

from pathlib import Path

import click

from rl_harness.cli.options import debug_option, json_option

runs_dir_option = click.option(
    "--runs-dir", type=click.Path(path_type=Path), metavar="DIR", help="Where the runs are, if not as configured."
)


@click.group()
def runs() -> None:
    """List, show and compare runs."""


@runs.command("list")
@runs_dir_option
@json_option
@debug_option
def list_(runs_dir: Path | None, as_json: bool) -> None:
    """List the runs, oldest first."""
    from rl_harness.reports import json_text, list_runs, runs_text
    from rl_harness.runs.resolve import configured_runs_dir

    rows = list_runs(runs_dir or configured_runs_dir())
    click.echo(json_text(rows) if as_json else runs_text(rows))


@runs.command()
@click.argument("run")
@runs_dir_option
@json_option
@debug_option
def show(run: str, runs_dir: Path | None, as_json: bool) -> None:
    """Show the report of RUN, a name or a directory."""
    from rl_harness.reports import json_text, report_text, show_run

    report = show_run(_run_path(run, runs_dir))
    click.echo(json_text(report) if as_json else report_text(report))


@runs.command()
@click.argument("first")
@click.argument("second")
@runs_dir_option
@json_option
@debug_option
def compare(first: str, second: str, runs_dir: Path | None, as_json: bool) -> None:
    """Compare the evaluations of two runs, FIRST against SECOND, task by task where they share tasks."""
    from rl_harness.reports import compare_runs, comparison_text, json_text

    comparison = compare_runs(_run_path(first, runs_dir), _run_path(second, runs_dir))
    click.echo(json_text(comparison) if as_json else comparison_text(comparison))


def _run_path(run: str, runs_dir: Path | None) -> Path:
    """A run's directory from its path, or from its name among the runs."""
    import difflib

    from rl_harness.errors import UnknownName
    from rl_harness.runs.resolve import configured_runs_dir

    directory = runs_dir or configured_runs_dir()
    for path in (directory / run, Path(run)):
        if path.is_dir():
            return path
    names = [path.name for path in directory.iterdir() if path.is_dir()] if directory.is_dir() else []
    near = difflib.get_close_matches(run, names, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else "rl-harness runs list"
    raise UnknownName(f"there is no run {run!r} in {directory}", remedy=hint)
