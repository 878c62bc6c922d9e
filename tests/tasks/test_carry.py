"""What is carried between sandboxes never stays on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
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


def test_what_a_killed_process_carried_is_gone_after_the_next_one(tmp_path: Path) -> None:
    """And what a living one carries stays."""
    make = """
import os, signal, sys
from rl_harness.tasks import carry
folder, lock = carry._make_folder()
(folder / "0").mkdir()
(folder / "0" / "answer.txt").write_text("hostile")
print(folder, flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""

    def start() -> subprocess.Popen[str]:
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        return subprocess.Popen(
            [sys.executable, "-c", make], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    folders = []
    with start() as first:
        assert first.stdout is not None
        folders.append(Path(first.stdout.readline().strip()))
        with start() as second:
            assert second.stdout is not None
            folders.append(Path(second.stdout.readline().strip()))
            assert sorted(tmp_path.iterdir()) == sorted(folders)
            second.communicate("\n")
        assert second.returncode == -9
        assert folders[1].exists()
        with start() as third:
            assert third.stdout is not None
            folders.append(Path(third.stdout.readline().strip()))
            assert sorted(tmp_path.iterdir()) == sorted([folders[0], folders[2]])
            third.communicate("\n")
        first.communicate("\n")
