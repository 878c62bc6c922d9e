"""A reward as it arrives: for the whole of what a session did since its last one, for one turn of it, or by names."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import msgspec

from rl_harness.gateway.errors import ApiError, bad_request

#: The name of a reward that has none.
WHOLE = "reward"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_MOST_NAMES = 64


class Reward(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of ``POST /rl/reward``: exactly one of ``reward`` (for the whole, or with ``turn`` or ``name`` for that)
    and ``rewards`` (by name). ``turn`` is a turn's id or the id of the reply. ``end``: nothing more comes for this
    episode. ``replace``: in place of what there is."""

    reward: float | None = None
    rewards: dict[str, float] = {}
    turn: str | None = None
    name: str | None = None
    replace: bool = False
    end: bool = False

    @property
    def named(self) -> Mapping[str, float]:
        """Rewards for the whole, by name."""
        if self.turn is not None or self.reward is None:
            return self.rewards
        return {WHOLE if self.name is None else self.name: self.reward}


def parse_reward(data: bytes) -> Reward:
    """Raises :class:`ApiError` (400) that says what is wrong with it."""
    try:
        reward = msgspec.json.decode(data, type=Reward)
    except msgspec.ValidationError as error:
        raise bad_request(f"the reward cannot be taken: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise bad_request(
            'the body is not JSON, such as {"reward": 1.0}; a reward is a finite number, NaN and Infinity are none'
        ) from None
    check_reward(reward)
    return reward


def check_reward(reward: Reward) -> None:
    if (reward.reward is None) == (not reward.rewards):
        raise bad_request("give either 'reward' or 'rewards'", param="reward")
    if reward.rewards and (reward.turn is not None or reward.name is not None):
        raise bad_request("'turn' and 'name' go with 'reward', not with 'rewards'", param="rewards")
    if reward.turn is not None and reward.name is not None:
        raise bad_request("a reward for a turn has no name", param="name")
    if len(reward.rewards) > _MOST_NAMES:
        raise bad_request(f"at most {_MOST_NAMES} named rewards", param="rewards")
    for name, value in {**reward.rewards, **reward.named}.items():
        if not _NAME.fullmatch(name):
            raise bad_request(f"{name[:80]!r} is no name: letters, digits, '_', '.' and '-', at most 64", param="name")
        _check_finite(value)
    if reward.reward is not None:
        _check_finite(reward.reward)


def _check_finite(value: float) -> None:
    if not math.isfinite(value):
        raise bad_request(f"a reward is a finite number, not {value}", param="reward")


def total(rewards: Mapping[str, float], turn_rewards: Mapping[str, float]) -> float | None:
    """What an episode's rewards come to: the one without a name, else the mean of the named ones, plus those of single
    turns. None if there are none."""
    if not rewards and not turn_rewards:
        return None
    whole = rewards.get(WHOLE)
    if whole is None and rewards:
        whole = math.fsum(rewards.values()) / len(rewards)
    return (whole or 0.0) + math.fsum(turn_rewards.values())


def conflict(message: str, code: str) -> ApiError:
    return ApiError(409, message, type="conflict", code=code)
