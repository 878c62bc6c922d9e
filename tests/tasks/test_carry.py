"""What is carried between sandboxes never stays on this machine."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from rl_harness.tasks.carry import remove_tree


def test_removing_goes_further_than_python_does(tmp_path: Path) -> None:
    at = os.open(tmp_path, os.O_RDONLY)
    for name in ["top", *["folder"] * 1100]:
        os.mkdir(name, dir_fd=at)
        below = os.open(name, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    with pytest.raises(RecursionError):
        shutil.rmtree(tmp_path / "top")
    remove_tree(tmp_path / "top")
    assert not (tmp_path / "top").exists()
