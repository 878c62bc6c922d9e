"""Summaries: what counts, what is left out, and that what is left out is seen."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rl_harness.records import Termination, UnscoredReason, Usage
from rl_harness.reports import paired_difference, passes, summarise
from rl_harness.reports.statistics import wilson
from rl_harness.testing.records import an_episode


def attempts(*rewards: float | None, task: str = "task-0"):
    return [an_episode(task, reward, sample=i) for i, reward in enumerate(rewards)]


def tasks(*rewards: float | None, **more):
    return [an_episode(f"task-{i}", reward, **more) for i, reward in enumerate(rewards)]


def test_eleven_of_a_hundred():
    summary = summarise(tasks(*[1.0] * 11, *[0.0] * 89))
    assert (summary.passed, summary.scored, summary.pass_rate) == (11, 100, 0.11)
    assert (summary.low, summary.high) == wilson(11, 100)
    assert summary.reward_mean == pytest.approx(0.11)
    assert summary.reward_low < 0.11 < summary.reward_high


def test_unscored_is_not_zero_and_not_forgotten():
    """Infrastructure failure counted as failed, or vanished from the denominator without a word."""
    summary = summarise(
        [
            *tasks(1.0, 0.0),
            an_episode("a", None),
            an_episode("b", None),
            an_episode("c", None, unscored=UnscoredReason.VERIFIER_TIMEOUT),
        ]
    )
    assert (summary.pass_rate, summary.reward_mean, summary.scored, summary.episodes) == (0.5, 0.5, 2, 5)
    assert summary.unscored == {"sandbox_error": 2, "verifier_timeout": 1}
    assert summary.scored + summary.unscored_total == summary.episodes


def test_what_went_wrong_is_told_once_a_reason():
    """A count of unscored episodes, and nowhere a word of why."""
    dead = an_episode("a", None, detail="the machine\n died")
    crashed = an_episode("b", 0.0, termination=Termination.AGENT_ERROR, detail="ValueError: broken")
    summary = summarise([dead, an_episode("c", None), crashed, an_episode("d", 1.0)])
    assert summary.because == {"sandbox_error": "a: the machine\n died", "agent_error": "b: ValueError: broken"}


@pytest.mark.parametrize("episodes", [[], tasks(None, None)])
def test_nothing_scored_has_no_rate(episodes):
    summary = summarise(episodes)
    assert (summary.pass_rate, summary.low, summary.high, summary.reward_mean) == (None,) * 4
    assert summary.unscored_total == len(episodes)
    assert summary.pass_at_k[0].value is None


@pytest.mark.parametrize(
    ("reward", "passed"), [(1.0, True), (1 - 1e-10, True), (0.999, False), (None, False), (2.0, True)]
)
def test_a_task_passes_at_reward_one(reward, passed):
    assert passes(an_episode(reward=reward)) is passed


def test_pass_at_k_over_the_tasks_that_have_k_attempts():
    episodes = [
        *attempts(1.0, 0.0, 0.0, 0.0, task="a"),
        *attempts(0.0, 0.0, 0.0, 0.0, task="b"),
        *attempts(1.0, 1.0, None, None, task="c"),  # too few scored for pass@4
    ]
    one, two, four = summarise(episodes, k=(1, 2, 4)).pass_at_k
    assert one.value == pytest.approx((0.25 + 0 + 1) / 3)
    assert two.value == pytest.approx((0.5 + 0 + 1) / 3)
    assert (four.value, four.tasks, four.left_out) == (0.5, 2, 1)


def test_several_attempts_at_few_tasks_do_not_make_a_narrow_interval():
    few = summarise([*attempts(*[1.0] * 10, task="a"), *attempts(*[0.0] * 10, task="b")])
    many = summarise(tasks(*[1.0] * 10, *[0.0] * 10))
    assert few.pass_rate == many.pass_rate == 0.5
    assert few.high - few.low > 1.5 * (many.high - many.low)


def test_totals_terminations_flags_and_the_slowest():
    episodes = [
        an_episode("fast", seconds={"queue": 100.0, "agent": 1.0}),
        an_episode("slow", 0.0, seconds={"agent": 9.0, "verify": 1.0}, termination=Termination.TIME_LIMIT),
        an_episode("odd", 0.0, seconds={}, flags=("tampered", "unisolated"), termination=Termination.TURN_LIMIT),
    ]
    summary = summarise(episodes)
    assert summary.seconds == {"queue": 100.0, "agent": 10.0, "verify": 1.0}
    assert [slow.task for slow in summary.slowest] == ["slow", "fast"]  # waiting for one's turn is not slowness
    assert summary.terminations == {"answer": 1, "time_limit": 1, "turn_limit": 1}
    assert summary.flags == {"tampered": 1, "unisolated": 1}
    assert (summary.turns, summary.prompt_tokens, summary.completion_tokens) == (6, 90, 60)


def test_tokens_a_second_are_over_the_time_in_which_episodes_ran():
    usage = Usage(turns=1, prompt_tokens=300, cached_tokens=100, completion_tokens=50)
    starts = {"a": 100.0, "b": 102.0, "resumed-next-day": 100_000.0}
    episodes = [
        msgspec.structs.replace(an_episode(name, usage=usage, seconds={"agent": 4.0}), started_at=start)
        for name, start in starts.items()
    ]
    summary = summarise(episodes)
    assert summary.wall_seconds == 10.0  # 6 with two at once, then 4
    assert summary.tokens_per_second == {"prompt": 90.0, "cached": 30.0, "sampled": 15.0}
    assert summarise([an_episode("no engine", usage=Usage())]).tokens_per_second is None


rewards = st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0.0, 0.5, 1.0, None])), max_size=30)


@given(rewards, st.randoms())
def test_order_does_not_matter(drawn, rng):
    episodes = [an_episode(f"task-{t}", reward, sample=i) for i, (t, reward) in enumerate(drawn)]
    shuffled = list(episodes)
    rng.shuffle(shuffled)
    one, two = summarise(episodes, k=(1, 2)), summarise(shuffled, k=(1, 2))
    assert (one.passed, one.scored, one.unscored) == (two.passed, two.scored, two.unscored)
    assert (one.reward_low, one.reward_high) == (two.reward_low, two.reward_high)
    assert (one.low, one.high) == pytest.approx((two.low, two.high)) if one.scored else two.low is None
    assert [p.value for p in one.pass_at_k] == pytest.approx([p.value for p in two.pass_at_k])


def test_a_difference_is_taken_task_by_task():
    difference = paired_difference(tasks(0.0, 0.0, 1.0, 1.0), tasks(1.0, 1.0, 1.0, 0.0))
    assert difference.value == 0.25
    assert difference.low <= 0.25 <= difference.high
    assert (difference.gained, difference.lost) == (("task-0", "task-1"), ("task-3",))


def test_pairing_narrows_what_tasks_have_in_common():
    first, second = tasks(*[0.0, 1.0] * 50), tasks(*[0.0, 1.0] * 49, 1.0, 1.0)
    difference = paired_difference(first, second)
    assert difference.value == pytest.approx(0.01)
    assert difference.high - difference.low < 0.05


def test_only_equal_tasks_scored_on_both_sides_are_compared():
    first = [*tasks(0.0, 0.0, None), an_episode("gone")]
    second = [
        an_episode("task-0", 1.0),
        an_episode("task-1", 1.0, digest="sha256:1"),
        an_episode("task-2"),
        an_episode("new"),
    ]
    difference = paired_difference(first, second)
    assert (difference.tasks, difference.value) == (1, 1.0)
    assert difference.changed == ("task-1",)
    assert (difference.unscored, difference.only_first, difference.only_second) == (1, 1, 1)
    assert paired_difference(tasks(1.0), tasks(None)) is None


def slow(*, waited: float, count: int, termination: Termination = Termination.TIME_LIMIT):
    seconds = {"agent": 20.0, "model": waited}
    return [an_episode(f"slow-{i}", 0.0, termination=termination, seconds=seconds) for i in range(count)]


def test_episodes_that_waited_for_the_model_until_their_time_was_up_are_counted():
    """A busy machine's episodes scored zero without a word."""
    others = slow(waited=5.0, count=2) + slow(waited=20.0, count=1, termination=Termination.ANSWER) + tasks(1.0)
    assert summarise([*others, *slow(waited=19.0, count=3)]).out_of_time == 3
    assert summarise(others).out_of_time == 0


def test_waiting_for_the_model_is_part_of_the_agents_time():
    (slowest,) = summarise(slow(waited=19.0, count=1)).slowest
    assert slowest.seconds == 20.0
