"""Jobs run on the event loop that this system has best, with the collector set for it, and end as they would on any."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import asyncio, gc, sys
from rl_harness.jobs.loop import run
async def main():
    return type(asyncio.get_running_loop()).__module__, gc.get_threshold()[0], gc.get_freeze_count() > 0
print(*run(main()))
"""


@pytest.mark.parametrize("there", [True, False])
def test_a_job_runs_with_and_without_uvloop(there: bool) -> None:
    before = "" if there else "import sys; sys.modules['uvloop'] = None\n"
    done = subprocess.run([sys.executable, "-c", before + SCRIPT], capture_output=True, text=True, check=True)
    loop, threshold, frozen = done.stdout.split()
    assert loop.startswith("uvloop" if there else "asyncio")
    assert (int(threshold), frozen) == (10_000, "True")


def test_what_a_job_raises_is_raised() -> None:
    code = "async def main():\n    raise OSError('no more')\nfrom rl_harness.jobs.loop import run\nrun(main())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "OSError: no more" in done.stderr
