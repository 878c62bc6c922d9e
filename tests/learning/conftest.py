"""Builders of small episodes, turns and groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from rl_harness.records import (
    Episode,
    EpisodeKey,
    Group,
    Message,
    SamplingParams,
    TaskRef,
    Termination,
    Turn,
    ids,
    logps,
)


@pytest.fixture
def make_turn() -> Callable[..., Turn]:
    def make(
        id: str,
        *,
        context: Sequence[int],
        completion: Sequence[int],
        parent: Turn | None = None,
        shared: int | None = None,
        prompt_tokens: int | None = None,
        **more: object,
    ) -> Turn:
        if parent is not None and shared is None:
            shared = parent.prompt_tokens + len(parent.completion)
        defaults: dict[str, object] = {
            "session": "s",
            "index": 0,
            "policy": "policy",
            "sampling": SamplingParams(),
            "finish_reason": "stop",
            "message": Message(role="assistant"),
            "completion_tokens": len(completion),
            "logps": logps([-1.0] * len(completion)),
            "versions": ids([0] * len(completion)),
        }
        return Turn(
            id=id,
            parent=None if parent is None else parent.id,
            shared=shared or 0,
            context=ids(context),
            completion=ids(completion),
            prompt_tokens=(shared or 0) + len(context) if prompt_tokens is None else prompt_tokens,
            **(defaults | more),  # type: ignore[arg-type]
        )

    return make


@pytest.fixture
def make_episode() -> Callable[..., Episode]:
    def make(id: str, reward: float = 0.0, task: str = "t") -> Episode:
        return Episode(
            id=id,
            key=EpisodeKey(phase="train", step=1, task=task, sample=0),
            task=TaskRef(benchmark="b", name=task, split="train", digest="d"),
            termination=Termination.ANSWER,
            reward=reward,
        )

    return make


@pytest.fixture
def make_group(make_turn: Callable[..., Turn], make_episode: Callable[..., Episode]) -> Callable[..., Group]:
    def make(rewards: Sequence[float], *, turns: Sequence[int] | None = None, expected: int | None = None) -> Group:
        """One episode a reward; ``turns[i]`` says how many turns of two tokens episode i has."""
        counts = turns or [1] * len(rewards)
        conversations = []
        for i, count in enumerate(counts):
            conversation: list[Turn] = []
            for j in range(count):
                conversation.append(
                    make_turn(
                        f"e{i}t{j}",
                        context=[1, 2, 3],
                        completion=[10 + i, 20 + j],
                        parent=conversation[-1] if conversation else None,
                        index=j,
                    )
                )
            conversations.append(tuple(conversation))
        return Group(
            id="train/1/t",
            expected=len(rewards) if expected is None else expected,
            episodes=tuple(make_episode(f"e{i}", reward) for i, reward in enumerate(rewards)),
            turns=tuple(conversations),
        )

    return make
