"""For stand-ins of services: networks for their machines, so that policies are enforced by the kernel.

A machine here is a sandbox of the local provider, which has no network. A pair of virtual interfaces leads from its
namespace to this machine, and routes say what of it is reached: two addresses on the loopback interface here, of the
range for benchmarks (RFC 2544), and whatever else a policy names. Names are not resolved: nothing is reached by them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from rl_harness.contracts.sandbox import Sandbox

EVERYTHING = "0.0.0.0/0"
_RANGES = 512


class Wires:
    """``hosts``: two addresses of this machine that machines may reach; none where networks cannot be made, for want of
    root or of ``ip``. ``state``: the folder of the local provider whose sandboxes are the machines."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._numbers = itertools.count(16)
        self._range = ""
        self.hosts: list[str] = []
        for number in random.sample(range(_RANGES), _RANGES):
            start = f"198.{18 + number // 256}.{number % 256}"
            claimed = _ip("addr", "add", f"{start}.1/32", "dev", "lo")
            if claimed is None:  # nobody else has this range
                self._range = start
                self.hosts = [f"{start}.1", f"{start}.2"]
                _ip("addr", "add", f"{start}.2/32", "dev", "lo")
                return
            if "exists" not in claimed:
                return

    async def connect(self, machine: Sandbox, allow: Sequence[str], deny: Sequence[str] = ()) -> None:
        """Let a machine reach these ranges, except for others."""
        if self.hosts and allow:
            await asyncio.to_thread(self._connect, machine.id, allow, deny)

    def _connect(self, machine: str, allow: Sequence[str], deny: Sequence[str]) -> None:
        number = next(self._numbers)
        own, name = f"{self._range}.{number % 240 + 16}", f"rlh{self._range.replace('.', '')[3:]}n{number}"[:15]
        inside = self._init(machine)
        _must("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", inside)
        _must("link", "set", name, "up")
        _must("route", "add", f"{own}/32", "dev", name)
        _must("addr", "add", f"{own}/32", "dev", "eth0", inside=inside)
        _must("link", "set", "eth0", "up", inside=inside)
        for target in allow:
            _must("route", "add", target, "dev", "eth0", inside=inside)
        for target in deny:
            _must("route", "add", "unreachable", target, inside=inside)

    def _init(self, machine: str) -> str:
        """The pid of a machine's first process, which is on record when it has told it."""
        for _ in range(600):
            for record in self._state.rglob(f"{machine}/init.json"):
                return str(json.loads(record.read_text())["pid"])
            time.sleep(0.05)
        raise RuntimeError(f"{machine} has no first process on record")

    def close(self) -> None:
        """The pairs of interfaces end with their machines."""
        for host in self.hosts:
            _ip("addr", "del", f"{host}/32", "dev", "lo")


def _ip(*arguments: str, inside: str = "") -> str | None:
    """What ``ip`` complains of; None when it has done it."""
    enter = ["nsenter", "-t", inside, "-n"] if inside else []
    try:
        done = subprocess.run([*enter, "ip", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "no ip"
    return None if done.returncode == 0 else done.stderr.strip() or "failed"


def _must(*arguments: str, inside: str = "") -> None:
    if complaint := _ip(*arguments, inside=inside):
        raise RuntimeError(f"ip {' '.join(arguments)}: {complaint}")
