"""The stock of ready sandboxes: ahead of the schedule, bounded, checked, never refilled with a used one, drained."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest
from rl_harness.contracts import EnvironmentSpec, Limits, NetworkPolicy, Sandbox, SandboxCapabilities, SandboxSpec
from rl_harness.errors import SandboxError, Unsupported
from rl_harness.sandboxes.pool import Pool

PLAIN = SandboxSpec(network=NetworkPolicy.FULL, labels={"run": "r", "episode": "e"}, lifetime=60.0)
OTHER = msgspec.structs.replace(PLAIN, environment=EnvironmentSpec(workdir="/other"))


class Slow:
    """A provider that takes its time, and counts; everything it makes is a real sandbox."""

    def __init__(self, provider, seconds: float = 0.0) -> None:
        self.provider = provider
        self.seconds = seconds
        self.running = self.most = 0
        self.specs: list[SandboxSpec] = []
        self.made: list[Sandbox] = []
        self.fail: Exception | None = None
        self.only: str | None = None

    @property
    def capabilities(self) -> SandboxCapabilities:
        return self.provider.capabilities

    async def create(self, spec: SandboxSpec) -> Sandbox:
        self.specs.append(spec)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if self.only in (None, spec.environment.workdir):
                await asyncio.sleep(self.seconds)
            if self.fail is not None:
                raise self.fail
            sandbox = await self.provider.create(spec)
            self.made.append(sandbox)
            return sandbox
        finally:
            self.running -= 1


@pytest.fixture
async def source(process):
    return Slow(process)


async def settled(pool: Pool, source: Slow) -> None:
    """Wait until nothing is under way."""
    deadline = time.monotonic() + 20
    await asyncio.sleep(0.01)
    while source.running or any(kind.starts for kind in pool._kinds.values()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


async def test_what_is_expected_is_ready_when_asked_for(source):
    pool = Pool(source, size=4, labels={"run": "r"})
    pool.expect(PLAIN, 3)
    pool.start()
    await settled(pool, source)
    assert pool.ready() == 3
    first = await pool.create(PLAIN)
    assert first in source.made
    assert pool.counts.hits == 1
    assert pool.counts.misses == 0
    assert {tuple(spec.labels.items()) for spec in source.specs} == {(("run", "r"),)}
    await first.close()
    await pool.close()


async def test_equal_environments_share_a_stock_wherever_they_lie(source, tmp_path):
    def lying(folder: str, text: str) -> SandboxSpec:
        directory = tmp_path / folder / "environment"
        (directory / "workspace").mkdir(parents=True)
        (directory / "workspace/file").write_text(text)
        return msgspec.structs.replace(PLAIN, environment=EnvironmentSpec(directory=directory))

    one, same, other = lying("one", "text"), lying("same", "text"), lying("other", "another text")
    pool = Pool(source, size=1)
    pool.expect(one)
    pool.start()
    await settled(pool, source)
    assert await (await pool.create(other)).read_file("/app/file") == b"another text"
    assert pool.counts.unplanned == 1
    assert await (await pool.create(same)).read_file("/app/file") == b"text"
    assert (pool.counts.hits, pool.counts.unplanned) == (1, 1)
    await pool.close()


async def test_an_environment_that_cannot_be_read_is_told_by_whoever_starts_it(source, tmp_path):
    gone = msgspec.structs.replace(PLAIN, environment=EnvironmentSpec(dockerfile=tmp_path / "Dockerfile"))
    pool = Pool(source, size=1)
    pool.expect(gone)
    with pytest.raises(Unsupported, match="Dockerfile"):
        await pool.create(gone)
    await pool.close()


async def test_every_sandbox_is_handed_out_once(source):
    pool = Pool(source, size=3)
    pool.expect(PLAIN, 12)
    pool.start()
    taken = []

    async def episode() -> None:
        for _ in range(3):
            sandbox = await pool.create(PLAIN)
            taken.append(sandbox.id)
            await sandbox.close()

    await asyncio.gather(*(episode() for _ in range(4)))
    assert len(set(taken)) == 12
    await settled(pool, source)
    assert len(source.made) == 12  # no more than was expected
    assert await source.provider.list() == []
    counts = pool.counts
    assert counts.hits + counts.late + counts.misses == 12
    assert counts.started == counts.hits + counts.late
    await pool.close()


async def test_the_order_of_the_schedule_is_the_order_of_making(source):
    pool = Pool(source, size=2)
    for spec in (PLAIN, OTHER, PLAIN, OTHER):
        pool.expect(spec)
    pool.start()
    await settled(pool, source)
    assert [spec.environment.workdir for spec in source.specs] == ["/app", "/other"]
    await (await pool.create(PLAIN)).close()
    await settled(pool, source)
    assert [spec.environment.workdir for spec in source.specs] == ["/app", "/other", "/app"]
    await pool.close()


async def test_number_and_memory_are_bounded(source):
    class Unlimited(Slow):
        async def create(self, spec: SandboxSpec) -> Sandbox:  # the process sandbox enforces no limits
            return await super().create(msgspec.structs.replace(spec, limits=Limits()))

    source = Unlimited(source.provider)
    pool = Pool(source, size=8, memory=1000)
    pool.expect(msgspec.structs.replace(PLAIN, limits=Limits(memory=400)), 5)
    pool.start()
    await settled(pool, source)
    assert pool.ready() == 2
    pool.expect(PLAIN, 20)
    pool.start()
    await settled(pool, source)
    assert pool.ready() == 5  # the rest of the eight are kept for what comes first
    await pool.close()


async def test_one_under_way_is_waited_for_instead_of_making_another(process):
    source = Slow(process, 0.3)
    pool = Pool(source, size=1)
    pool.expect(PLAIN, 1)
    pool.start()
    await asyncio.sleep(0.1)
    await pool.create(PLAIN)
    assert pool.counts.late == 1
    assert len(source.made) == 1
    await pool.close()


async def test_a_slow_environment_delays_nobody_else(process):
    source = Slow(process, 3600.0)
    source.only = "/app"
    pool = Pool(source, size=1)
    pool.expect(PLAIN, 1)
    pool.expect(OTHER, 1)
    pool.start()
    async with asyncio.timeout(60):
        await pool.create(OTHER)
    await pool.close()


async def test_a_dead_one_is_counted_and_replaced(source):
    pool = Pool(source, size=1)
    pool.expect(PLAIN, 2)
    pool.start()
    await settled(pool, source)
    await source.provider.reap(force=True)
    sandbox = await pool.create(PLAIN)
    assert await sandbox.alive()
    assert pool.counts.dead == 1
    assert pool.counts.hits == 0
    assert pool.counts.misses == 1
    await pool.close()


async def test_one_that_stood_too_long_is_given_up_and_not_replaced(source):
    pool = Pool(source, size=2, max_idle=0.1)
    pool.expect(PLAIN, 9)
    pool.start()
    await settled(pool, source)
    await asyncio.sleep(0.4)
    assert pool.ready() == 0
    assert pool.counts.unused == 2
    assert len(source.specs) == 2
    assert await (await pool.create(PLAIN)).alive()
    await settled(pool, source)
    assert pool.ready() == 2  # there is demand again
    await pool.close()


async def test_one_whose_lifetime_would_not_cover_the_episode_is_dropped(source):
    now = 1000.0
    pool = Pool(source, size=1, max_idle=50.0, clock=lambda: now)
    pool.expect(PLAIN, 2)
    pool.start()
    await settled(pool, source)
    assert source.specs[0].lifetime == 110.0
    now += 51.0
    await pool.create(PLAIN)
    assert pool.counts.hits == 0
    assert pool.counts.unused == 1
    await pool.close()


async def test_a_longer_lifetime_than_expected_is_honoured(source):
    pool = Pool(source, size=1, max_idle=50.0)
    pool.expect(PLAIN, 2)
    pool.start()
    await settled(pool, source)
    await pool.create(msgspec.structs.replace(PLAIN, lifetime=600.0))
    assert source.specs[-1].lifetime >= 600.0
    await pool.close()


async def test_a_sandbox_that_cannot_be_made_is_not_tried_for_ever(source):
    source.fail = SandboxError("no room")
    pool = Pool(source, size=2)
    pool.expect(PLAIN, 5)
    pool.start()
    await settled(pool, source)
    assert len(source.specs) == 2
    with pytest.raises(SandboxError, match="no room"):
        await pool.create(PLAIN)
    source.fail = None
    await settled(pool, source)
    assert await (await pool.create(PLAIN)).alive()
    assert pool.counts.failed >= 2
    await pool.close()


async def test_a_caller_whose_sandbox_fails_under_way_gets_one_of_its_own(process):
    class Short(Slow):
        async def create(self, spec: SandboxSpec) -> Sandbox:
            if spec.lifetime > 60.0:
                await asyncio.sleep(0.2)
                raise Unsupported("no sandbox may live for longer than a minute")
            return await super().create(spec)

    pool = Pool(Short(process), size=1)
    pool.expect(PLAIN, 1)
    pool.start()
    await asyncio.sleep(0.05)
    assert await (await pool.create(PLAIN)).alive()
    assert pool.counts.misses == 1
    assert pool.counts.failed == 1
    await pool.close()


async def test_what_nobody_expected_is_made_on_the_spot_with_its_own_labels(source):
    pool = Pool(source, size=2, labels={"run": "r"})
    await pool.create(PLAIN)
    assert source.specs[0].labels == PLAIN.labels
    assert pool.counts.unplanned == 1
    await pool.close()


async def test_a_cancelled_caller_leaves_the_sandbox_to_the_next(process):
    source = Slow(process, 0.2)
    pool = Pool(source, size=1)
    pool.expect(PLAIN, 1)
    pool.start()
    caller = asyncio.create_task(pool.create(PLAIN))
    await asyncio.sleep(0.05)
    caller.cancel()
    await asyncio.gather(caller, return_exceptions=True)
    await settled(pool, source)
    assert pool.ready() == 1
    await pool.create(PLAIN)
    assert pool.counts.hits == 1
    assert len(source.made) == 1
    await pool.close()


@pytest.mark.parametrize("wait", [0.0, 0.05, 0.5], ids=["at once", "while they start", "when they are ready"])
async def test_closing_leaves_nothing(process, wait):
    source = Slow(process, 0.1)
    pool = Pool(source, size=4)
    pool.expect(PLAIN, 9)
    pool.start()
    await asyncio.sleep(wait)
    await pool.close()
    assert await process.list() == []
    with pytest.raises(SandboxError, match="closed"):
        await pool.create(PLAIN)


async def test_closing_under_cancellation_leaves_nothing(process):
    source = Slow(process, 0.1)
    pool = Pool(source, size=4)
    pool.expect(PLAIN, 9)
    pool.start()
    await asyncio.sleep(0.15)
    closing = asyncio.create_task(pool.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    assert await process.list() == []


async def test_a_new_schedule_keeps_what_it_can_use_and_gives_up_the_rest(source):
    pool = Pool(source, size=4)
    pool.expect(PLAIN, 2)
    pool.expect(OTHER, 2)
    pool.start()
    await settled(pool, source)
    pool.clear()
    pool.expect(OTHER, 1)
    pool.discard_unexpected()
    assert pool.ready() == 1
    await asyncio.gather(*pool._ending)
    assert [info.labels for info in await source.provider.list()] == [{}]
    await pool.create(OTHER)
    assert pool.counts.hits == 1
    await pool.close()


async def test_how_many_are_kept_follows_consumption_times_start_time(source):
    now = 0.0
    pool = Pool(source, size=50, clock=lambda: now)
    assert pool.target() == 50  # nothing is measured yet
    pool._start_seconds = 2.0
    for _ in range(40):
        pool._leases.append(now)
        now += 0.5
    assert pool.target() == 7  # 2 a second x 2 s = 4; + 2 for bursts + 1
    now += 1000.0
    assert pool.target() == 2  # nobody asks any more
