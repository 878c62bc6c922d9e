"""A reward is a finite number or named finite numbers; nothing else is (known fault 33)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rl_harness.tasks.rewards import InvalidReward, combine, main_reward, parse_json, parse_text


@pytest.mark.parametrize(
    ("data", "rewards"),
    [
        (b"1", {"reward": 1.0}),
        (b" 0.5\n", {"reward": 0.5}),
        (b'{"reward": 1}', {"reward": 1.0}),
        (b'{"style": 0.5, "tests": 1}', {"style": 0.5, "tests": 1.0}),
        (b"-2", {"reward": -2.0}),
    ],
)
def test_json_numbers(data, rewards):
    assert parse_json(data) == rewards


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"true",
        b"null",
        b'"1"',
        b"[1]",
        b"{}",
        b"NaN",
        b"Infinity",
        b"-Infinity",
        b"1e999",
        b"1" + b"0" * 400,
        b'{"reward": true}',
        b'{"reward": "1"}',
        b'{"reward": null}',
        b'{"reward": NaN}',
        b'{"reward": {"inner": 1}}',
        b'{"reward": 0, "reward": 1}',
        b"1 1",
        b"\xff",
        b"[" * 30000,
        b"1" * 5000,
    ],
)
def test_json_that_is_no_reward(data):
    with pytest.raises(InvalidReward):
        parse_json(data)


@pytest.mark.parametrize(
    ("data", "value"), [(b"1", 1.0), (b"0.25\n", 0.25), (b"-1", -1.0), (b"1e-2", 0.01), (b".5", 0.5)]
)
def test_text_numbers(data, value):
    assert parse_text(data) == {"reward": value}


@pytest.mark.parametrize(
    "data", [b"", b"nan", b"inf", b"1_0", b"true", b"one", b"1 0", b"1\n0", b"0x1", b"1e999", b"\xff", b"\xd9\xa1"]
)
def test_text_that_is_no_reward(data):
    with pytest.raises(InvalidReward):
        parse_text(data)


def test_both_files_must_agree_on_the_reward_that_counts():
    assert combine(b'{"reward": 1, "speed": 0.5}', b"1.0") == {"reward": 1.0, "speed": 0.5}
    with pytest.raises(InvalidReward, match=r"says 1\.0 and reward\.txt says 0\.0"):
        combine(b"1", b"0")
    with pytest.raises(InvalidReward):
        combine(b"1", b"nan")
    assert combine(None, None) is None


def test_the_reward_that_counts():
    assert main_reward({"reward": 0.5, "other": 1}) == 0.5
    assert main_reward({"tests": 0.25}) == 0.25
    assert main_reward({"a": 0.0, "b": 1.0}) == 0.5


@given(st.binary(max_size=200))
def test_any_bytes_are_a_reward_or_refused(data):
    for parse in (parse_json, parse_text):
        try:
            rewards = parse(data)
        except InvalidReward:
            continue
        assert all(isinstance(value, float) and abs(value) < float("inf") for value in rewards.values())
