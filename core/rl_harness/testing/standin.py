"""A stand-in for a service that a plugin's tests talk to, in a process of its own that they ask for faults and facts.

The stand-in is a Python module that calls :func:`serve_requests` once it listens. Requests and answers are one JSON
value on a line each, over its standard streams; it ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

_STOP_SECONDS = 60.0


class StandIn:
    """Starts ``python -m MODULE ARGUMENTS``, found in ``folder``. ``hello`` is what it first said."""

    def __init__(self, module: str, folder: Path, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(folder)},
            text=True,
        )
        self.hello = self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the stand-in has died"
        return json.loads(line)

    def ask(self, do: str, **arguments: Any) -> Any:
        """The answer to a request: ``do`` names it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=_STOP_SECONDS)


async def serve_requests(hello: Any, answer: Callable[[dict[str, Any]], Awaitable[Any]]) -> None:
    """In the stand-in: say ``hello``, then answer requests (with their ``do``) until whoever started it ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's, meant for who started us
    reader = asyncio.StreamReader(limit=1 << 24)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    print(json.dumps(hello), flush=True)
    while line := await reader.readline():
        print(json.dumps(await answer(json.loads(line))), flush=True)
