"""A client for a check to kill: makes, uses, snapshots, forks and closes sandboxes until it is.

    python -m rl_harness.testing.sandbox.client

The pickled provider class, its options and a spec come on stdin; on stdout goes one line when the first sandbox is
there, with the seconds it took. It stays alive while nobody kills it, but ends with its parent.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
import time
from collections.abc import Mapping

from rl_harness.contracts.sandbox import Sandbox, SandboxProvider, SnapshotLevel


async def main() -> None:
    provider_class, options, spec = pickle.load(sys.stdin.buffer)
    provider: SandboxProvider = provider_class(options)
    parent = os.getppid()
    started = time.monotonic()
    sandbox = await provider.create(spec)
    print(time.monotonic() - started, flush=True)
    await use(provider, sandbox, spec.labels)
    while os.getppid() == parent:
        await use(provider, await provider.create(spec), spec.labels)


async def use(provider: SandboxProvider, sandbox: Sandbox, labels: Mapping[str, str]) -> None:
    """The rest of a sandbox's life, and what is made from it."""
    await sandbox.exec("(sleep 600 &); head -c 1000000 /dev/zero > file")
    if provider.capabilities.snapshot is not SnapshotLevel.NONE:
        await provider.delete_snapshot(await sandbox.snapshot(labels=labels))
    if provider.capabilities.fork:
        for fork in await sandbox.fork(2):
            await fork.close()
    await sandbox.close()


if __name__ == "__main__":
    asyncio.run(main())
