"""Stopping a job: once means finish what runs and save, twice means stop now."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator


class StopSignal:
    """Set by Ctrl-C or SIGTERM, read by jobs.

    The first request sets :attr:`requested`: no new episode or step starts. The second cancels the task the
    signal was installed for; everything reported finished is already on disk. ``say`` is told of the first.
    """

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self.requested = False
        self._say = say
        self._task: asyncio.Task[object] | None = None

    def request(self) -> None:
        """Ask once to finish, again to stop now."""
        if self.requested and self._task is not None:
            self._task.cancel()
        elif self._say is not None:
            self._say("stopping once what runs is finished; Ctrl-C again stops now")
        self.requested = True

    def __call__(self) -> bool:
        return self.requested

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Route SIGINT and SIGTERM here while the current task runs."""
        loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        signals = (signal.SIGINT, signal.SIGTERM)
        try:
            for number in signals:
                loop.add_signal_handler(number, self.request)
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)
            self._task = None
