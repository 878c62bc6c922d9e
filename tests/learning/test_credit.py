"""Reward reaches a turn along its own path, whatever the order of arrival."""

from __future__ import annotations

import pytest
from rl_harness.learning.credit import continued_turn, discounts


def test_a_conversation_is_discounted_from_its_last_turn(make_turn):
    a = make_turn("a", context=[1], completion=[2])
    b = make_turn("b", context=[3], completion=[4], parent=a)
    c = make_turn("c", context=[5], completion=[6], parent=b)
    assert discounts([a, b, c], 0.5) == [0.25, 0.5, 1.0]


def test_parallel_sub_agents_do_not_discount_each_other(make_turn):
    # Two agents share only a system prompt and their calls arrive interleaved (known elsewhere to leak reward).
    a1 = make_turn("a1", context=[1, 1, 7], completion=[2])
    b1 = make_turn("b1", context=[8], completion=[2], parent=a1, shared=2)
    a2 = make_turn("a2", context=[5], completion=[6], parent=a1)
    b2 = make_turn("b2", context=[5], completion=[6], parent=b1)
    assert discounts([a1, b1, a2, b2], 0.5) == [0.5, 0.5, 1.0, 1.0]


def test_a_retry_that_shares_the_prompt_is_a_branch_of_its_own(make_turn):
    first = make_turn("first", context=[1, 2], completion=[3])
    retry = make_turn("retry", context=[], completion=[4], parent=first, shared=2)
    after = make_turn("after", context=[5], completion=[6], parent=retry)
    assert continued_turn(retry, {"first": first}) is None
    assert discounts([first, retry, after], 0.5) == [1.0, 0.5, 1.0]


def test_a_turn_with_several_continuations_gets_their_mean(make_turn):
    root = make_turn("root", context=[1], completion=[2])
    short = make_turn("short", context=[3], completion=[4], parent=root)
    long = make_turn("long", context=[4], completion=[5], parent=root)
    end = make_turn("end", context=[6], completion=[7], parent=long)
    assert discounts([root, short, long, end], 0.5) == [0.5 * (1.0 + 0.5) / 2, 1.0, 0.5, 1.0]


def test_a_branch_from_inside_an_ancestor_finds_it(make_turn):
    a = make_turn("a", context=[1], completion=[2])
    b = make_turn("b", context=[3, 3], completion=[4], parent=a)
    # shares a's whole sequence and one context id of b, but nothing b sampled
    c = make_turn("c", context=[9], completion=[6], parent=b, shared=3)
    assert continued_turn(c, {"a": a, "b": b}) == "a"


def test_a_turn_whose_history_the_template_rewrote_still_goes_on(make_turn):
    # A template that drops earlier reasoning leaves nothing of what the first turn sampled in the second's prompt.
    first = make_turn("first", context=[1, 2], completion=[8, 3])
    second = make_turn("second", context=[3, 4], completion=[5], parent=first, shared=2, extra={"follows": "first"})
    assert discounts([first, second], 0.5) == [0.5, 1.0]


def test_two_turns_of_one_id_are_refused(make_turn):
    a = make_turn("a", context=[1], completion=[2])
    with pytest.raises(ValueError, match="same id"):
        discounts([a, a], 1.0)
