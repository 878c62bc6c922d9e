"""What a killed process leaves at Modal is found by its tags and removed by the next one."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys

import pytest
from rl_harness.contracts.sandbox import SandboxSpec
from rl_harness_modal.provider import ModalProvider

pytestmark = pytest.mark.needs("userns", "modal")

CLIENT = """
import asyncio, itertools
from rl_harness.contracts.sandbox import SandboxSpec
from rl_harness_modal.provider import ModalProvider

async def main():
    provider = ModalProvider(ModalProvider.Options())
    await provider.preflight()
    print("ready", flush=True)

    async def one(number):
        for turn in itertools.count():
            sandbox = await provider.create(SandboxSpec(labels={"run": "killed", "episode": f"{number}:{turn}"}))
            await sandbox.exec("echo work > file", timeout=60)
            await sandbox.close()

    await asyncio.gather(*map(one, range(4)))

asyncio.run(main())
"""


def client() -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", CLIENT], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


async def test_a_client_killed_at_any_moment_leaves_nothing_behind(provider: ModalProvider, stand_in) -> None:
    generator = random.Random(0)
    alive = await provider.create(SandboxSpec(labels={"run": "killed", "episode": "of the living"}))
    clients = [client() for _ in range(2)]
    for process in clients:
        await asyncio.sleep(generator.uniform(0.02, 0.5))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    left, reaped = stand_in.running(), 0
    async with asyncio.timeout(30):
        while len(stand_in.running()) > 1:  # what was asked for before the kill may appear after it
            reaped += await provider.reap({"run": "killed"})
    assert reaped >= len(left) - 1
    assert [found["id"] for found in stand_in.running()] == [alive.id]
    assert (await alive.exec("echo fine")).stdout == b"fine\n"
    assert [info.id for info in await provider.list({"run": "killed"})] == [alive.id]


async def test_another_machines_sandboxes_are_left_alone(
    provider: ModalProvider, stand_in, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_harness_modal.provider.owner_label", lambda: "0123456789abcdef-1-0123456789abcdef")
    sandbox = await provider.create(SandboxSpec(labels={"run": "elsewhere"}))
    assert [info.owner_alive for info in await provider.list({"run": "elsewhere"})] == [None]
    assert await provider.reap() == 0
    assert await sandbox.alive()
    assert await provider.reap(force=True) == 1


async def test_listing_goes_across_pages_and_keeps_to_its_labels(provider: ModalProvider, stand_in) -> None:
    stand_in.ask("page", size=2)
    labels = [{"run": "pages", "episode": f"e/{number}: é {'x' * 200}"} for number in range(5)]
    made = await asyncio.gather(*(provider.create(SandboxSpec(labels=each)) for each in labels))
    other = await provider.create(SandboxSpec(labels={"run": "other"}))
    found = {info.id: dict(info.labels) for info in await provider.list({"run": "pages"})}
    assert found == {sandbox.id: each for sandbox, each in zip(made, labels, strict=True)}
    assert [info.id for info in await provider.list(labels[3])] == [made[3].id]
    assert await provider.reap({"run": "pages"}, force=True) == 5
    assert [info.id for info in await provider.list()] == [other.id]


async def test_a_sandbox_is_found_again_by_another_process(provider: ModalProvider, stand_in) -> None:
    spec = SandboxSpec(labels={"run": "again"})
    sandbox = await provider.create(spec)
    await sandbox.write_file("/app/file", b"kept")
    other = ModalProvider(ModalProvider.Options())
    found = await other.connect(sandbox.id)
    assert (await found.exec("cat file")).stdout == b"kept"
    await found.close()
    assert not await sandbox.alive()
    await other.close()
