"""Builds a set of task directories into the cache once, keyed by what determines its content, safely against other
processes doing the same and against being killed half-way.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rl_harness.tasks.digest import digest_directory


def content_key(*sources: Path, options: Mapping[str, Any] | None = None) -> str:
    """A short key over files and directories that generated tasks depend on, and over options."""
    total = hashlib.sha256(json.dumps(dict(options or {}), sort_keys=True, default=str).encode())
    for source in sources:
        total.update(digest_directory(source).encode() if source.is_dir() else source.read_bytes())
    return total.hexdigest()[:20]


def build_once(folder: Path, write: Callable[[Path], None]) -> list[Path]:
    """The task directories in ``folder``, sorted, after ``write`` filled it if it was not there.

    It is filled under another name and renamed, so it is whole when it exists; of several processes that build at
    once, the first to finish wins and the others use its work.
    """
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            write(unfinished)
            unfinished.chmod(0o755)
            os.rename(unfinished, folder)  # noqa: PTH104 - Path.rename would do the same; atomicity is the point
        except OSError:
            if not folder.is_dir():
                raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return sorted(path for path in folder.iterdir() if path.is_dir())
