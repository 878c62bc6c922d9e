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


@pytest.mark.needs("userns")
@pytest.mark.needs("root")
@pytest.mark.parametrize("full", ["from the start", "by what the agent made"])
def test_a_full_folder_for_artifacts_is_no_grade_and_names_the_folder(tmp_path: Path, full: str) -> None:
    """It scored 0, as if the agent had left something that is refused."""
    code = f"""
import asyncio, os
from pathlib import Path
from rl_harness.contracts import SandboxSpec
from rl_harness.sandboxes.local import LocalProvider, syscalls as sc
from rl_harness.tasks import load_task, verify
from rl_harness.tasks.new import new_task
task = load_task(new_task(Path({str(tmp_path)!r}), "job"))
small = Path({str(tmp_path)!r}) / "small"
small.mkdir()
sc.unshare(sc.CLONE_NEWNS)
sc.mount(None, "/", None, sc.MS_REC | sc.MS_PRIVATE)
sc.mount("small", str(small), "tmpfs", 0, "size=256k")
os.environ["TMPDIR"] = str(small)

async def main():
    provider = LocalProvider(LocalProvider.Options(state_dir=Path({str(tmp_path)!r}) / "state"))
    sandbox = await provider.create(task.sandbox_spec({{}}))
    await sandbox.exec("head -c 1000000 /dev/zero > answer.txt")
    if {full!r} == "from the start":
        (small / "filler").write_bytes(bytes(200_000))
        (small / "more").write_bytes(bytes(4096))
    verdict = await verify(task, sandbox, provider, None, {{}})
    print(verdict.reward, verdict.unscored.value, verdict.detail)
    print(sorted(path.name for path in small.iterdir() if path.name.startswith("rl-harness-artifacts")))
    await provider.close()

asyncio.run(main())
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    said = child.stdout.splitlines()
    assert said[0].startswith("None sandbox_error what the agent made cannot be kept for its verifier: no space"), child
    assert str(tmp_path / "small") in said[0]
    assert "set TMPDIR to another folder" in said[1]
    assert said[-1] == "[]"
