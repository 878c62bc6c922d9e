"""A disk that fills up: an error that says where and what to do, nothing damaged, and the run goes on afterwards."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys

import pytest
from rl_harness.errors import RunError
from rl_harness.runs import open_run, read_info
from rl_harness.testing.records import a_conversation, an_episode


def test_a_full_disk_is_an_error_with_a_remedy_and_the_run_resumes(config, child):
    """The operating system refuses to let any file grow further, here by a limit on the process."""

    def body(say):
        async def fill(run):
            for number in range(10_000):
                try:
                    await run.store.add_episode(an_episode(f"task-{number}"), a_conversation(4, new_tokens=200))
                except RunError as error:
                    say(f"error {str(error).splitlines()}")
                    return
                say(f"{number}")

        with open_run(config, {}) as run:
            limit = 300_000
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
            asyncio.run(fill(run))
            say("closing")
            run.close("failed")
        say("closed")

    process = child(body)
    assert process.wait() == 0
    *numbers, error, closing, closed = process.rest()
    assert len(numbers) > 5
    assert (closing, closed) == ("closing", "closed")
    assert "db.sqlite" in error
    assert "free some space" in error
    _resumes_with(config, [f"task-{number}" for number in numbers])


def _resumes_with(config, tasks):
    with open_run(config, {}) as run:
        assert run.resumed
        stored = [episode.key.task for episode in run.store.episodes()]
        assert set(tasks) <= set(stored)
        assert len(stored) == len(set(stored))
        asyncio.run(run.store.add_episode(an_episode("one more"), a_conversation()))
        run.close("done")
    assert read_info(run.path).status == "done"


_ON_A_SMALL_DISK = """
import asyncio, subprocess, sys
from pathlib import Path
from rl_harness.errors import RunError
from rl_harness.runs import open_run, read_info
from rl_harness.runs.config import RunConfig
from rl_harness.testing.records import a_conversation, an_episode

disk = Path(sys.argv[1])
config = RunConfig(runs_dir=disk / "runs", benchmark="bench", model="model")

async def fill(run):
    added = 0
    while True:
        try:
            await run.store.add_episode(an_episode(f"task-{added}"), a_conversation(4, new_tokens=200))
        except RunError as error:
            return added, error
        added += 1

async def main():
    with open_run(config, {}) as run:
        added, error = await fill(run)
        assert added > 5
        assert "db.sqlite: no space left" in str(error), error
        assert "free some space" in str(error)
        try:
            run.store.set_state("still", "full")
            run.log.info("x" * 100_000)
        except RunError:
            pass
        run.close("failed")
    for fresh in (False, True):
        try:
            open_run(config, {}, fresh=fresh).close("interrupted")
        except RunError as error:
            assert "no space left" in str(error) or "could not be read or written" in str(error), error
    (disk / "ballast").unlink()
    assert [path.name for path in (disk / "runs").iterdir() if path.name.startswith(".new-")] == []
    with open_run(config, {}) as run:
        assert run.resumed
        assert len(run.store.episodes()) == added
        again, _ = await fill(run)
        run.close("interrupted")
    print("added", added, "kept")

asyncio.run(main())
"""


@pytest.mark.needs("userns")
def test_a_real_full_disk(tmp_path):
    """A file system of 2 MB of its own, in a mount namespace that ends with the process."""
    script = tmp_path / "fill.py"
    script.write_text(_ON_A_SMALL_DISK)
    disk = tmp_path / "disk"
    disk.mkdir()
    shell = 'mount -t tmpfs -o size=2m none "$1" && head -c 700000 /dev/zero > "$1/ballast" && exec "$2" "$3" "$1"'
    result = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", shell, "sh", disk, sys.executable, script],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONWARNINGS": "error::ResourceWarning"},
    )
    assert result.returncode == 0, result.stderr
    assert "kept" in result.stdout
    assert "Traceback" not in result.stderr
