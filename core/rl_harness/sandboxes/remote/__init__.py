"""What providers of remote machines build on: a whole sandbox from one primitive, archives that neither side trusts,
owners that can be told dead from alive, and folders that are this user's alone."""

from rl_harness.private import private_folder
from rl_harness.sandboxes.remote.archives import pack, packed, unpack
from rl_harness.sandboxes.remote.hosts import split_hosts
from rl_harness.sandboxes.remote.inside import as_user, list_processes, look_around, seen, signal_processes, signalled
from rl_harness.sandboxes.remote.killer import MAKE_PLACES
from rl_harness.sandboxes.remote.owners import owner_alive, owner_label
from rl_harness.sandboxes.remote.rescue import Entry, FileService
from rl_harness.sandboxes.remote.sandbox import MARK, CannotStart, RemoteSandbox, UnknownUser, no_room

__all__ = [
    "MAKE_PLACES",
    "MARK",
    "CannotStart",
    "Entry",
    "FileService",
    "RemoteSandbox",
    "UnknownUser",
    "as_user",
    "list_processes",
    "look_around",
    "no_room",
    "owner_alive",
    "owner_label",
    "pack",
    "packed",
    "private_folder",
    "seen",
    "signal_processes",
    "signalled",
    "split_hosts",
    "unpack",
]
