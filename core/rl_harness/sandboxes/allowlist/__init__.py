"""Allow-lists for sandboxes that have none of their own: no network, and a proxy of the host over the helper inside.

``provider`` gives a provider the policy and ``sandbox`` a sandbox the way; ``proxy`` answers what is asked inside,
``hosts`` decides what may be reached. Nothing inside is trusted: what it sends reaches the listed hosts, or nothing.
"""

from __future__ import annotations

from rl_harness.sandboxes.allowlist.hosts import EVERY_PUBLIC_HOST
from rl_harness.sandboxes.allowlist.provider import AllowListProvider, with_allow_lists

__all__ = ["EVERY_PUBLIC_HOST", "AllowListProvider", "with_allow_lists"]
