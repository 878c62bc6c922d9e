"""Entry point of ``rl-harness``: finds the command, and turns every error into a message and an exit code.

Exit codes: 0 done, 1 the run failed, 2 usage, 130 interrupted.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import TypeVar

import click

from rl_harness import __version__
from rl_harness.cli.lazy import LazyGroup

E = TypeVar("E", bound=BaseException)

INTERRUPTED = 130

#: Failures of the machine rather than of this program: told without pointing at a traceback.
_MACHINE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EADDRINUSE, errno.EMFILE}


@click.group(
    cls=LazyGroup,
    commands_at={
        "run": ("rl_harness.cli.run:run", "Evaluate an agent on tasks, or train the model behind it."),
        "serve": ("rl_harness.cli.serve:serve", "Serve a model to live assistants, and train it on their rewards."),
        "reward": ("rl_harness.cli.reward:reward", "Reward what a live assistant did."),
        "tasks": ("rl_harness.cli.tasks:tasks", "Make, check and list tasks and benchmarks."),
        "plugins": ("rl_harness.cli.plugins:plugins", "List, show and check plugins."),
        "runs": ("rl_harness.cli.runs:runs", "List, show and compare runs."),
        "sandbox": ("rl_harness.cli.sandbox:sandbox", "List and prune sandboxes, prepare environments ahead."),
        "bench": ("rl_harness.cli.sandbox:bench", "Prepare a benchmark's environments ahead."),
        "config": ("rl_harness.cli.config:config", "Show the configuration and where each value comes from."),
        "doctor": ("rl_harness.cli.doctor:doctor", "Check what works on this machine, with remedies."),
    },
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="rl-harness")
@click.option("--debug", is_flag=True, help="Show tracebacks. May also be given after the command.")
@click.pass_context
def cli(context: click.Context, debug: bool) -> None:
    """Measure an agent on your own repeated work, then train the model behind it."""
    context.obj["debug"] = debug


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    if sys.platform == "win32":
        click.echo("rl-harness does not run on native Windows; use it inside WSL 2.", err=True)
        return 2
    _open_closed_streams()
    try:
        os.getcwd()  # noqa: PTH109 - without loading pathlib
    except FileNotFoundError:
        click.echo("error: the working directory no longer exists\n  remedy: cd to one that does", err=True)
        return 2
    state: dict[str, bool] = {}
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments), state)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if state.get("debug"):
            raise
        return _report(error)


def _open_closed_streams() -> None:
    """Python has no stream where the shell closed one (``>&-``), and what is opened next would take its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            mode = os.O_RDONLY if number == 0 else os.O_WRONLY
            opened = os.open(os.devnull, mode)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))


def _run(arguments: list[str], state: dict[str, bool]) -> int:
    """``state`` is the context object of every command; ``--debug`` sets its ``debug``."""
    try:
        result = cli.main(
            arguments, prog_name="rl-harness", standalone_mode=False, obj=state, terminal_width=_terminal_width()
        )
    except click.Abort:
        return INTERRUPTED
    except click.ClickException as error:
        error.show()
        return error.exit_code
    return result if isinstance(result, int) else 0


def _terminal_width() -> int:
    """As wide as the terminal, within reason. Left to click, this imports shutil: a fifteenth of the start-up."""
    try:
        columns = int(os.environ.get("COLUMNS", "0")) or os.get_terminal_size().columns
    except (OSError, ValueError):
        columns = 80
    return max(50, min(columns, 110) - 2)


def _report(error: Exception) -> int:
    from rl_harness.errors import RlHarnessError

    ours = _first(error, RlHarnessError)
    if ours is not None:
        from rl_harness.excerpts import printable_lines

        click.echo(printable_lines(f"error: {ours}"), err=True)  # may quote what a task's programs printed
        return ours.exit_code
    if isinstance(error, OSError) and error.errno in _MACHINE_ERRORS:
        from pathlib import Path

        from rl_harness.shortages import shortage

        folder = Path(error.filename).parent if isinstance(error.filename, str) else "the folder"
        short = shortage(error.errno, folder, "use another folder (-o runs_dir=DIR, TMPDIR, XDG_CACHE_HOME)")
        click.echo(f"error: {error}" + (f"\n  remedy: {short.what}: {short.remedy}" if short else ""), err=True)
        return 1
    from rl_harness.excerpts import printable

    text = printable(" ".join(str(error).split()))
    click.echo(f"error: unexpected {type(error).__name__}: {text}\n  traceback: {_save_traceback(error)}", err=True)
    return 1


def _first(error: BaseException, kind: type[E]) -> E | None:
    """``error`` itself, or the first of that kind inside the group that concurrent tasks failed as."""
    if isinstance(error, BaseExceptionGroup):
        return next((found for inner in error.exceptions if (found := _first(inner, kind)) is not None), None)
    return error if isinstance(error, kind) else None


def _save_traceback(error: Exception) -> str:
    import tempfile
    import traceback

    try:
        with tempfile.NamedTemporaryFile("w", prefix="rl-harness-", suffix=".log", delete=False) as log:
            log.writelines(traceback.format_exception(error))
    except OSError:
        return "run again with --debug"
    return f"{log.name} (or run again with --debug)"
