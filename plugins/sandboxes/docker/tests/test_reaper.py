"""Whatever is left when the client is killed at any moment is found by its label and removed."""

from __future__ import annotations

import asyncio
import pickle
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rl_harness.contracts import EnvironmentSpec, SandboxSpec
from rl_harness_docker.options import DockerOptions
from rl_harness_docker.provider import DockerProvider
from rl_harness_docker.testing import BASE_IMAGE

pytestmark = pytest.mark.needs("docker")

CLIENT = """
import asyncio, pickle, sys
from rl_harness_docker.provider import DockerProvider

async def main():
    options, spec = pickle.load(sys.stdin.buffer)
    provider = DockerProvider(options)
    print("begun", flush=True)
    while True:
        sandbox = await provider.create(spec)
        await sandbox.exec("echo x > x; (setsid sleep 600 &)")
        await sandbox.snapshot(labels={"run": spec.labels["run"]})
        forks = await sandbox.fork(2)
        await asyncio.gather(sandbox.close(), *(fork.close() for fork in forks[1:]))

asyncio.run(main())
"""


def killed_client(given: bytes, seconds: float) -> None:
    """Run a client for a while and kill it."""
    client = subprocess.Popen([sys.executable, "-c", CLIENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdin.write(given)
    client.stdin.close()
    client.stdout.readline()
    time.sleep(seconds)
    client.kill()
    client.wait()
    client.stdout.close()


@pytest.mark.parametrize("moment", range(3))
async def test_a_kill_at_any_moment(
    provider: DockerProvider, options: DockerOptions, engine: Any, tmp_path: Path, moment: int
) -> None:
    run = f"killed-{random.randbytes(4).hex()}"
    compose = tmp_path / "docker-compose.yaml"
    compose.write_text(f"services:\n  other: {{image: {BASE_IMAGE}, command: sleep 600}}\n")
    spec = SandboxSpec(labels={"run": run}, environment=EnvironmentSpec(directory=tmp_path, compose=compose))
    killed_client(pickle.dumps((options, spec)), seconds=random.uniform(0.0, 1.5) + moment)

    def left() -> list[str]:
        found = [each["Names"][0] for each in engine.containers(all=True) if run in str(each["Labels"])]
        found += [each["Name"] for each in engine.networks() if run in str(each["Labels"])]
        forks = engine.images(filters={"label": "rl-harness.kind=fork"})
        return found + [str(each["RepoTags"]) for each in forks if run in str(each["Labels"])]

    for _ in range(60):  # what the engine had begun when its client died may come late
        if not left():
            break
        await provider.reap({"run": run})
        await asyncio.sleep(0.2)
    assert left() == []
    for snapshot in await provider.snapshots({"run": run}):
        await provider.delete_snapshot(snapshot.id)
    assert not [image for image in engine.images() if run in str(image["Labels"])]


async def test_a_sandbox_ends_with_its_client(options: DockerOptions, engine: Any) -> None:
    """Before anybody reaps: the container runs only as long as somebody holds on to it."""
    provider = DockerProvider(options)
    sandbox = await provider.create(SandboxSpec())
    container = sandbox.container  # type: ignore[attr-defined]  # a DockerSandbox
    assert engine.inspect_container(container)["State"]["Running"]
    sandbox._lifeline.close()  # type: ignore[attr-defined]  # as the system does for a process that is gone
    await asyncio.to_thread(engine.wait, container, timeout=30)
    assert "has died" in await sandbox.died()
    await provider.close()
