"""What makes one prepared environment another: its key, and whether preparing it once is worth a snapshot."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rl_harness.contracts.sandbox import EnvironmentSpec
from rl_harness.digests import digest_directory

#: A workspace beyond either of these is worth a snapshot even without set-up steps; a smaller one is copied as fast.
LARGE_BYTES = 1 << 20
LARGE_FILES = 100
#: Changes whenever the way environments are prepared does, so that no older snapshot is taken for a newer one.
_FORMAT = 2


def environment_key(environment: EnvironmentSpec, identity: str, fingerprint: Mapping[str, str]) -> str:
    """SHA-256 in hex of everything that decides the content of the prepared environment, and of nothing else.

    ``identity`` names the provider and its version, ``fingerprint`` is
    :meth:`~rl_harness.contracts.SandboxProvider.fingerprint`'s. Where the directory lies, times, timeouts and the names
    of steps do not count. Blocking: reads every file of the environment's directory.
    """
    facts: dict[str, Any] = {
        "format": _FORMAT,
        "provider": identity,
        "fingerprint": dict(fingerprint),
        "directory": digest_directory(environment.directory, modes=True) if environment.directory else None,
        "dockerfile": _file(environment.dockerfile, environment.directory),
        "compose": _file(environment.compose, environment.directory),
        "image": environment.image,
        "workdir": environment.workdir,
        "env": dict(environment.env),
        "setup": [{"script": step.script, "env": dict(step.env)} for step in environment.setup],
    }
    return hashlib.sha256(msgspec.json.encode(facts, order="deterministic")).hexdigest()


def _file(path: Path | None, directory: Path | None) -> tuple[str, str] | None:
    """Where the file lies as its directory sees it, and what is in it."""
    if path is None:
        return None
    name = path.name
    if directory is not None and path.is_relative_to(directory):
        name = path.relative_to(directory).as_posix()
    return name, hashlib.sha256(path.read_bytes()).hexdigest()


def pays(environment: EnvironmentSpec) -> bool:
    """Whether starting from a snapshot beats starting plainly: there are set-up steps, or a workspace large enough.

    An image alone does not: the provider keeps it itself. Blocking: lists the workspace.
    """
    return bool(environment.setup) or (environment.directory is not None and _is_large(environment.directory))


def has_image(environment: EnvironmentSpec) -> bool:
    """Whether the provider pulls or builds something before the first sandbox starts."""
    return bool(environment.image or environment.dockerfile or environment.compose)


def _is_large(directory: Path) -> bool:
    files = size = 0
    for folder, _, names in os.walk(directory / "workspace"):
        for name in names:
            files += 1
            size += os.lstat(os.path.join(folder, name)).st_size  # noqa: PTH118 - in a hot loop
            if files > LARGE_FILES or size > LARGE_BYTES:
                return True
    return False
