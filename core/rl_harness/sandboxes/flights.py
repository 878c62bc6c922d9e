"""One piece of work at a time for each key, whose result everybody who asked for it gets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class _Flight(Generic[T]):
    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self.task = asyncio.create_task(work)
        self.waiters = 0


class Flights(Generic[T]):
    """Joins callers that want the same. Nothing is remembered once the work has ended.

    A caller that is cancelled leaves the others' work alone; when the last one leaves, the work is cancelled, and
    that caller returns only when it has cleaned up.
    """

    def __init__(self) -> None:
        self._flights: dict[str, _Flight[T]] = {}

    async def join(self, key: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result, or the error, of the work under way for ``key``; started if there is none."""
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(work())
            flight.task.add_done_callback(lambda _: self._forget(key, flight))
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiters -= 1
            if not flight.waiters and not flight.task.done():
                self._forget(key, flight)  # whoever comes now starts anew
                await _cancelled(flight.task)

    def _forget(self, key: str, flight: _Flight[T]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]

    async def close(self) -> None:
        """Cancel all work, and wait until it has cleaned up."""
        await asyncio.gather(*(_cancelled(flight.task) for flight in list(self._flights.values())))


async def _cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await finished(asyncio.wait([task]))
    if not task.cancelled():
        task.exception()  # nobody is left to be told


async def finished(work: Awaitable[Any]) -> None:
    """Wait for ``work`` to its end, also when the caller is cancelled meanwhile; then pass the cancellation on."""
    future = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError as error:
            if future.cancelled():
                raise
            cancelled = error
        except Exception:
            break
    if cancelled is not None:
        raise cancelled
    future.result()
