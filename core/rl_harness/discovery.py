"""Finds the plugin entry points of installed distributions by scanning ``sys.path`` for ``entry_points.txt``.

It reads nothing but those files and directory names (``importlib.metadata`` alone costs more than the whole
command line) and imports no plugin: what the entry points mean is :mod:`rl_harness.plugins`' business.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

GROUP = "rl_harness"


class EntryPoint(NamedTuple):
    """One line of a group: ``target`` is ``module`` or ``module:attr``; ``version`` is that of the distribution."""

    name: str
    target: str
    distribution: str
    version: str


def canonical(distribution: str) -> str:
    """A distribution's name as the packaging specifications normalise it."""
    parts = distribution.lower().replace("_", "-").replace(".", "-").split("-")
    return "-".join(part for part in parts if part)


def entry_points(path: Iterable[str] | None = None, group: str = GROUP) -> list[EntryPoint]:
    """Every entry point of ``group`` installed on ``path``, ordered by distribution.

    Of a distribution found twice the first on the path counts, as it does for imports. Zipped path entries hold
    no plugins.
    """
    seen: set[str] = set()
    found: list[EntryPoint] = []
    for directory in dict.fromkeys(sys.path if path is None else path):
        for info in _metadata_directories(directory or "."):
            distribution, version = _identity(info)
            if distribution in seen:
                continue
            seen.add(distribution)
            try:
                text = Path(info.path, "entry_points.txt").read_text("utf-8", "replace")
            except OSError:
                continue
            found += (EntryPoint(name, target, distribution, version) for name, target in _group(text, group))
    return sorted(found, key=lambda point: (point.distribution, point.name))


def _metadata_directories(directory: str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            yield from (entry for entry in entries if entry.name.endswith((".dist-info", ".egg-info")))
    except OSError:
        return


def _identity(info: os.DirEntry[str]) -> tuple[str, str]:
    """Name and version from ``NAME-VERSION.dist-info``; a bare ``NAME.egg-info`` keeps its version in a file."""
    stem = info.name.rpartition(".")[0]
    name, _, version = stem.partition("-")
    if not version:
        version = _version_in(Path(info.path, "PKG-INFO")) or _version_in(Path(info.path, "METADATA")) or "unknown"
    return canonical(name), version.partition("-py")[0]


def _version_in(file: Path) -> str | None:
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("Version:"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return None


def _group(text: str, group: str) -> Iterator[tuple[str, str]]:
    """The ``name = target`` lines of one section of an ini file; an extra in brackets is dropped."""
    inside = False
    for raw in text.splitlines():
        line = raw.strip()
        if line.startswith("["):
            inside = line == f"[{group}]"
        elif inside and "=" in line and not line.startswith(("#", ";")):
            name, _, target = line.partition("=")
            yield name.strip(), target.partition("[")[0].strip()
