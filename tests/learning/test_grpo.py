"""GRPO: group statistics over episodes, honest counting of groups without signal, named aggregation."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from rl_harness.contracts import BackendCapabilities, LossSpec
from rl_harness.errors import Unsupported, UsageError
from rl_harness.learning import check_loss
from rl_harness.learning.advantages import group_advantages
from rl_harness.learning.grpo import GRPO, GRPOOptions
from rl_harness.records import SamplingParams

rewards = st.lists(st.floats(-10, 10).map(lambda x: round(x, 3)), min_size=2, max_size=12)


def learn(groups, **options):
    return GRPO(GRPOOptions(**options)).learn(groups)


def per_episode(learned, field):
    totals: dict[str, float] = {}
    for sample in learned.samples:
        totals[sample.episode] = totals.get(sample.episode, 0.0) + float(getattr(sample, field).sum())
    return totals


@given(rewards, st.floats(-5, 5))
def test_advantages_have_zero_mean_and_ignore_a_shift(values, shift):
    advantages = group_advantages(values, normalise_std=True)
    if advantages is None:
        assert np.ptp(values) <= 1e-6
        return
    assert abs(advantages.mean()) < 1e-9
    assert np.isclose(advantages.std(ddof=1), 1.0)
    np.testing.assert_allclose(group_advantages([v + shift for v in values], normalise_std=True), advantages, atol=1e-6)
    np.testing.assert_allclose(group_advantages([3 * v for v in values], normalise_std=True), advantages, atol=1e-6)


def test_without_normalisation_the_advantage_keeps_the_reward_scale():
    assert group_advantages([0.0, 4.0], normalise_std=False).tolist() == [-2.0, 2.0]


def test_non_finite_rewards_are_refused():
    with pytest.raises(ValueError, match="not finite"):
        group_advantages([0.0, float("nan")], normalise_std=True)


def test_statistics_count_episodes_not_turns(make_group):
    # A failing episode with ten turns must not drag the baseline down ten times.
    learned = learn([make_group([0.0, 1.0], turns=[10, 1])], normalise_std=False)
    by_episode = {sample.episode: float(sample.advantage[0]) for sample in learned.samples}
    assert by_episode == {"e0": -0.5, "e1": 0.5}


def test_equal_rewards_give_no_signal_and_are_counted(make_group):
    learned = learn([make_group([1.0, 1.0, 1.0]), make_group([0.0, 1.0])])
    assert learned.metrics["groups_no_signal"] == 1
    assert learned.metrics["groups_trained"] == 1
    assert learned.metrics["episodes_trained"] == 2
    assert learned.metrics["reward"] == pytest.approx(4 / 5)


def test_only_groups_without_signal_teach_nothing(make_group):
    learned = learn([make_group([1.0, 1.0])])
    assert learned.samples == ()
    assert learned.metrics["tokens_trained"] == 0


def test_a_partial_group_uses_those_present_and_says_so(make_group):
    learned = learn([make_group([0.0, 1.0], expected=8)], normalise_std=False)
    assert learned.metrics["groups_partial"] == 1
    assert learned.metrics["episodes_missing"] == 6
    assert sorted({float(s.advantage[0]) for s in learned.samples}) == [-0.5, 0.5]


def test_a_group_reduced_to_one_has_no_advantage_and_is_counted(make_group):
    learned = learn([make_group([1.0], expected=8)])
    assert learned.samples == ()
    assert learned.metrics["groups_single"] == 1


def test_a_group_planned_with_one_episode_is_refused(make_group):
    with pytest.raises(UsageError, match="group_size"):
        learn([make_group([1.0], expected=1)])


def test_a_group_of_two_tasks_is_refused(make_group, make_episode):
    group = make_group([0.0, 1.0])
    mixed = msgspec.structs.replace(group, episodes=(group.episodes[0], make_episode("x", 1.0, task="other")))
    with pytest.raises(ValueError, match="mixes the tasks"):
        learn([mixed])


@pytest.mark.parametrize("aggregate", ["token", "turn", "episode"])
def test_weights_of_a_mean_add_up_to_one(make_group, aggregate):
    learned = learn([make_group([0.0, 1.0, 0.5], turns=[1, 3, 7])], aggregate=aggregate)
    assert sum(float(s.weight.sum()) for s in learned.samples) == pytest.approx(1.0)


def test_long_episodes_gain_no_weight_by_default(make_group):
    learned = learn([make_group([0.0, 1.0], turns=[9, 1])])
    assert per_episode(learned, "weight") == pytest.approx({"e0": 0.5, "e1": 0.5})


def test_token_and_turn_aggregation_do_give_them_weight(make_group):
    group = make_group([0.0, 1.0], turns=[3, 1])
    for aggregate in ("token", "turn"):
        assert per_episode(learn([group], aggregate=aggregate), "weight") == pytest.approx({"e0": 0.75, "e1": 0.25})


def test_constant_aggregation_divides_every_token_alike(make_group):
    learned = learn([make_group([0.0, 1.0], turns=[3, 1])], aggregate="constant", constant=100)
    assert [float(w) for s in learned.samples for w in s.weight] == pytest.approx([1 / 200] * 8)


def test_constant_needs_its_number_and_nothing_else_takes_it():
    with pytest.raises(ValidationError, match="go together"):
        GRPOOptions(aggregate="constant")
    with pytest.raises(ValidationError, match="go together"):
        GRPOOptions(constant=5)


def test_discount_follows_the_path(make_group):
    learned = learn([make_group([0.0, 1.0], turns=[1, 2])], gamma=0.5, normalise_std=False)
    assert [float(s.advantage[0]) for s in learned.samples] == [-0.5, 0.25, 0.5]


def test_every_option_reaches_the_loss():
    assert GRPO(GRPOOptions(clip=0.1, clip_high=0.3, kl=0.05, ratio="turn")).loss() == LossSpec(
        target="rl_harness.learning.grpo:GRPOLoss",
        options={"clip_low": 0.1, "clip_high": 0.3, "kl": 0.05, "ratio": "turn"},
    )
    assert GRPO(GRPOOptions()).loss().options["clip_high"] == 0.2


@pytest.mark.parametrize("options", [{"clip": 0.0}, {"clip": 1.0}, {"kl": -1}, {"gamma": 0}, {"unknown": 1}])
def test_impossible_options_are_refused(options):
    with pytest.raises(ValidationError):
        GRPOOptions(**options)


def test_what_could_never_learn_is_refused_before_a_run():
    grpo = GRPO(GRPOOptions())
    grpo.check(group_size=2, sampling=SamplingParams(temperature=0.7))
    with pytest.raises(UsageError, match="group of 1"):
        grpo.check(group_size=1, sampling=SamplingParams())
    with pytest.raises(UsageError, match="greedy"):
        grpo.check(group_size=8, sampling=SamplingParams(temperature=0))


def test_a_loss_that_needs_what_the_backend_lacks_is_refused_before_a_run():
    plain = BackendCapabilities(outputs=frozenset({"logp"}), weight_transports=("file",))
    assert check_loss(GRPO(GRPOOptions()).loss(), plain).unit == "token"
    with pytest.raises(Unsupported, match="needs the output ref_logp"):
        check_loss(GRPO(GRPOOptions(kl=0.1)).loss(), plain)
    for target, words in (("nowhere:X", "cannot be imported"), ("rl_harness.learning.grpo:GRPO", "not a Loss")):
        with pytest.raises(Unsupported, match=words):
            check_loss(LossSpec(target=target), plain)
