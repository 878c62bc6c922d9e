"""What providers of remote machines build on: a whole sandbox from one primitive, archives that neither side trusts,
and owners that can be told dead from alive."""

from rl_harness.sandboxes.remote.archives import pack, packed, unpack
from rl_harness.sandboxes.remote.owners import owner_alive, owner_label
from rl_harness.sandboxes.remote.sandbox import MARK, RemoteSandbox, UnknownUser

__all__ = ["MARK", "RemoteSandbox", "UnknownUser", "owner_alive", "owner_label", "pack", "packed", "unpack"]
