"""``rl-harness runs``: what was run, and how two runs compare."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from rl_harness.cli.options import debug_option, json_option, plugin_option

if TYPE_CHECKING:
    from rl_harness.reports.episode_report import Decode

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
@click.option("--task", metavar="TASK", help="Show every attempt at this task instead: turns, commands, grade.")
@click.option("--phase", metavar="PHASE", help="With --task: only attempts of this phase, such as evaluate or train.")
@plugin_option
@runs_dir_option
@json_option
@debug_option
def show(
    run: str,
    task: str | None,
    phase: str | None,
    plugin_files: tuple[Path, ...],
    runs_dir: Path | None,
    as_json: bool,
) -> None:
    """Show the report of RUN, a name or a directory; with --task, what happened at one task."""
    from rl_harness.reports import json_text, report_text, show_run, show_task, task_text

    path = _run_path(run, runs_dir)
    if task is None:
        if phase is not None or plugin_files:
            raise click.UsageError("--phase and -p go with --task")
        report = show_run(path)
        click.echo(json_text(report) if as_json else report_text(report))
        return
    decode, undecoded = _decoder(path, plugin_files)
    episodes = show_task(path, task, phase=phase, decode=decode, undecoded=undecoded)
    click.echo(json_text(episodes) if as_json else task_text(episodes))


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


def _decoder(path: Path, plugin_files: tuple[Path, ...]) -> tuple[Decode | None, str | None]:
    """What turns the run's token ids into text, or why there is nothing that does: the model's folder may be gone,
    or the plugin that rendered for it not be installed here. Plugin files that a run names are not loaded unasked:
    to look at somebody's run must not run somebody's code."""
    from rl_harness.contracts import Renderer
    from rl_harness.errors import RlHarnessError
    from rl_harness.plugins import load_registry
    from rl_harness.runs.info import DATABASE, MODEL_FOLDER, read_config
    from rl_harness.runs.store import reading

    with reading(path / DATABASE) as store:
        folder = store.get_state(MODEL_FOLDER)
    if folder is None:
        return None, "the run notes no folder of its model"
    options = dict(read_config(path).get("renderer") or {})
    registry = load_registry(plugin_files)
    try:
        renderer = registry.create("renderers", options.pop("name", "template"), options)
        assert isinstance(renderer, Renderer)
        renderer.load(Path(folder))
    except RlHarnessError as error:
        return None, str(error)
    return renderer.decode, None


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
