"""What a killed process leaves at E2B is found by its metadata and removed by the next one."""

from __future__ import annotations

import asyncio

import pytest
from rl_harness.contracts.sandbox import SandboxSpec
from rl_harness_e2b import records
from rl_harness_e2b.provider import E2BProvider
from rl_harness_e2b.records import Records

pytestmark = pytest.mark.needs("userns", "e2b")


async def test_another_machines_sandboxes_are_left_alone(
    provider: E2BProvider, stand_in, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_harness_e2b.provider.owner_label", lambda: "0123456789abcdef-1-0123456789abcdef")
    sandbox = await provider.create(SandboxSpec(labels={"run": "elsewhere"}))
    assert [info.owner_alive for info in await provider.list({"run": "elsewhere"})] == [None]
    assert await provider.reap() == 0
    assert await sandbox.alive()
    assert await provider.reap(force=True) == 1


async def test_listing_goes_across_pages_and_keeps_to_its_labels(provider: E2BProvider, stand_in) -> None:
    stand_in.ask("page", size=2)
    labels = [{"run": "pages", "episode": f"e/{number}: é &=%+ {'x' * 200}"} for number in range(5)]
    made = await asyncio.gather(*(provider.create(SandboxSpec(labels=each)) for each in labels))
    other = await provider.create(SandboxSpec(labels={"run": "other"}))
    found = {info.id: dict(info.labels) for info in await provider.list({"run": "pages"})}
    assert found == {sandbox.id: each for sandbox, each in zip(made, labels, strict=True)}
    assert [info.id for info in await provider.list(labels[3])] == [made[3].id]
    assert await provider.reap({"run": "pages"}, force=True) == 5
    assert [info.id for info in await provider.list()] == [other.id]


async def test_other_peoples_sandboxes_are_neither_listed_nor_reaped(provider: E2BProvider, stand_in) -> None:
    from e2b import AsyncSandbox

    await provider.preflight()
    theirs = await AsyncSandbox.create(metadata={"label.run": "theirs"})
    assert await provider.list() == []
    assert await provider.reap(force=True) == 0
    assert await theirs.is_running()


async def test_a_sandbox_is_found_again_by_another_process(provider: E2BProvider, stand_in) -> None:
    sandbox = await provider.create(SandboxSpec(labels={"run": "again"}))
    await sandbox.write_file("/app/file", b"kept")
    await sandbox.exec("sleep 600 & echo $! > pid")
    await sandbox.pause()
    other = E2BProvider(E2BProvider.Options())
    found = await other.connect(sandbox.id)
    assert (await found.exec("cat file")).stdout == b"kept"
    assert (await found.exec("kill -0 $(cat pid)")).ok
    await found.kill_processes()
    assert not (await found.exec("kill -0 $(cat pid)")).ok
    await found.close()
    assert not await sandbox.alive()
    await other.close()


async def test_what_was_noted_of_sandboxes_goes_with_them(provider: E2BProvider, stand_in) -> None:
    kept = Records(records.state_home())
    first, second = [await provider.create(SandboxSpec(labels={"run": "noted"})) for _ in range(2)]
    assert kept.sandboxes() == sorted([first.id, second.id])
    await first.close()
    assert kept.sandboxes() == [second.id]
    (records.state_home() / "sandbox-igone.json").write_text("[]")
    await provider.reap()
    assert kept.sandboxes() == [second.id]
    assert await provider.reap(force=True) == 1
    assert kept.sandboxes() == []
