"""Makes installed distributions out of text: a module and its metadata in a directory on ``sys.path``."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Install = Callable[..., None]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of installed packages, first on the path."""
    directory = tmp_path / "site"
    directory.mkdir()
    monkeypatch.syspath_prepend(str(directory))
    return directory


@pytest.fixture
def install(site: Path) -> Iterator[Install]:
    """``install("acme-boxes", module_source, version="1.2")`` puts a plugin distribution into ``site``."""
    modules: list[str] = []

    def put(distribution: str, source: str, *, version: str = "1.0", module: str | None = None) -> None:
        module = module or distribution.replace("-", "_")
        modules.append(module)
        (site / f"{module}.py").write_text(textwrap.dedent(source))
        info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[console_scripts]\nx = y:z\n\n[rl_harness]\nmain = {module}\n")

    yield put
    for module in modules:
        sys.modules.pop(module, None)
