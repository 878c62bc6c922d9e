"""Where a run's sandboxes come from: its provider, behind prepared environments."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rl_harness.contracts import SandboxProvider
from rl_harness.plugins import Registry
from rl_harness.runs.config import RunConfig
from rl_harness.sandboxes.snapshots import Snapshots
from rl_harness.sandboxes.usage import state_folder

Supply = Snapshots


def make_supply(
    config: RunConfig,
    registry: Registry,
    provider: SandboxProvider,
    labels: Mapping[str, str],
    note: Callable[[str], None],
) -> Supply:
    """The supply that a configuration asks for; ``labels`` go onto every sandbox made ahead of its episode."""
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
