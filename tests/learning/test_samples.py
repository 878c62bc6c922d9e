"""Samples carry the recorded ids, one sample a turn."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from rl_harness.errors import Unsupported, UsageError
from rl_harness.learning.samples import check_samples, samples_of
from rl_harness.records import SamplingParams, ids, logps


def test_each_turn_is_a_sample_of_the_recorded_ids(make_turn, make_episode):
    # [53122, 316] and [393, 30002] decode to the same text in one tokenizer: only recorded ids tell them apart.
    first = make_turn("first", context=[1, 2], completion=[53122, 316])
    second = make_turn("second", context=[7], completion=[393, 30002], parent=first)
    one, two = samples_of(make_episode("e"), [first, second], group="g", advantage=2.0, gamma=0.5)
    assert one.prompt.tolist() == [1, 2]
    assert one.completion.tolist() == [53122, 316]
    assert two.prompt.tolist() == [1, 2, 53122, 316, 7]
    assert two.completion.tolist() == [393, 30002]
    assert one.advantage.tolist() == [1.0, 1.0]
    assert two.advantage.tolist() == [2.0, 2.0]
    assert one.mask.tolist() == [1.0, 1.0]
    assert one.behaviour_logps is first.logps


def test_a_long_response_keeps_every_token(make_turn, make_episode):
    turn = make_turn("long", context=[1], completion=range(5000))
    (sample,) = samples_of(make_episode("e"), [turn], group="g", advantage=1.0, gamma=1.0)
    assert sample.completion.tolist() == list(range(5000))


def test_a_turn_that_was_not_recorded_by_token_is_refused(make_turn, make_episode):
    turn = make_turn("remote", context=[], completion=[], exact=False, completion_tokens=9, prompt_tokens=4)
    with pytest.raises(Unsupported, match="turn remote"):
        samples_of(make_episode("e"), [turn], group="g", advantage=1.0, gamma=1.0)


def test_a_turn_without_tokens_gives_no_sample(make_turn, make_episode):
    assert (
        samples_of(
            make_episode("e"), [make_turn("none", context=[1], completion=[])], group="g", advantage=1.0, gamma=1.0
        )
        == []
    )


@pytest.mark.parametrize(
    ("sampling", "word"),
    [
        (SamplingParams(temperature=0.0), "greedy"),
        (SamplingParams(top_p=0.9), "top_p=0.9"),
        (SamplingParams(top_k=5), "top_k=5"),
        (SamplingParams(min_p=0.1), "min_p=0.1"),
    ],
)
def test_truncated_or_greedy_sampling_is_refused(make_turn, make_episode, sampling, word):
    turn = make_turn("a", context=[1], completion=[2], sampling=sampling)
    with pytest.raises(UsageError, match=word):
        samples_of(make_episode("e"), [turn], group="g", advantage=1.0, gamma=1.0)


def test_bad_numbers_are_named_before_any_computation(make_turn, make_episode):
    (good,) = samples_of(
        make_episode("e"), [make_turn("a", context=[1], completion=[2, 3])], group="g", advantage=1.0, gamma=1.0
    )
    check_samples([good], vocab_size=4)
    with pytest.raises(ValueError, match="turn a: completion has id 3, outside the vocabulary of 3"):
        check_samples([good], vocab_size=3)
    with pytest.raises(ValueError, match="prompt has id -1"):
        check_samples([msgspec.structs.replace(good, prompt=ids([-1]))], vocab_size=4)
    for bad in (np.nan, np.inf):
        with pytest.raises(ValueError, match="behaviour_logps has a value that is not finite"):
            check_samples([msgspec.structs.replace(good, behaviour_logps=logps([bad, 0.0]))], vocab_size=4)
