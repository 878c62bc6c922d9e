"""``rl-harness tasks``: make a task, check that tasks are sound, list benchmarks and their tasks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rl_harness.cli.options import debug_option, echo_json, echo_table, json_option, plugin_option

if TYPE_CHECKING:
    from rl_harness.contracts import SandboxProvider
    from rl_harness.plugins import Registry
    from rl_harness.sandboxes.snapshots import Snapshots
    from rl_harness.tasks import CheckReport


@click.group()
def tasks() -> None:
    """Make, check and list tasks and benchmarks."""


@tasks.command()
@click.argument("directory", type=click.Path(path_type=Path))
@debug_option
def new(directory: Path) -> None:
    """Write a small working task to DIRECTORY, to start from."""
    from rl_harness.tasks import new_task

    target = new_task(directory)
    click.echo(f"wrote {target}")
    click.echo(f"next: edit instruction.md, tests/test.sh and solution/solve.sh, then rl-harness tasks check {target}")


@tasks.command("list")
@click.argument("benchmark", required=False)
@click.option("--split", metavar="NAME", help="Only this split.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="At most N tasks a split.")
@plugin_option
@json_option
@debug_option
def list_(
    benchmark: str | None, split: str | None, limit: int | None, plugin_files: tuple[Path, ...], as_json: bool
) -> int:
    """List the benchmarks there are; with BENCHMARK[@VERSION], its tasks."""
    from rl_harness.plugins import load_registry

    registry = load_registry(plugin_files)
    if benchmark is None:
        return _list_benchmarks(registry, as_json)
    from rl_harness.tasks import open_benchmark

    handle = open_benchmark(registry, benchmark)
    rows = [
        {"split": name, "task": task.name, "directory": str(task.directory), "instruction": task.instruction}
        for name in ([split] if split else handle.splits)
        for task in handle.tasks(name, limit)
    ]
    if as_json:
        echo_json(rows)
    else:
        echo_table((row["split"], row["task"], _first_line(row["instruction"])) for row in rows)
    return 0


def _first_line(text: str, width: int = 80) -> str:
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= width else line[: width - 3] + "..."


def _list_benchmarks(registry: Registry, as_json: bool) -> int:
    from rl_harness.errors import RlHarnessError
    from rl_harness.tasks import open_benchmark

    rows: list[dict[str, Any]] = []
    for entry in registry.entries("benchmarks"):
        row = {"name": entry.name, "summary": entry.extension.summary, "package": entry.plugin.distribution}
        try:
            handle = open_benchmark(registry, entry.full_name)
            rows.append({**row, "version": handle.version, "splits": dict(handle.splits), "problem": None})
        except RlHarnessError as error:
            rows.append({**row, "version": None, "splits": {}, "problem": str(error)})
    if as_json:
        echo_json(rows)
    else:
        echo_table(
            (
                f"{row['name']}@{row['version'] or '?'}",
                " ".join(f"{split}:{size}" for split, size in row["splits"].items()) or "-",
                row["package"],
                f"PROBLEM: {row['problem']}" if row["problem"] else row["summary"],
            )
            for row in rows
        )
    return 1 if any(row["problem"] for row in rows) else 0


@tasks.command()
@click.argument("targets", nargs=-1, required=True, metavar="TASK_DIR... | BENCHMARK[@VERSION]")
@click.option("--sandbox", metavar="NAME", help="Sandbox to run them in, if not as configured.")
@click.option("--split", metavar="NAME", help="Of a benchmark, only this split.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Of a benchmark, at most N tasks a split.")
@click.option("-o", "--option", "options", multiple=True, metavar="KEY=VALUE", help="Set any key, as for run.")
@plugin_option
@json_option
@debug_option
def check(
    targets: tuple[str, ...],
    sandbox: str | None,
    split: str | None,
    limit: int | None,
    options: tuple[str, ...],
    plugin_files: tuple[Path, ...],
    as_json: bool,
) -> int:
    """Check tasks: the solution must score 1 and an agent that does nothing must not pass.

    Each TASK_DIR is a task or a folder of tasks.
    """
    from rl_harness.jobs.alternatives import sandboxes_that_can
    from rl_harness.jobs.supply import make_provider, prepared_environments
    from rl_harness.runs.layers import Text
    from rl_harness.runs.resolve import resolve
    from rl_harness.tasks import UNISOLATED

    flags: dict[tuple[str, ...], tuple[str, Any]] = {("harness", "name"): ("tasks check", "oracle")}
    if sandbox is not None:
        flags["sandbox", "name"] = ("--sandbox", Text(sandbox))
    if plugin_files:
        flags["plugins",] = ("-p", [str(file) for file in plugin_files])
    resolved = resolve(flags, options)
    directories = task_folders(targets, resolved.registry, split, limit)
    choice = resolved.config.sandbox
    provider = make_provider(resolved.registry, choice.name, choice.plugin_options)
    source = prepared_environments(
        resolved.config,
        resolved.registry,
        provider,
        {"run": "check"},
        _note,
    )
    if not provider.capabilities.isolated:
        _note(f"sandbox {choice.name}: {UNISOLATED}")
    unisolated_setup = resolved.config.snapshots.allow_unisolated
    reports = asyncio.run(_check(directories, provider, source, unisolated_setup, quiet=as_json))
    bad = [report for report in reports if not report.ok]
    if refused := [report.refused for report in bad if report.refused is not None]:
        _note(sandboxes_that_can(resolved.registry, choice.name, refused))
    if as_json:
        echo_json([_as_data(report) for report in reports])
    else:
        click.echo(f"{len(reports) - len(bad)} of {len(reports)} tasks are sound")
    return 1 if bad else 0


def task_folders(targets: Sequence[str], registry: Registry, split: str | None, limit: int | None) -> list[Path]:
    """The directories of the tasks that ``targets`` name: tasks, folders of tasks, benchmarks."""
    from rl_harness.errors import UsageError
    from rl_harness.tasks import open_benchmark, task_directories

    paths: list[Path] = []
    for target in targets:
        if "/" in target or Path(target).is_dir():
            if split or limit:
                raise UsageError(f"--split and --limit choose tasks of a benchmark; {target} is a directory")
            paths += task_directories(Path(target))
        else:
            handle = open_benchmark(registry, target)
            for name in [split] if split else handle.splits:
                paths += (task.directory for task in handle.tasks(name, limit))
    once: dict[Path, Path] = {}
    for path in paths:
        if path.resolve() in once:
            _note(f"{path} is given twice, and counts once")
        once.setdefault(path.resolve(), path)
    return list(once.values())


async def _check(
    directories: Sequence[Path], provider: SandboxProvider, source: Snapshots, unisolated_setup: bool, *, quiet: bool
) -> list[CheckReport]:
    from rl_harness.tasks import check_task

    together = asyncio.Semaphore(os.cpu_count() or 1)

    async def one(directory: Path) -> CheckReport:
        async with together:
            return await check_task(directory, source, unisolated_setup=unisolated_setup)

    async def in_order() -> AsyncIterator[CheckReport]:
        async with asyncio.TaskGroup() as group:
            for pending in [group.create_task(one(directory)) for directory in directories]:
                yield await pending

    reports = []
    try:
        await provider.preflight()
        async for report in in_order():
            reports.append(report)
            if not quiet:
                _show(report)
    finally:
        await source.close()
        await provider.close()
    return reports


def _note(text: str) -> None:
    from rl_harness.excerpts import printable_lines

    click.echo(printable_lines(f"note: {text}"), err=True)


def _show(report: CheckReport) -> None:
    from rl_harness.excerpts import printable_lines

    click.echo(f"{'ok  ' if report.ok else 'FAIL'} {report.directory}")
    for problem in report.problems:
        click.echo(printable_lines(f"     {problem}"))


def _as_data(report: CheckReport) -> dict[str, Any]:
    return {
        "directory": str(report.directory),
        "ok": report.ok,
        "problems": [{"file": str(problem.file), "message": problem.message} for problem in report.problems],
        "solution": report.solution.reward if report.solution else None,
        "nothing": report.nothing.reward if report.nothing else None,
    }
