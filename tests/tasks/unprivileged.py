"""Grades attempts as uid 65534: ``python unprivileged.py FOLDER TASK AGENT...`` prints a JSON line an agent script.

Started as root in a process of its own, like ``tests/sandboxes/unprivileged.py``, whose way out of root it takes.
"""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import site
import sys
from pathlib import Path

from rl_harness.sandboxes.local import LocalProvider
from rl_harness.tasks import load_task, verify

LABELS = {"run": "test"}


async def run(folder: Path, directory: Path, agents: list[str]) -> None:
    provider = LocalProvider(LocalProvider.Options(state_dir=folder / "state"))
    task = load_task(directory)
    for agent in agents:
        sandbox = await provider.create(task.sandbox_spec(LABELS))
        await sandbox.exec(agent, timeout=20)
        verdict = await verify(task, sandbox, provider, None, LABELS)
        await sandbox.close()
        outcome = {"reward": verdict.reward, "unscored": verdict.unscored, "flags": verdict.flags}
        print(json.dumps({**outcome, "detail": verdict.detail, "output": verdict.output}), flush=True)
    await provider.close()


def main() -> None:
    folder, directory = Path(sys.argv[1]), Path(sys.argv[2])
    sandboxes = runpy.run_path(str(Path(__file__).parents[1] / "sandboxes" / "unprivileged.py"))
    nobody = sandboxes["NOBODY"]
    packages = [Path(path) for path in {*sys.path, *site.getsitepackages()} if Path(path).is_dir()]
    interpreter = [Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).resolve().parent]
    os.chown(folder, nobody, nobody)
    sandboxes["expose"]([*packages, *interpreter, folder, directory])
    os.setgroups([])
    os.setresgid(nobody, nobody, nobody)
    os.setresuid(nobody, nobody, nobody)
    os.environ["TMPDIR"] = str(folder)
    os.chdir("/")
    asyncio.run(run(folder, directory, sys.argv[3:]))


if __name__ == "__main__":
    main()
