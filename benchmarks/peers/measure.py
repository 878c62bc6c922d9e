"""Runs one sandbox client through the same rounds as all others and prints what they took as JSON.

Runs in the environment of the peer that is measured, so it needs nothing but Python.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Protocol

SMALL, LARGE = 1 << 20, 100 << 20
ECHOES = 10


class Client(Protocol):
    async def start(self) -> None: ...

    async def ready(self) -> None:
        """Wait for what starts beside the first command and is there for all later ones; not in any row."""

    async def echo(self) -> str: ...

    async def upload(self, file: Path) -> None: ...

    async def stop(self) -> None: ...

    @classmethod
    async def finish(cls) -> None:
        """After the last round, in no row."""


def processor() -> float:
    """Seconds of this process and of the programs it has run to their end."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def write(file: Path, size: int) -> None:
    file.write_bytes(os.urandom(size))


async def rounds(client_type: type[Client], count: int) -> dict[str, list[tuple[float, float]]]:
    """Milliseconds (wall, processor) by row; the first round, which warms up, is not counted."""
    samples: dict[str, list[tuple[float, float]]] = {}

    async def timed(row: str, work: Awaitable[Any]) -> Any:
        started, before = time.perf_counter(), processor()
        result = await work
        samples.setdefault(row, []).append(((time.perf_counter() - started) * 1e3, (processor() - before) * 1e3))
        return result

    with tempfile.TemporaryDirectory() as folder:
        small, large = Path(folder, "small"), Path(folder, "large")
        write(small, SMALL)
        write(large, LARGE)
        for number in range(count + 1):
            client = client_type()

            async def cold(client: Client = client) -> None:
                await client.start()
                assert await client.echo() == "hello"

            await timed("cold start to first exec", cold())
            try:
                await client.ready()
                for _ in range(ECHOES):
                    assert await timed("exec echo", client.echo()) == "hello"
                await timed("upload 1 MB", client.upload(small))
                if number % 2 or not number:
                    await timed("upload 100 MB", client.upload(large))
            finally:
                await timed("teardown", client.stop())
            if not number:
                samples.clear()
    await client_type.finish()
    return samples


def main(client_type: type[Client]) -> None:
    print(json.dumps(asyncio.run(rounds(client_type, int(sys.argv[1])))))
