"""``rl-harness sandbox``: what sandboxes and prepared environments there are, removing old ones, preparing ahead; and
``rl-harness bench build``, which prepares those of a benchmark."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from rl_harness.cli.options import debug_option, echo_json, echo_table, json_option, plugin_option

if TYPE_CHECKING:
    from rl_harness.contracts import BuildInfo, SandboxInfo, SandboxProvider
    from rl_harness.jobs.build import Prepared
    from rl_harness.runs.resolve import Resolved
    from rl_harness.sandboxes.inventory import Inventory, Pruned, SnapshotUse
    from rl_harness.sandboxes.usage import Usage

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def _common(function: F) -> F:
    for option in (
        debug_option,
        json_option,
        plugin_option,
        click.option("-o", "--option", "options", multiple=True, metavar="KEY=VALUE", help="Set any key, as for run."),
        click.option(
            "--config",
            "config_path",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Configuration file instead of the nearest rl-harness.toml.",
        ),
    ):
        function = option(function)
    return function


@click.group()
def sandbox() -> None:
    """List and prune sandboxes, prepared environments and built images; prepare some ahead."""


@click.group()
def bench() -> None:
    """Prepare a benchmark's environments ahead."""


@sandbox.command("list")
@click.option("--sandbox", "name", metavar="NAME", help="Only this sandbox; all that are installed otherwise.")
@_common
def list_(
    name: str | None,
    options: tuple[str, ...],
    plugin_files: tuple[Path, ...],
    config_path: Path | None,
    as_json: bool,
) -> int:
    """List sandboxes, prepared environments and built images: whose they are, whether that lives, what is in use."""
    from rl_harness.sandboxes.inventory import inventory

    resolved = _resolved(name, options, plugin_files, config_path)
    found, problems = asyncio.run(_everywhere(resolved, name, inventory))
    if as_json:
        echo_json({**_joined(found), "unavailable": _in_words(problems)})
    else:
        _show_inventory(found, _of_interest(problems, resolved), _run_names(resolved))
    return 0


@sandbox.command()
@click.option("--sandbox", "name", metavar="NAME", help="Only this sandbox; all that are installed otherwise.")
@click.option("--ttl", metavar="AGE", help="Remove what was not used for longer, as in 7d, 12h or 30m.")
@click.option(
    "--all", "everything", is_flag=True, help="Remove every prepared environment and built image that is not in use."
)
@click.option("--dry-run", is_flag=True, help="Say what would be removed.")
@_common
def prune(
    name: str | None,
    ttl: str | None,
    everything: bool,
    dry_run: bool,
    options: tuple[str, ...],
    plugin_files: tuple[Path, ...],
    config_path: Path | None,
    as_json: bool,
) -> int:
    """Remove sandboxes of dead owners, half-made things, and environments and images that were not used for long.

    What is in use stays, and so does a sandbox whose owner runs on another machine.
    """
    from rl_harness.sandboxes import inventory

    resolved = _resolved(name, options, plugin_files, config_path)
    age = resolved.config.snapshots.keep_days * _UNITS["d"] if ttl is None else _seconds(ttl)

    async def work(provider: SandboxProvider, usage: Usage) -> Pruned:
        return await inventory.prune(provider, usage, ttl=age, everything=everything, dry_run=dry_run)

    done, problems = asyncio.run(_everywhere(resolved, name, work))
    if as_json:
        half_made = sum(pruned.half_made for pruned in done.values())
        echo_json({**_joined(done), "half_made": half_made, "dry_run": dry_run, "unavailable": _in_words(problems)})
    else:
        _show_pruned(
            done, _of_interest(problems, resolved), "would remove" if dry_run else "removed", _run_names(resolved)
        )
    return 0


def _build_options(function: F) -> F:
    for option in (
        click.option("--concurrency", type=click.IntRange(1), default=4, show_default=True, help="Builds at once."),
        click.option("--harness", metavar="NAME", help="Whose installation to include, if not as configured."),
        click.option("--sandbox", "name", metavar="NAME", help="Where, if not as configured."),
        _common,
    ):
        function = option(function)
    return function


@sandbox.command()
@click.argument("directories", nargs=-1, required=True, metavar="TASK_DIR...")
@_build_options
def build(directories: tuple[str, ...], **arguments: Any) -> int:
    """Prepare the environments of tasks, so that no run has to. Those that are prepared already stay.

    Each TASK_DIR is a task or a folder of tasks.
    """
    targets = [target if "/" in target else f"./{target}" for target in directories]
    return _build(targets, None, None, **arguments)


@bench.command("build")
@click.argument("name_of_benchmark", metavar="BENCHMARK[@VERSION]")
@click.option("--split", metavar="NAME", help="Only this split.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="At most N tasks a split.")
@_build_options
def bench_build(name_of_benchmark: str, split: str | None, limit: int | None, **arguments: Any) -> int:
    """Prepare the environments of a benchmark's tasks, so that no run has to."""
    return _build([name_of_benchmark], split, limit, **arguments)


def _build(
    targets: Sequence[str],
    split: str | None,
    limit: int | None,
    *,
    name: str | None,
    harness: str | None,
    concurrency: int,
    options: tuple[str, ...],
    plugin_files: tuple[Path, ...],
    config_path: Path | None,
    as_json: bool,
) -> int:
    from rl_harness.cli.tasks import task_folders
    from rl_harness.jobs.build import build_environments
    from rl_harness.tasks import load_task

    resolved = _resolved(name, options, plugin_files, config_path, harness)
    for target in targets:
        _not_a_benchmark(target, resolved)
    tasks = [load_task(directory) for directory in task_folders(targets, resolved.registry, split, limit)]
    progress = _Progress(quiet=as_json)
    results = asyncio.run(
        build_environments(
            resolved.config,
            resolved.registry,
            tasks,
            concurrency=concurrency,
            note=lambda text: click.echo(f"note: {text}", err=True),
            started=progress.started,
            ended=progress.ended,
        )
    )
    if as_json:
        import msgspec

        echo_json([msgspec.to_builtins(result) for result in results])
    else:
        progress.summary(results)
    return 1 if any(result.outcome == "failed" for result in results) else 0


class _Progress:
    """A line for each environment as it ends, and one about all of them."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._total = self._done = 0

    def started(self, total: int) -> None:
        self._total = total
        if not self._quiet:
            click.echo(f"{total} environment{'' if total == 1 else 's'}")

    def ended(self, result: Prepared) -> None:
        from rl_harness.excerpts import printable
        from rl_harness.reports.tables import duration, listed

        self._done += 1
        if not self._quiet:
            said = {
                "built": "built",
                "ready": "ready",
                "found": "there already",
                "plain": "nothing to prepare",
                "failed": "FAILED",
            }
            seconds = f"  {duration(result.seconds)}" if result.outcome in ("built", "ready", "failed") else ""
            click.echo(f"[{self._done}/{self._total}] {said[result.outcome]}  {listed(result.tasks, 3)}{seconds}")
            for line in result.error.splitlines():
                click.echo(f"    {printable(line)}")

    def summary(self, results: Sequence[Prepared]) -> None:
        from collections import Counter

        counts = Counter(result.outcome for result in results)
        parts = [f"{counts['built']} built", f"{counts['found']} there already", f"{counts['plain']} need nothing"]
        if counts["ready"]:
            parts.insert(1, f"{counts['ready']} images ready")
        failed = [task for result in results if result.outcome == "failed" for task in result.tasks]
        click.echo(", ".join([*parts, f"{counts['failed']} failed"]))
        if failed:
            click.echo(f"tasks that cannot run: {', '.join(dict.fromkeys(failed))}")


# -- every provider ----------------------------------------------------------------------------------------------


def _resolved(
    name: str | None,
    options: Sequence[str],
    plugin_files: Sequence[Path],
    config_path: Path | None,
    harness: str | None = None,
) -> Resolved:
    from rl_harness.errors import UsageError
    from rl_harness.runs.layers import Text
    from rl_harness.runs.resolve import resolve

    flags: dict[tuple[str, ...], tuple[str, Any]] = {}
    if harness is not None:
        flags["harness", "name"] = ("--harness", Text(harness))
    if name is not None:
        if not name:
            raise UsageError("--sandbox: a name is missing", remedy="rl-harness plugins list shows them")
        flags["sandbox", "name"] = ("--sandbox", Text(name))
    if plugin_files:
        flags["plugins",] = ("-p", [str(file) for file in plugin_files])
    return resolve(flags, options, config=config_path, strict=False)


def _not_a_benchmark(target: str, resolved: Resolved) -> None:
    """A benchmark's name where a folder belongs is answered with the command that takes it."""
    from rl_harness.errors import UsageError

    bare = target.removeprefix("./")
    if target != bare and not Path(target).exists() and bare.partition("@")[0] in resolved.registry.names("benchmarks"):
        raise UsageError(f"{bare} is a benchmark, not a folder of tasks", remedy=f"rl-harness bench build {bare}")


def _in_words(problems: dict[str, Exception]) -> dict[str, str]:
    from rl_harness.errors import RlHarnessError

    return {
        name: str(error) if isinstance(error, RlHarnessError) else f"{type(error).__name__}: {error}"
        for name, error in problems.items()
    }


def _of_interest(problems: dict[str, Exception], resolved: Resolved) -> dict[str, str]:
    """Mistakes, and what is missing for sandboxes that are configured or were used here: that others were never set up
    is no news."""
    from rl_harness.errors import PluginError, RlHarnessError
    from rl_harness.sandboxes.usage import state_folder

    chosen = resolved.config.sandbox.name.rpartition(":")[2]
    used = state_folder()
    return {
        name: problem
        for name, problem in _in_words(problems).items()
        if name == chosen
        or isinstance(problems[name], PluginError)
        or not isinstance(problems[name], RlHarnessError)
        or ((used / name).is_dir() and any((used / name).iterdir()))
    }


def _run_names(resolved: Resolved) -> dict[str, str]:
    """The names of the runs here, by what sandboxes are labelled with."""
    from rl_harness.runs.info import RunInfo, find_runs

    return {info.id: info.name for _, info in find_runs(resolved.config.runs_dir) if isinstance(info, RunInfo)}


async def _everywhere(
    resolved: Resolved, name: str | None, work: Callable[[SandboxProvider, Usage], Awaitable[T]]
) -> tuple[dict[str, T], dict[str, Exception]]:
    """``work`` with the provider that was named, or with all of them; and why it could not be done where it could not.

    The configured provider gets its configured options, the others their defaults.
    """
    from rl_harness.contracts import SandboxProvider
    from rl_harness.errors import RlHarnessError
    from rl_harness.sandboxes.usage import Usage, state_folder

    chosen = resolved.config.sandbox
    names = [chosen.name] if name else [entry.full_name for entry in resolved.registry.entries("sandboxes")]
    found: dict[str, T] = {}
    problems: dict[str, Exception] = {}
    for full in names:
        short = full.rpartition(":")[2]
        mine = chosen.plugin_options if chosen.name in (full, short) else {}
        try:
            provider = resolved.registry.create("sandboxes", full, mine)
            assert isinstance(provider, SandboxProvider)
            try:
                found[short] = await work(provider, Usage(state_folder() / short))
            finally:
                await provider.close()
        except RlHarnessError as error:
            if name:
                raise
            problems[short] = error
        except Exception as error:  # an SDK may raise anything; the others are still of interest
            if name:
                raise
            problems[short] = error
    return found, problems


def _seconds(age: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", age.strip())
    if found is None:
        raise click.UsageError(f"--ttl {age}: write a number and s, m, h or d, as in 7d")
    return float(found[1]) * _UNITS[found[2]]


# -- showing -----------------------------------------------------------------------------------------------------


def _joined(found: dict[str, Any]) -> dict[str, Any]:
    return {
        "sandboxes": [_sandbox_data(info) for part in found.values() for info in part.sandboxes],
        "snapshots": [_snapshot_data(use) for part in found.values() for use in part.snapshots],
        "builds": [_build_data(info) for part in found.values() for info in part.builds],
    }


def _sandbox_data(info: SandboxInfo) -> dict[str, Any]:
    return {
        "id": info.id,
        "sandbox": info.provider,
        "run": info.labels.get("run"),
        "labels": dict(info.labels),
        "created_at": info.created_at,
        "owner_alive": info.owner_alive,
        "snapshot": info.snapshot,
    }


def _snapshot_data(use: SnapshotUse) -> dict[str, Any]:
    return {
        "id": use.info.id,
        "sandbox": use.info.provider,
        "key": use.info.key,
        "labels": dict(use.info.labels),
        "created_at": use.info.created_at,
        "size": use.info.size,
        "references": use.references,
        "last_used": use.last_used,
        "hits": use.hits,
        "build_seconds": use.build_seconds,
    }


def _build_data(info: BuildInfo) -> dict[str, Any]:
    return {
        "id": info.id,
        "sandbox": info.provider,
        "source": info.source,
        "created_at": info.created_at,
        "size": info.size,
        "used_by": list(info.used_by),
        "last_used": info.last_used,
    }


def _show_inventory(found: dict[str, Inventory], problems: dict[str, str], runs: dict[str, str]) -> None:
    now = time.time()
    sandboxes = [info for part in found.values() for info in part.sandboxes]
    snapshots = [use for part in found.values() for use in part.snapshots]
    builds = [info for part in found.values() for info in part.builds]
    if sandboxes:
        click.echo("sandboxes")
        owner = {True: "alive", False: "dead", None: "unknown"}
        header = ("id", "sandbox", "run", "age", "owner", "started from")
        rows = (
            (
                info.id,
                info.provider,
                runs.get(run := info.labels.get("run", "-"), run),
                _age(now - info.created_at),
                owner[info.owner_alive],
                info.snapshot or "-",
            )
            for info in sandboxes
        )
        echo_table([header, *rows], indent="  ")
    if snapshots:
        click.echo("prepared environments")
        columns = ("id", "sandbox", "environment", "age", "last used", "hits", "in use by", "size")
        echo_table([columns, *(_snapshot_row(use, now) for use in snapshots)], indent="  ")
    if builds:
        click.echo("built images")
        titles = ("id", "sandbox", "built from", "age", "last used", "in use by", "size")
        echo_table([titles, *(_build_row(info, now) for info in builds)], indent="  ")
    if not sandboxes and not snapshots and not builds:
        click.echo(
            f"no sandboxes, prepared environments or built images ({', '.join(found) or 'no sandbox could be asked'})"
        )
    _show_problems(problems)


def _snapshot_row(use: SnapshotUse, now: float) -> tuple[str, ...]:
    return (
        use.info.id,
        use.info.provider,
        use.info.labels.get("environment", "-"),
        _age(now - use.info.created_at),
        _age(now - use.last_used),
        str(use.hits),
        str(use.references),
        _size(use.info.size),
    )


def _build_row(info: BuildInfo, now: float) -> tuple[str, ...]:
    return (
        info.id,
        info.provider,
        info.source or "-",
        _age(now - info.created_at),
        _age(now - info.last_used),
        str(len(info.used_by)),
        _size(info.size),
    )


def _show_pruned(done: dict[str, Pruned], problems: dict[str, str], verb: str, runs: dict[str, str]) -> None:
    now = time.time()
    count = 0
    for name, pruned in done.items():
        for info in pruned.sandboxes:
            run = info.labels.get("run", "-")
            click.echo(f"{verb} sandbox {info.id} of run {runs.get(run, run)}: its owner is dead")
        for use in pruned.snapshots:
            what = use.info.labels.get("environment", "-")
            click.echo(f"{verb} {name} snapshot {use.info.id} ({what}): last used {_age(now - use.last_used)} ago")
        for build in pruned.builds:
            ago = _age(now - build.last_used)
            click.echo(f"{verb} {name} image {build.id} (built from {build.source or '-'}): last used {ago} ago")
        if pruned.half_made:
            click.echo(f"{verb} {pruned.half_made} half-made things of {name}")
        count += len(pruned.sandboxes) + len(pruned.snapshots) + len(pruned.builds) + pruned.half_made
    if not count:
        click.echo(f"nothing to remove ({', '.join(done) or 'no sandbox could be asked'})")
    _show_problems(problems)


def _show_problems(problems: dict[str, str]) -> None:
    from rl_harness.excerpts import printable_lines

    for name, problem in problems.items():
        click.echo(printable_lines(f"note: {name} could not be asked: {problem}"), err=True)


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f}{unit}"
    return f"{max(seconds, 0):.0f}s"


def _size(size: int | None) -> str:
    if size is None:
        return "-"
    if size < 1 << 10:
        return f"{size} B"
    return f"{size / (1 << 20):.1f} MiB" if size >= 1 << 20 else f"{size / (1 << 10):.1f} KiB"
