"""Which rewarded episodes one update is given: in the order in which they became complete, whole groups where groups
are compared, or what there is of a group after a time."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import msgspec

from rl_harness.records import Episode, Group
from rl_harness.runs.online import SET_ASIDE, OnlineStore
from rl_harness.runs.store import RunStore


class _Member(msgspec.Struct, frozen=True, kw_only=True):
    """``closed_at``: when it was rewarded and over."""

    episode: str
    group: str
    closed_at: float


class Incomplete(msgspec.Struct, frozen=True, kw_only=True):
    """A group of one that nothing more came for in time: there is nothing to compare its episode with."""

    group: str
    episode: str


class Batches:
    """Rewarded episodes on their way to the trainer. The decision which of them a step is given is durable before the
    step begins, so that a step that was cut off is taken again with the same ones."""

    def __init__(
        self,
        store: RunStore,
        *,
        batch_size: int,
        group_size: int,
        group_timeout: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._online = OnlineStore(store)
        self._batch_size = batch_size
        self._group_size = group_size
        self._timeout = group_timeout
        self._clock = clock
        self._waiting: deque[_Member] = deque()
        self._arrived = asyncio.Event()

    def load(self) -> None:
        """Find those that waited when the process before this one ended."""
        for row in self._online.untrained():
            self._add(self._store.episode(row.id), row.closed_at or 0.0)

    def add(self, episode: Episode) -> None:
        """An episode was rewarded and is over."""
        self._add(episode, self._clock())

    def _add(self, episode: Episode, closed_at: float) -> None:
        self._waiting.append(_Member(episode=episode.id, group=self._group_of(episode), closed_at=closed_at))
        self._arrived.set()

    def __len__(self) -> int:
        return len(self._waiting)

    async def take(self, step: int) -> list[Group]:
        """What ``step`` is given; waits until there is enough."""
        chosen = [row.id for row in self._online.given_to(step)]
        if not chosen:
            while not (chosen := self._enough()):
                self._arrived.clear()
                await self._arrived.wait()
            await self._online.give(chosen, step)
            self._forget(chosen)
        return await asyncio.to_thread(self._groups, chosen, step)

    async def sweep(self) -> list[Incomplete]:
        """Wait no longer for the rest of groups whose time is over: what there is of them is compared. Those of one
        episode are given to no step, and returned."""
        _, incomplete = self._gathered()
        over = [members for members in incomplete if self._is_over(members)]
        single = [members[0] for members in over if len(members) == 1]
        if single:
            await self._online.give([member.episode for member in single], SET_ASIDE)
            self._forget(member.episode for member in single)
        if over:
            self._arrived.set()
        return [Incomplete(group=member.group, episode=member.episode) for member in single]

    def _is_over(self, members: Sequence[_Member]) -> bool:
        return self._clock() - members[-1].closed_at >= self._timeout

    def _forget(self, episodes: Iterable[str]) -> None:
        gone = set(episodes)
        self._waiting = deque(member for member in self._waiting if member.episode not in gone)

    async def set_aside(self, groups: Iterable[Group]) -> None:
        """Give these to no step: the trainer cannot take them."""
        await self._online.give([episode.id for group in groups for episode in group.episodes], SET_ASIDE)

    def _group_of(self, episode: Episode) -> str:
        return episode.id if self._group_size == 1 else episode.task.name

    def _enough(self) -> list[str]:
        """The oldest groups that are complete, or whose time is over, that have a batch's number of episodes between
        them; [] if there are too few."""
        complete, incomplete = self._gathered()
        chosen: list[str] = []
        for members in (*complete, *(group for group in incomplete if len(group) > 1 and self._is_over(group))):
            chosen += [member.episode for member in members]
            if len(chosen) >= self._batch_size:
                return chosen
        return []

    def _gathered(self) -> tuple[list[list[_Member]], list[list[_Member]]]:
        """The groups that are complete, in the order in which they became so, and those that are not."""
        complete: list[list[_Member]] = []
        gathering: dict[str, list[_Member]] = {}
        for member in self._waiting:
            group = gathering.setdefault(member.group, [])
            group.append(member)
            if len(group) == self._group_size:
                complete.append(gathering.pop(member.group))
        return complete, list(gathering.values())

    def _groups(self, ids: Sequence[str], step: int) -> list[Group]:
        by_group: dict[str, list[Episode]] = {}
        for id in ids:
            episode = self._store.episode(id)
            by_group.setdefault(self._group_of(episode), []).append(episode)
        groups = []
        for name, episodes in by_group.items():
            # A name may have been used for more episodes than a group has: then they are several groups.
            for start in range(0, len(episodes), self._group_size):
                members = episodes[start : start + self._group_size]
                groups.append(
                    Group(
                        id=f"online/{step}/{name}/{start}",
                        expected=self._group_size,
                        episodes=tuple(members),
                        turns=tuple(tuple(self._store.turns(member.id)) for member in members),
                    )
                )
        return groups
