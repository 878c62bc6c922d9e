"""Where a run's sandboxes come from: its provider, behind prepared environments and a stock of ready sandboxes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from rl_harness.contracts import Sandbox, SandboxCapabilities, SandboxProvider, SandboxSource, SandboxSpec
from rl_harness.plugins import Registry
from rl_harness.runs.config import RunConfig
from rl_harness.sandboxes.allowlist import with_allow_lists
from rl_harness.sandboxes.pool import Pool
from rl_harness.sandboxes.snapshots import Snapshots
from rl_harness.sandboxes.usage import state_folder

#: Ready sandboxes at most, where the configuration does not say.
DEFAULT_POOL = 8


def make_provider(registry: Registry, name: str, options: Mapping[str, Any]) -> SandboxProvider:
    """The sandbox provider of that name, for whoever creates sandboxes for tasks: with core's allow-list if need be."""
    provider = registry.create("sandboxes", name, options)
    assert isinstance(provider, SandboxProvider)
    return with_allow_lists(provider)


class Supply:
    """A :class:`~rl_harness.contracts.SandboxSource` for a whole run. Closing it leaves the provider open."""

    def __init__(self, snapshots: Snapshots, pool: Pool | None) -> None:
        self.snapshots = snapshots
        self.pool = pool
        self._source: SandboxSource = pool or snapshots

    @property
    def capabilities(self) -> SandboxCapabilities:
        return self._source.capabilities

    async def create(self, spec: SandboxSpec) -> Sandbox:
        return await self._source.create(spec)

    def expect(self, episodes: Sequence[Sequence[SandboxSpec]], concurrency: int) -> None:
        """What is needed from now on, instead of what was expected before: for each episode, in the order they start,
        the sandboxes it will ask for one after the other."""
        if self.pool is not None:
            self.pool.clear()
            for spec in in_order_of_need(episodes, concurrency):
                self.pool.expect(spec)
            self.pool.discard_unexpected()
            self.pool.start()

    def metrics(self) -> dict[str, float]:
        """Counts and seconds since this supply was made; those of several processes may be added up."""
        pool = msgspec.structs.asdict(self.pool.counts) if self.pool is not None else {}
        prepared = msgspec.structs.asdict(self.snapshots.counts)
        return {**pool, **{f"snapshots_{name}": value for name, value in prepared.items()}}

    async def close(self) -> None:
        try:
            if self.pool is not None:
                await self.pool.close()
        finally:
            await self.snapshots.close()


def in_order_of_need(episodes: Sequence[Sequence[SandboxSpec]], concurrency: int) -> Iterator[SandboxSpec]:
    """The first sandboxes of the first ``concurrency`` episodes; then, as these end one by one, what each needs next
    and the first of the episode that takes its place."""
    for specs in episodes[:concurrency]:
        yield from specs[:1]
    for ending, starting in zip(episodes, [*episodes[concurrency:], *((),) * concurrency], strict=False):
        yield from ending[1:]
        yield from starting[:1]


def make_supply(
    config: RunConfig,
    registry: Registry,
    provider: SandboxProvider,
    labels: Mapping[str, str],
    note: Callable[[str], None],
) -> Supply:
    """The supply that a configuration asks for; ``labels`` go onto every sandbox made ahead of its episode."""
    snapshots = prepared_environments(config, registry, provider, labels, note)
    size = min(config.concurrency, DEFAULT_POOL) if config.pool.size is None else config.pool.size
    if not size:
        return Supply(snapshots, None)
    memory = config.pool.memory
    pool = Pool(
        snapshots,
        size=size,
        memory=None if memory is None else int(memory),
        max_idle=config.pool.max_idle,
        labels=labels,
    )
    return Supply(snapshots, pool)


def prepared_environments(
    config: RunConfig,
    registry: Registry,
    provider: SandboxProvider,
    labels: Mapping[str, str],
    note: Callable[[str], None],
) -> Snapshots:
    """Environments prepared once, with the keys that every command of this configuration gives them."""
    entry = registry.find("sandboxes", config.sandbox.name)
    return Snapshots(
        provider,
        identity=f"{entry.plugin.distribution} {entry.plugin.version}: {entry.name}",
        state=state_folder() / entry.name,
        labels=labels,
        retries=config.retries,
        enabled=config.snapshots.use,
        note=note,
    )
