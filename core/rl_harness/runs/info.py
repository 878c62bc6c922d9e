"""What a run says about itself in ``run.json`` and ``config.json``, and finding runs on disk. Reading only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from rl_harness.errors import RunError
from rl_harness.locks import is_held
from rl_harness.runs.config import NOT_IN_DIGEST, RunConfig
from rl_harness.runs.files import explain, write_whole

INFO = "run.json"
CONFIG = "config.json"
DATABASE = "db.sqlite"
LOG = "run.log"
LOCK = "lock"

#: The digest input that says which job a run is, and its value for serving; without it a run evaluates or trains.
JOB, SERVE = "job", "serve"
#: The key of the store's state that has the folder of the model's tokenizer.
MODEL_FOLDER = "model_folder"
#: The phase of the store's metrics that has what sandboxes cost, one step for each process of the run.
SANDBOXES = "sandboxes"


class Status(StrEnum):
    """``running`` on disk without a live process means that the run was killed: it shows as interrupted."""

    RUNNING = "running"
    DONE = "done"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """``run.json``. Times are seconds since the epoch.

    ``name`` is what was asked for; the directory may have a number behind it. ``inputs`` are the digest inputs:
    which tasks, model and plugins, exactly. ``starts`` has an entry for the start and one for each resumption.
    """

    id: str
    name: str
    digest: str
    status: Status
    pid: int
    host: str
    starts: tuple[float, ...]
    ended_at: float | None = None
    versions: dict[str, str] = {}
    inputs: dict[str, Any] = {}

    def write(self, directory: Path) -> None:
        write_whole(directory / INFO, msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")


def read_info(directory: Path) -> RunInfo:
    """The ``run.json`` of a run directory, with the status it really has. RunError if there is none, or damage."""
    path = directory / INFO
    if path.exists() and not path.is_file():  # a pipe would be waited for without end
        raise RunError(f"{path}: not a regular file", remedy="move the directory away")
    try:
        info = msgspec.json.decode(path.read_bytes(), type=RunInfo)
        if not info.starts:
            raise msgspec.ValidationError("it was never started")
    except FileNotFoundError:
        raise RunError(
            f"{directory}: not a run directory (it has no {INFO})",
            remedy="give the directory of a run, or choose another --name",
        ) from None
    except OSError as error:
        raise explain(path, error) from error
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise RunError(
            f"{path}: damaged, or not written by rl-harness ({error})",
            remedy="start a new run with --fresh, or move the directory away",
        ) from error
    if info.status is Status.RUNNING and not is_held(directory / LOCK):
        info = msgspec.structs.replace(info, status=Status.INTERRUPTED)
    return info


def read_config(directory: Path) -> dict[str, Any]:
    """The resolved configuration of a run, as plain data."""
    path = directory / CONFIG
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise explain(path, error) from error
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise RunError(f"{path}: damaged ({error})", remedy="start a new run with --fresh") from error


def find_runs(runs_dir: Path) -> Iterator[tuple[Path, RunInfo | RunError]]:
    """Every run in ``runs_dir``, oldest first, or what is wrong with it; directories that are not runs are passed over.

    A run whose beginning is not known, being damaged, stands where its directory last changed.
    """
    found: list[tuple[float, str, Path, RunInfo | RunError]] = []
    for directory in runs_dir.iterdir() if runs_dir.is_dir() else ():
        if directory.name.startswith(".") or not any((directory / file).exists() for file in (INFO, DATABASE)):
            continue
        try:
            info = read_info(directory)
            found.append((info.starts[0], directory.name, directory, info))
        except RunError as error:
            found.append((directory.stat().st_mtime, directory.name, directory, error))
    for _, _, directory, what in sorted(found, key=lambda run: run[:2]):
        yield directory, what


def identity(config: RunConfig, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What makes a run the same run: the resolved configuration without the keys that change only how it is
    carried out or shown, and the digest inputs. Plain data, as it reads back from JSON."""
    return plain({"config": _measuring(config.model_dump(mode="json")), "inputs": dict(inputs)})


def stored_identity(directory: Path, info: RunInfo) -> dict[str, Any]:
    return {"config": _measuring(read_config(directory)), "inputs": info.inputs}


def _measuring(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in NOT_IN_DIGEST}


def digest_of(what: Mapping[str, Any]) -> str:
    return "sha256:" + hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """JSON-compatible data: paths and other objects by their text, tuples as lists."""
    loaded: dict[str, Any] = json.loads(json.dumps(value, sort_keys=True, default=str))
    return loaded


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted key to (value there, value here) wherever the two differ; a missing key has the value None."""
    left, right = dict(_leaves("", there)), dict(_leaves("", here))
    return {key: (left.get(key), right.get(key)) for key in sorted(left | right) if left.get(key) != right.get(key)}


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(f"{prefix}.{key}" if prefix else str(key), inner)
    else:
        yield prefix, value
