"""A helper program inside a sandbox: relays connections to the host without any network, and runs the agent's
commands where a provider's own exec is slow. Never trusted.

``helper`` is the program; ``link`` talks to one, ``resident`` keeps one running; ``relay`` (with ``forward``) and
``commands`` are what it is for; ``sandbox`` and ``view`` are a sandbox seen through it.
"""

from __future__ import annotations

from rl_harness.sandboxes.resident.forward import tcp
from rl_harness.sandboxes.resident.link import HelperUnavailable
from rl_harness.sandboxes.resident.relay import Relay, Target
from rl_harness.sandboxes.resident.resident import Resident
from rl_harness.sandboxes.resident.sandbox import ResidentSandbox
from rl_harness.sandboxes.resident.view import View, agents_view

__all__ = ["HelperUnavailable", "Relay", "Resident", "ResidentSandbox", "Target", "View", "agents_view", "tcp"]
