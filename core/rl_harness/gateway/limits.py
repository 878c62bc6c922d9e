"""How much of everything a client may have at once, and the queues in which the rest waits its turn."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """``body``: bytes of one request. ``session_bodies``, ``bodies``: bytes of all requests being answered, of one
    session and of all; more are read only once others are done. ``calls``: model calls of one session at once; further
    ones wait, or with ``refuse`` are answered with 429. ``keep_alive``: seconds of silence after which a stream gets a
    comment. ``stall``: seconds in which neither a call nor any other of its policy gets a token before it fails;
    there is no limit on how long a call takes that does get some.
    """

    body: int = 32 << 20
    session_bodies: int = 64 << 20
    bodies: int = 1 << 30
    calls: int = 64
    refuse: bool = False
    keep_alive: float = 15.0
    stall: float = 600.0


class Budget:
    """An amount that is taken and given back. Who asks for more than there is left waits, in the order of asking; one
    that asks for more than there ever is gets it when nobody else has any."""

    __slots__ = ("_limit", "_used", "_waiting")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def used(self) -> int:
        return self._used

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def take_now(self, amount: int) -> bool:
        """Take it, unless it has to be waited for."""
        if self._waiting or not self._fits(amount):
            return False
        self._used += amount
        return True

    async def take(self, amount: int) -> None:
        if self.take_now(amount):
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (amount, granted)
        self._waiting.append(entry)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                self._waiting.remove(entry)
                self._grant()
            else:
                self.give(amount)
            raise

    def give(self, amount: int) -> None:
        """Give back what was taken."""
        self._used -= amount
        if self._waiting:
            self._grant()

    def _fits(self, amount: int) -> bool:
        return not self._used or self._used + amount <= self._limit

    def _grant(self) -> None:
        while self._waiting:
            amount, granted = self._waiting[0]
            if granted.cancelled():
                return  # its own task is about to take it out of the queue
            if not self._fits(amount):
                return
            self._waiting.popleft()
            self._used += amount
            granted.set_result(None)
