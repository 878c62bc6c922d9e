"""Opening a run: a new directory, or the interrupted one of the same configuration; never one that is live.

``runs/NAME/`` holds ``run.json`` and ``config.json`` (what the run is), ``db.sqlite`` (what happened), ``run.log``,
``checkpoints/``, ``plots/`` and ``lock``. A later run of a name that is taken gets a number: ``NAME-2``.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import secrets
import shutil
import socket
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from rl_harness import __version__
from rl_harness.errors import RunError, UsageError
from rl_harness.locks import Lock, holder
from rl_harness.runs.checkpoints import Checkpoints
from rl_harness.runs.config import RunConfig
from rl_harness.runs.files import explain, write_whole
from rl_harness.runs.info import (
    CONFIG,
    DATABASE,
    LOCK,
    LOG,
    RunInfo,
    Status,
    differences,
    digest_of,
    identity,
    plain,
    read_info,
    stored_identity,
)
from rl_harness.runs.logs import LogFile
from rl_harness.runs.store import RunStore

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_HALF_MADE = ".new-"
#: Seconds to wait for a lock that somebody holds only for a moment.
_PATIENCE = 0.2
_OPENING_PATIENCE = 30.0


class Run:
    """An open run, locked by this process until :meth:`close` or death.

    ``resumed`` says that it continues an interrupted one; ``id`` stays the same then, so what that left behind
    (sandboxes are labelled with it) can be found and reaped.
    """

    def __init__(self, path: Path, info: RunInfo, config: RunConfig, lock: Lock, *, resumed: bool) -> None:
        self.path = path
        self.info = info
        self.config = config
        self.resumed = resumed
        self._lock = lock
        self._log_file = LogFile(path / LOG)
        #: Writes to ``run.log``, as does every logger below ``rl_harness`` while the run is open.
        self.log: logging.Logger = self._log_file.logger
        try:
            self.store = RunStore(path / DATABASE)
        except BaseException:
            self._log_file.close()
            raise
        self.checkpoints = Checkpoints(path / "checkpoints", self.store)

    @property
    def id(self) -> str:
        return self.info.id

    @property
    def log_path(self) -> Path:
        return self.path / LOG

    @property
    def plots(self) -> Path:
        """The directory for plots, made on first use."""
        directory = self.path / "plots"
        directory.mkdir(exist_ok=True)
        return directory

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close a run that nobody closed: interrupted, or failed with the traceback in the log."""
        if self.info.status is not Status.RUNNING:
            return
        failed = isinstance(error, Exception)
        if failed:
            self.log.error("failed", exc_info=error)
        self.close(Status.FAILED if failed else Status.INTERRUPTED)

    def close(self, status: str) -> None:
        """Commit, record the outcome (``done``, ``interrupted`` or ``failed``), unlock. Safe to repeat.

        Only a done run is not continued by the same command. On a full disk the outcome cannot be recorded;
        the run then reads as interrupted, which is right.
        """
        ended = Status(status)
        if ended is Status.RUNNING:
            raise ValueError("a closed run is not running")
        if self.info.status is not Status.RUNNING:
            return
        self.info = msgspec.structs.replace(self.info, status=ended, ended_at=time.time())
        try:
            self.store.close()
            self.info.write(self.path)
        except OSError as error:
            self.log.warning("the run's outcome could not be recorded: %s", error)
        finally:
            self.log.info("%s", ended.value)
            self._log_file.close()
            self._lock.release()


def open_run(
    config: RunConfig, digest_inputs: Mapping[str, Any], *, fresh: bool = False, default: str | None = None
) -> Run:
    """Create the run of ``config``, or resume it when the newest run of its name and digest was interrupted.

    ``digest_inputs``: what the configuration only names, exactly (task digests, plugin versions, the model's
    identity). ``fresh`` always creates. ``default`` is the name where the configuration has none. Raises
    :class:`~rl_harness.errors.RunError` when that run is live, when a run named by the user has another configuration,
    when a directory in the way is damaged or not a run.
    """
    name = config.name or default or default_name(config)
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"name: {name!r} cannot be a run's name",
            remedy="use letters, digits, '.', '_' and '-', starting with a letter or digit",
        )
    what = identity(config, digest_inputs)
    runs_dir = config.runs_dir
    try:
        with _opening(runs_dir):
            family = _family(runs_dir, name, skip_damaged=fresh)
            same = [(path, info) for path, info in family if info.digest == digest_of(what)]
            if fresh or not family or (not same and config.name is None):
                return _create(runs_dir, name, config, what)
            if not same:
                raise _another_configuration(*family[-1], what)
            path, info = same[-1]
            resumed = None if info.status is Status.DONE else _resume(path, config)
            return resumed or _create(runs_dir, name, config, what)
    except (OSError, sqlite3.Error) as error:
        raise explain(runs_dir, error) from error


def default_name(config: RunConfig) -> str:
    """From what is run, the model and the trainer: ``shell-arithmetic-smollm2-grpo``."""
    named = config.benchmark.name if config.benchmark else None
    what = config.tasks[0].name if config.tasks else named
    model = Path(config.model).name if config.model else None
    parts = [what or "tasks", model, config.trainer.name if config.trains else None]
    name = re.sub(r"[^A-Za-z0-9._]+", "-", "-".join(part for part in parts if part)).strip("-._")
    return name[:100] or "run"


@contextmanager
def _opening(runs_dir: Path) -> Iterator[None]:
    """One process at a time decides what to open, so that two equal commands cannot both create or resume."""
    runs_dir.mkdir(parents=True, exist_ok=True)
    lock = Lock(runs_dir / ".lock")
    if not lock.acquire(patience=_OPENING_PATIENCE):
        raise RunError(f"{runs_dir}: another process has been opening a run here for {_OPENING_PATIENCE:.0f} s")
    try:
        for half_made in runs_dir.glob(f"{_HALF_MADE}*"):
            shutil.rmtree(half_made)
        yield
    finally:
        lock.release()


def _family(runs_dir: Path, name: str, *, skip_damaged: bool) -> list[tuple[Path, RunInfo]]:
    """The runs of a name in the order of their numbers. Another name's ``NAME-2`` is not among them."""
    family = []
    for path in sorted((runs_dir / name, *runs_dir.glob(f"{name}-*")), key=lambda path: _number(path, name) or 0):
        number = _number(path, name)
        if number is None or not path.exists() or (path.is_dir() and not any(path.iterdir())):
            continue
        try:
            info = read_info(path)
        except RunError:
            if number > 1 or skip_damaged:
                continue
            raise
        if number == 1 or info.name == name:
            family.append((path, info))
    return family


def _number(path: Path, name: str) -> int | None:
    if path.name == name:
        return 1
    tail = path.name.removeprefix(f"{name}-")
    return int(tail) if tail.isascii() and tail.isdigit() and not tail.startswith("0") and int(tail) > 1 else None


def _free_path(runs_dir: Path, name: str) -> Path:
    numbers = [number for path in runs_dir.glob(f"{name}-*") if (number := _number(path, name)) is not None]
    first = runs_dir / name
    if not numbers and (not first.exists() or (first.is_dir() and not any(first.iterdir()))):
        return first
    return runs_dir / f"{name}-{max(numbers, default=1) + 1}"


def _create(runs_dir: Path, name: str, config: RunConfig, what: Mapping[str, Any]) -> Run:
    """Make the directory under a hidden name and rename it when it is complete and locked."""
    final = _free_path(runs_dir, name)
    path = runs_dir / f"{_HALF_MADE}{secrets.token_hex(4)}"
    path.mkdir()
    lock = Lock(path / LOCK)
    try:
        lock.acquire(patience=0)
        lock.sign()
        info = RunInfo(
            id=secrets.token_hex(6),
            name=name,
            digest=digest_of(what),
            status=Status.RUNNING,
            pid=os.getpid(),
            host=socket.gethostname(),
            starts=(time.time(),),
            versions=_versions(),
            inputs=what["inputs"],
        )
        write_whole(path / CONFIG, _pretty(config.model_dump(mode="json")))
        RunStore(path / DATABASE).close()
        info.write(path)
        path.rename(final)
        lock.path = final / LOCK
        return Run(final, info, config, lock, resumed=False)
    except BaseException:
        lock.release()
        shutil.rmtree(path, ignore_errors=True)
        raise


def _resume(path: Path, config: RunConfig) -> Run | None:
    """The run at ``path``, continued; None when it turns out to have been finished in this moment."""
    lock = Lock(path / LOCK)
    if not lock.acquire(patience=_PATIENCE):
        raise RunError(
            f"{path}: this run is live ({holder(path / LOCK)})",
            remedy="wait for it or stop it, or start another run of the same configuration with --fresh",
        )
    try:
        info = read_info(path)
        if info.status is Status.DONE:
            lock.release()
            return None
        if not (path / DATABASE).is_file():
            raise RunError(f"{path}: damaged ({DATABASE} is missing)", remedy="start a new run with --fresh")
        lock.sign()
        info = msgspec.structs.replace(
            info,
            status=Status.RUNNING,
            pid=os.getpid(),
            host=socket.gethostname(),
            starts=(*info.starts, time.time()),
            ended_at=None,
            versions=_versions(),
        )
        run = Run(path, info, config, lock, resumed=True)
        try:
            run.checkpoints.sweep()
            info.write(path)
            # Concurrency and the like may differ from last time.
            write_whole(path / CONFIG, _pretty(config.model_dump(mode="json")))
        except BaseException:
            run.close(Status.FAILED)
            raise
        return run
    except BaseException:
        lock.release()
        raise


def _another_configuration(path: Path, info: RunInfo, what: Mapping[str, Any]) -> RunError:
    different = differences(stored_identity(path, info), what)
    shown = [
        f"{key.removeprefix('config.')} ({there!r} there, {here!r} now)" for key, (there, here) in different.items()
    ]
    more = f", and {len(shown) - 6} more" if len(shown) > 6 else ""
    return RunError(
        f"{path}: holds a run of another configuration; different: {', '.join(shown[:6])}{more}",
        remedy="choose another --name, or start a numbered run beside it with --fresh",
    )


def _versions() -> dict[str, str]:
    return {"rl-harness": __version__, "python": platform.python_version(), "platform": platform.platform()}


def _pretty(value: Mapping[str, Any]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(plain(value)), indent=2) + b"\n"
