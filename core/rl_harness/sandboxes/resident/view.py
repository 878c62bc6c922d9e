"""What an agent is given of a sandbox for one episode: its commands and its model's address through a helper inside."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from rl_harness.contracts.sandbox import Sandbox
from rl_harness.errors import SandboxError
from rl_harness.sandboxes.resident.relay import Target
from rl_harness.sandboxes.resident.resident import Resident
from rl_harness.sandboxes.resident.sandbox import ResidentSandbox


class View:
    """``sandbox`` for the agent, and ``url`` (without a path) where it finds what was to be relayed."""

    def __init__(self, sandbox: Sandbox, url: str | None = None, resident: Resident | None = None) -> None:
        self.sandbox = sandbox
        self.url = url
        self._resident = resident

    @property
    def lost(self) -> str | None:
        """Why there is no helper any more, though the sandbox lives; None while there is one."""
        return self._resident.failed if self._resident is not None else None


@contextlib.asynccontextmanager
async def agents_view(sandbox: Sandbox, *, commands: bool, target: Target | None) -> AsyncIterator[View]:
    """Start a helper for the time of the ``with`` block, which the sandbox outlives.

    ``commands``: the agent's commands go through it. ``target`` answers what it relays, None for no relay. A sandbox
    without Python raises ``HelperUnavailable`` when there is something to relay; commands alone take the provider's
    own way then. A sandbox that is dead at the end raises ``SandboxError``.
    """
    # A relay must be there before the agent is. For commands the helper comes up while the model is asked.
    resident = await Resident.start(sandbox, commands=commands, wait=target is not None)
    try:
        relay = await resident.relay(target) if target is not None else None
        view = ResidentSandbox(sandbox, resident) if commands else sandbox
        yield View(view, relay.url if relay is not None else None, resident)
        if resident.failed is not None and not await sandbox.alive():
            raise SandboxError(f"sandbox {sandbox.id} died under its agent: {resident.failed}")
    finally:
        await resident.close()
