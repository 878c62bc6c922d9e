"""Stopping a job: once means finish what runs and save, twice means stop now, three times give up waiting."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType


class StopSignal:
    """Set by Ctrl-C or SIGTERM, read by jobs.

    The first request sets :attr:`requested`: no new episode or step starts. The second cancels the task the
    signal was installed for; everything reported finished is already on disk. A third signal raises
    KeyboardInterrupt wherever the program stands, for an event loop that something blocks. ``say`` is told of the
    first.
    """

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self.requested = False
        self._say = say
        self._task: asyncio.Task[object] | None = None
        self._asked = asyncio.Event()

    async def wait(self) -> None:
        """Returns when it is requested."""
        await self._asked.wait()

    def request(self) -> None:
        """Ask once to finish, again to stop now."""
        if self.requested and self._task is not None:
            self._task.cancel()
        elif self._say is not None:
            self._say("stopping once what runs is finished; Ctrl-C again stops now")
        self.requested = True
        self._asked.set()

    def __call__(self) -> bool:
        return self.requested

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Route SIGINT and SIGTERM here while the current task runs."""
        loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        received = 0

        def receive(number: int, frame: FrameType | None) -> None:
            # Unlike a handler of the loop, this one also runs while the loop is blocked in a system call.
            nonlocal received
            received += 1
            if received > 2:
                raise KeyboardInterrupt
            loop.call_soon_threadsafe(self.request)

        signals = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(number, receive) for number in signals]
        try:
            yield
        finally:
            for number, handler in zip(signals, before, strict=True):
                signal.signal(number, handler)
            self._task = None
