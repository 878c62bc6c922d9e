"""Starts the helper process and hands it requests for sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from rl_harness.sandboxes.local import protocol
from rl_harness.sandboxes.local.channel import StartFailed

START_TIMEOUT = 60.0

# The parent packages become empty stubs, so that the helper loads its few modules and none of their imports.
_BOOT = """
import sys, types
for name, path in zip(("rl_harness", "rl_harness.sandboxes", "rl_harness.sandboxes.local"), sys.argv[1:]):
    module = types.ModuleType(name)
    module.__path__ = [path]
    sys.modules[name] = module
from rl_harness.sandboxes.local.zygote import main
main()
"""


class Helper:
    """One running helper. It exits, and cleans up, when its socket closes."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self._process = process
        self._control = control
        self.layers: list[str] = []

    @classmethod
    async def start(cls, settings: dict[str, Any]) -> Helper:
        """Start it and wait until its layers are prepared. Raises :class:`StartFailed`."""
        try:
            return await asyncio.to_thread(cls._start, settings)
        except OSError as error:
            raise StartFailed("start helper", error.errno or 0) from None

    @classmethod
    def _start(cls, settings: dict[str, Any]) -> Helper:
        here = Path(__file__).resolve().parent
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    "-S",
                    "-B",
                    "-X",
                    "utf8",
                    "-c",
                    _BOOT,
                    *map(str, (here.parents[1], here.parent, here)),
                ],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env={},
                cwd="/",
            )
        helper = cls(process, ours)
        try:
            ours.settimeout(START_TIMEOUT)
            protocol.send(ours, settings)
            received = protocol.receive(ours, trusted=False)
        except OSError as error:
            helper.stop()
            raise StartFailed("start helper", error.errno or 0) from None
        answer: dict[str, Any] = received[0] if received else {"failed": "start helper", "errno": 0}
        if "failed" in answer:
            helper.stop()
            raise StartFailed(answer["failed"], answer["errno"])
        ours.setblocking(False)
        helper.layers = answer["layers"]
        return helper

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def launch(self, request: dict[str, Any]) -> socket.socket:
        """Have it fork a sandbox; returns this side of the sandbox's control socket. Raises :class:`StartFailed`."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                protocol.send(self._control, request, [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise StartFailed("ask the helper", error.errno or 0) from None
        return ours

    def stop(self) -> None:
        """Close the socket and wait: sandboxes still there are ended and removed."""
        self._control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(START_TIMEOUT)
            return
        self._process.kill()
        self._process.wait()
