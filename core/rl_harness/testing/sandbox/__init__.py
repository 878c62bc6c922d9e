"""The conformance kit of sandbox providers: what every one must do, as checks a plugin runs in its own tests.

In a test module of the plugin::

    RIG = Rig(reachable=("10.0.0.1", 80), unlisted=("10.0.0.2", 80), crash=power_off)

    @pytest.mark.parametrize("check", CHECKS, ids=str)
    async def test_conformance(check, provider, tmp_path):
        if reason := check.inapplicable(provider.capabilities, RIG):
            pytest.skip(reason)
        await check.run(provider, tmp_path, RIG)

A failed check raises AssertionError with what was expected. Checks are independent and clean up after themselves.
Without a :class:`Rig` most of them run too; what a part of it is good for is said there. The sandboxes need ``sh`` and
the usual small programs (busybox will do), bash or python3 for what connects to a network.
"""

from __future__ import annotations

from rl_harness.testing.sandbox import (
    broken,
    commands,
    files,
    lifecycle,
    limits,
    mounts,
    network,
    relay,
    snapshots,
    streams,
)
from rl_harness.testing.sandbox.kit import Check, Context, Rig

CHECKS: tuple[Check, ...] = (
    *commands.checks,
    *streams.checks,
    *files.checks,
    *lifecycle.checks,
    *limits.checks,
    *network.checks,
    *snapshots.checks,
    *mounts.checks,
)

#: Of the helper inside over this provider's own streams; for sandboxes that have a python3.
RELAY_CHECKS: tuple[Check, ...] = tuple(relay.checks)

#: Of agents that broke the programs of their machine: they are graded on what they left, and their processes end.
BROKEN_CHECKS: tuple[Check, ...] = tuple(broken.checks)

__all__ = ["BROKEN_CHECKS", "CHECKS", "RELAY_CHECKS", "Check", "Context", "Rig"]
