"""Which rewarded episodes one update is given: in the order in which they became complete, whole groups where groups
are compared."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from rl_harness.records import Episode, Group
from rl_harness.runs.online import SET_ASIDE, OnlineStore
from rl_harness.runs.store import RunStore


class _Member(msgspec.Struct, frozen=True, kw_only=True):
    episode: str
    group: str


class Batches:
    """Rewarded episodes on their way to the trainer. The decision which of them a step is given is durable before the
    step begins, so that a step that was cut off is taken again with the same ones."""

    def __init__(self, store: RunStore, *, batch_size: int, group_size: int) -> None:
        self._store = store
        self._online = OnlineStore(store)
        self._batch_size = batch_size
        self._group_size = group_size
        self._waiting: deque[_Member] = deque()
        self._arrived = asyncio.Event()

    def load(self) -> None:
        """Find those that waited when the process before this one ended."""
        for row in self._online.untrained():
            self.add(self._store.episode(row.id))

    def add(self, episode: Episode) -> None:
        """An episode was rewarded and is over."""
        self._waiting.append(_Member(episode=episode.id, group=self._group_of(episode)))
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
            taken = set(chosen)
            self._waiting = deque(member for member in self._waiting if member.episode not in taken)
        return await asyncio.to_thread(self._groups, chosen, step)

    async def set_aside(self, groups: Iterable[Group]) -> None:
        """Give these to no step: the trainer cannot take them."""
        await self._online.give([episode.id for group in groups for episode in group.episodes], SET_ASIDE)

    def _group_of(self, episode: Episode) -> str:
        return episode.id if self._group_size == 1 else episode.task.name

    def _enough(self) -> list[str]:
        """The oldest complete groups that have a batch's number of episodes between them; [] if there are too few."""
        chosen: list[str] = []
        gathering: dict[str, list[str]] = {}
        for member in self._waiting:
            group = gathering.setdefault(member.group, [])
            group.append(member.episode)
            if len(group) == self._group_size:
                chosen += gathering.pop(member.group)
                if len(chosen) >= self._batch_size:
                    return chosen
        return []

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
