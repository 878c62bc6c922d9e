"""Many episodes: bounded concurrency, retries of unscored ones, and a stop between episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import msgspec

from rl_harness.records import Episode, Turn
from rl_harness.rollout.episode import Attempt, EpisodeRunner

Sink = Callable[[Episode, list[Turn]], Awaitable[None]]


async def run_attempts(
    runner: EpisodeRunner,
    attempts: Iterable[Attempt],
    *,
    concurrency: int,
    retries: int,
    sink: Sink,
    stopping: Callable[[], bool] = lambda: False,
) -> None:
    """Run every attempt, at most ``concurrency`` at once, handing each episode to ``sink`` as it ends.

    An episode that comes out unscored is attempted again, up to ``retries`` further times; every attempt reaches
    the sink. Once ``stopping()`` is true no further attempt starts and those that run are finished. An exception
    of the sink ends everything: what cannot be saved must not be computed.
    """
    pending = list(attempts)
    queue = iter(pending)

    async def worker() -> None:
        for attempt in queue:
            if stopping():
                return
            await _with_retries(runner, attempt, retries, sink, stopping)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(pending))):
            group.create_task(worker())


async def _with_retries(
    runner: EpisodeRunner, attempt: Attempt, retries: int, sink: Sink, stopping: Callable[[], bool]
) -> None:
    last = attempt.number + retries
    while True:
        episode, turns = await runner.attempt(attempt)
        await sink(episode, turns)
        if episode.unscored is None or attempt.number >= last or stopping():
            return
        attempt = msgspec.structs.replace(attempt, number=attempt.number + 1)
