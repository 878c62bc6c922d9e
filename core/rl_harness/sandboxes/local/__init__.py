"""The built-in sandbox: Linux namespaces and a copy-on-write view of this machine's system directories, no daemon.

``provider`` is the host's side; ``zygote``, ``init``, ``command``, ``files`` and ``mounts`` run in the helper and
inside; ``sandbox`` and ``channel`` talk to them.
"""

from __future__ import annotations

from rl_harness.sandboxes.local.provider import LocalProvider

__all__ = ["LocalProvider"]
