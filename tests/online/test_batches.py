"""Which rewarded episodes an update is given where groups are compared, and for how long one waits for the others."""

from __future__ import annotations

import asyncio

import pytest
from rl_harness.learning.grpo import GRPO, GRPOOptions
from rl_harness.online import Batches
from rl_harness.online.rewards import Reward


class Groups:
    """Sessions that are rewarded in groups of three, and what the trainer is given of them."""

    def __init__(self, desk, batch_size: int = 2) -> None:
        self.desk = desk
        self.how = {"batch_size": batch_size, "group_size": 3, "group_timeout": 100.0, "clock": lambda: desk.now}
        self.batches = Batches(desk.store, **self.how)

    async def reward(self, group: str, reward: float) -> str:
        session, keys = await self.desk.sessions.start(group=group)
        await self.desk.ask(keys, "hello")
        await self.desk.sessions.reward(session, Reward(reward=reward))
        self.batches.add(self.desk.closed[-1])
        self.desk.now += 0.001  # no two at once
        return self.desk.closed[-1].id

    def again(self) -> None:
        """As a process that is started after a kill finds it."""
        self.batches = Batches(self.desk.store, **self.how)
        self.batches.load()


@pytest.fixture
def groups(desk) -> Groups:
    return Groups(desk)


def members(given) -> list[list[str]]:
    return [[episode.id for episode in group.episodes] for group in given]


async def test_the_rest_of_a_group_is_waited_for_until_its_time_is_over(groups, desk):
    taking = asyncio.create_task(groups.batches.take(0))
    first = await groups.reward("a", 1.0)
    desk.now += 99.0
    assert await groups.batches.sweep() == []
    second = await groups.reward("a", 0.0)  # the time is since the latest reward
    desk.now += 99.0
    assert await groups.batches.sweep() == []
    assert not taking.done()
    desk.now += 1.0
    assert await groups.batches.sweep() == []
    given = await taking
    assert members(given) == [[first, second]]
    # It is declared partial, and compared as it is.
    assert (given[0].expected, given[0].partial) == (3, True)
    learned = GRPO(GRPOOptions()).learn(given)
    assert (learned.metrics["groups_partial"], learned.metrics["groups_trained"]) == (1, 1)
    assert len(groups.batches) == 0


async def test_one_alone_is_set_aside(groups, desk):
    alone = await groups.reward("a", 1.0)
    desk.now += 100.0
    (incomplete,) = await groups.batches.sweep()
    assert (incomplete.group, incomplete.episode) == ("a", alone)
    assert len(groups.batches) == 0
    groups.again()
    assert len(groups.batches) == 0
    assert await groups.batches.sweep() == []
    # Its reward stays what it is; what comes later under the name begins another group.
    assert desk.store.episode(alone).reward == 1.0
    late = [await groups.reward("a", float(i)) for i in range(3)]
    assert members(await groups.batches.take(0)) == [late]


async def test_the_time_goes_on_while_nobody_serves(groups, desk):
    pair = [await groups.reward("a", 1.0), await groups.reward("a", 0.0)]
    desk.now += 60.0
    groups.again()
    assert await groups.batches.sweep() == []
    assert len(groups.batches) == 2
    desk.now += 40.0
    groups.again()
    given = await groups.batches.take(0)
    assert members(given) == [pair]
    groups.again()  # the step was cut off: it is taken again with the same ones
    assert members(await groups.batches.take(0)) == [pair]


async def test_complete_groups_come_before_those_whose_time_is_over(desk):
    groups = Groups(desk, batch_size=5)
    pair = [await groups.reward("a", 1.0), await groups.reward("a", 0.0)]
    desk.now += 200.0
    whole = [await groups.reward("b", float(i)) for i in range(3)]
    assert members(await groups.batches.take(0)) == [whole, pair]
