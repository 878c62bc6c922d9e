"""What a provider has on record, and removing what nobody needs any more. How many sandboxes use a snapshot is counted
from the provider's list each time, never stored."""

from __future__ import annotations

import time
from collections import Counter

import msgspec

from rl_harness.contracts.sandbox import BuildInfo, SandboxInfo, SandboxProvider, SnapshotInfo, SnapshotLevel
from rl_harness.sandboxes.usage import Usage


class SnapshotUse(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot, the number of sandboxes that started from it and are still there, and what this machine knows of its
    use (``last_used`` is its making where nothing is known)."""

    info: SnapshotInfo
    references: int
    last_used: float
    hits: int
    build_seconds: float | None


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    sandboxes: list[SandboxInfo]
    snapshots: list[SnapshotUse]
    builds: list[BuildInfo]


class Pruned(msgspec.Struct, frozen=True, kw_only=True):
    """``half_made`` counts what interrupted starts, builds and snapshots left."""

    sandboxes: list[SandboxInfo]
    snapshots: list[SnapshotUse]
    builds: list[BuildInfo]
    half_made: int


async def inventory(provider: SandboxProvider, usage: Usage) -> Inventory:
    """Every sandbox, snapshot and built image of ``provider``, oldest first."""
    sandboxes = sorted(await provider.list(), key=lambda info: info.created_at)
    references = Counter(info.snapshot for info in sandboxes)
    snapshots = []
    if provider.capabilities.snapshot is not SnapshotLevel.NONE:
        for info in sorted(await provider.snapshots(), key=lambda info: info.created_at):
            use = usage.of(info.id)
            snapshots.append(
                SnapshotUse(
                    info=info,
                    references=references[info.id],
                    last_used=max(use.last_used, info.created_at) if use else info.created_at,
                    hits=use.hits if use else 0,
                    build_seconds=use.build_seconds if use else None,
                )
            )
    builds = sorted(await provider.builds() if provider.capabilities.builds else (), key=lambda info: info.created_at)
    return Inventory(sandboxes=sandboxes, snapshots=snapshots, builds=builds)


async def prune(
    provider: SandboxProvider, usage: Usage, *, ttl: float, everything: bool = False, dry_run: bool = False
) -> Pruned:
    """Remove sandboxes whose owner is known to be dead, half-made things, and prepared environments and built images
    that were not used for ``ttl`` seconds (with ``everything``: all of them). What a sandbox or snapshot that stays
    stands on stays.

    With ``dry_run`` nothing is removed; what is half-made cannot be told then.
    """
    before = await inventory(provider, usage)
    dead = [info for info in before.sandboxes if info.owner_alive is False]
    removed = 0 if dry_run else await provider.reap()
    going = Counter(info.snapshot for info in dead)
    now = time.time()
    expired = [
        use
        for use in before.snapshots
        if use.info.key and use.references <= going[use.info.id] and (everything or now - use.last_used > ttl)
    ]
    gone = {info.id for info in dead} | {use.info.id for use in expired}
    builds = [
        build
        for build in before.builds
        if gone.issuperset(build.used_by) and (everything or now - build.last_used > ttl)
    ]
    if not dry_run:
        for use in expired:
            await provider.delete_snapshot(use.info.id)
        builds = [build for build in builds if await provider.delete_build(build.id)]
        kept = {use.info.id for use in before.snapshots} - {use.info.id for use in expired}
        usage.sweep(kept)
    return Pruned(sandboxes=dead, snapshots=expired, builds=builds, half_made=max(0, removed - len(dead)))
