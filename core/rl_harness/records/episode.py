"""An episode: one attempt at one task, how it ended and how it was graded."""

from __future__ import annotations

import enum
from typing import Any

import msgspec


class Origin(enum.StrEnum):
    ROLLOUT = "rollout"
    ONLINE = "online"


class Termination(enum.StrEnum):
    """Why the agent stopped. Every value is distinct in reports; none of them is a grade."""

    ANSWER = "answer"  # the agent said it was done
    TURN_LIMIT = "turn_limit"
    TOKEN_LIMIT = "token_limit"
    TIME_LIMIT = "time_limit"
    NO_ACTION = "no_action"  # a reply that neither acts nor ends, where the harness needs one of them
    AGENT_ERROR = "agent_error"  # the agent's own code failed
    HARNESS_ERROR = "harness_error"
    ENGINE_ERROR = "engine_error"
    SANDBOX_ERROR = "sandbox_error"
    # Of a live assistant, whose episode ends when somebody says so:
    REWARDED = "rewarded"  # its reward arrived
    ENDED = "ended"  # its session, or this episode of it, was ended
    EXPIRED = "expired"  # nothing happened for too long, or its session's time was up


class UnscoredReason(enum.StrEnum):
    """Why an episode has no reward. Unscored is not zero: it is left out of means and of training."""

    SANDBOX_ERROR = "sandbox_error"
    ENGINE_ERROR = "engine_error"
    HARNESS_ERROR = "harness_error"
    VERIFIER_TIMEOUT = "verifier_timeout"
    VERIFIER_ERROR = "verifier_error"  # it could not be started, or died without leaving a reward
    REWARD_MISSING = "reward_missing"
    REWARD_INVALID = "reward_invalid"
    NOT_REWARDED = "not_rewarded"  # nobody rewarded it in time (a live assistant's)


#: In :attr:`Episode.seconds`: not a phase of its own but a part of the agent's.
WAITING = "model"


class TaskRef(msgspec.Struct, frozen=True, kw_only=True):
    """Which task, exactly: ``digest`` covers every file of its directory."""

    benchmark: str
    name: str
    split: str
    digest: str


class EpisodeKey(msgspec.Struct, frozen=True, kw_only=True):
    """What an episode is an attempt *at*; a run plans keys, and resuming fills the ones without a result.

    ``phase`` is ``evaluate`` or ``train`` (or a named evaluation such as ``before``); ``step`` the training
    step or 0; ``sample`` the member of the group. Two episodes of one key are retries of each other.
    """

    phase: str
    step: int
    task: str
    sample: int

    def group(self) -> str:
        """Episodes of one task sampled for one update."""
        return f"{self.phase}/{self.step}/{self.task}"

    def __str__(self) -> str:
        return f"{self.group()}/{self.sample}"


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


EMPTY_USAGE = Usage()


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something worth showing later: an exec, a retry, a warning. ``at`` is seconds since the epoch."""

    at: float
    kind: str
    data: dict[str, Any] = {}


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at one task, or what a live assistant did for one reward.

    ``rewards`` are the verifier's named rewards; ``reward`` is the one that counts (``reward``, or the only
    one, or their mean when the task names none). Both are None exactly when ``unscored`` says why.
    ``turn_rewards`` are those given for single turns, by turn id; ``reward`` is the whole's plus all of these.
    ``flags`` holds ``unisolated``, ``tampered`` and ``secrets`` (some of its turns held one, see ``Turn.quarantined``).
    ``seconds`` maps phase (``sandbox``, ``agent``, ``verify``, ``queue``) to wall seconds, and ``model`` to those
    of the agent's in which it waited for a model call.
    """

    id: str
    key: EpisodeKey
    task: TaskRef
    origin: Origin = Origin.ROLLOUT
    attempt: int = 1
    policy_version: int = 0
    termination: Termination
    reward: float | None = None
    rewards: dict[str, float] | None = None
    turn_rewards: dict[str, float] = {}
    unscored: UnscoredReason | None = None
    detail: str = ""
    answer: str | None = None
    flags: tuple[str, ...] = ()
    usage: Usage = EMPTY_USAGE
    started_at: float = 0.0
    seconds: dict[str, float] = {}
    events: tuple[Event, ...] = ()

    def __post_init__(self) -> None:
        if (self.reward is None) != (self.unscored is not None):
            raise ValueError(f"episode {self.id}: it is either scored or unscored with a reason")
