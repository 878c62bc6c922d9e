"""REINFORCE with a running baseline: single episodes teach, and what they are compared with goes on."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from rl_harness.errors import UsageError
from rl_harness.learning import returns
from rl_harness.learning.reinforce import Reinforce, ReinforceOptions
from rl_harness.records import Group, SamplingParams
from rl_harness.testing.algorithm import algorithm_checks
from rl_harness.testing.records import a_conversation, an_episode


def single(reward, number=0, **changes):
    episode = msgspec.structs.replace(an_episode(f"t{number}", reward, id=f"e{number}"), **changes)
    return Group(id=f"g{number}", expected=1, episodes=(episode,), turns=(tuple(a_conversation(2)),))


def advantages(learned):
    return {sample.episode: float(sample.advantage[0]) for sample in learned.samples}


@pytest.mark.parametrize("check", algorithm_checks(), ids=lambda check: check.__name__)
def test_conforms(check):
    check(Reinforce(ReinforceOptions()))


def test_an_episode_is_compared_with_those_before_it():
    algorithm = Reinforce(ReinforceOptions(decay=0.5))
    learned = algorithm.learn([single(1.0, 0), single(0.0, 1), single(1.0, 2)])
    # 1 against the start, 0; 0 against 1; 1 against the mean of 1 and 0 with the later one twice as heavy.
    assert advantages(learned) == pytest.approx({"e0": 1.0, "e1": -1.0, "e2": 2 / 3})
    assert learned.metrics["episodes_trained"] == 3
    assert learned.metrics["baseline"] == 0.0


def test_the_baseline_goes_on_in_another_process():
    first, second = Reinforce(ReinforceOptions()), Reinforce(ReinforceOptions())
    first.learn([single(1.0, 0), single(0.5, 1)])
    second.restore(first.state())
    assert advantages(first.learn([single(0.0, 2)])) == advantages(second.learn([single(0.0, 2)]))
    assert second.learn([]).metrics["baseline"] > 0


def test_always_the_same_reward_teaches_nothing_and_that_is_told():
    algorithm = Reinforce(ReinforceOptions())
    algorithm.learn([single(1.0, 0)])
    learned = algorithm.learn([single(1.0, 1), single(1.0, 2)])
    assert learned.samples == ()
    assert learned.metrics["episodes_no_signal"] == 2


def test_a_reward_for_a_turn_counts_for_it_and_for_those_before_it():
    turns = a_conversation(3)
    middle = turns[1].id
    group = single(1.0, 0, rewards=None, turn_rewards={middle: 1.0})
    group = msgspec.structs.replace(group, turns=(tuple(turns),))
    learned = Reinforce(ReinforceOptions(gamma=0.5)).learn([group])
    assert [float(sample.advantage[0]) for sample in learned.samples] == [0.5, 1.0, 0.0]


def test_rewards_of_turns_and_of_the_whole_have_a_baseline_each():
    algorithm = Reinforce(ReinforceOptions())
    turns = a_conversation(1)
    both = single(3.0, 0, rewards={"reward": 1.0}, turn_rewards={turns[0].id: 2.0})
    both = msgspec.structs.replace(both, turns=(tuple(turns),))
    learned = algorithm.learn([both])
    assert float(learned.samples[0].advantage[0]) == 3.0
    assert algorithm.learn([both]).samples == ()


def test_returns_run_along_the_tree():
    turns = a_conversation(3)
    assert returns(turns, 0.5, final=1.0) == [0.25, 0.5, 1.0]
    assert returns(turns, 0.5, final=0.0, rewards={turns[2].id: 4.0, turns[0].id: 1.0}) == [2.0, 2.0, 4.0]
    with pytest.raises(ValueError, match="does not have: other"):
        returns(turns, 1.0, final=0.0, rewards={"other": 1.0})


def test_greedy_sampling_is_refused_and_groups_of_one_are_not():
    algorithm = Reinforce(ReinforceOptions())
    algorithm.check(group_size=1, sampling=SamplingParams(temperature=1.0))
    with pytest.raises(UsageError, match="greedy"):
        algorithm.check(group_size=1, sampling=SamplingParams(temperature=0.0))


def test_weights_add_up():
    learned = Reinforce(ReinforceOptions()).learn([single(1.0, 0), single(0.0, 1)])
    assert np.isclose(sum(float(sample.weight.sum()) for sample in learned.samples), 1.0)
