"""Small, valid records for tests: an episode and its conversation, all but the interesting part filled in."""

from __future__ import annotations

from rl_harness.records import (
    Episode,
    EpisodeKey,
    Message,
    SamplingParams,
    TaskRef,
    Termination,
    Turn,
    UnscoredReason,
    Usage,
    ids,
    logps,
)

TWO_TURNS = Usage(turns=2, prompt_tokens=30, completion_tokens=20)


def an_episode(
    task: str = "task-0",
    reward: float | None = 1.0,
    *,
    phase: str = "evaluate",
    step: int = 0,
    sample: int = 0,
    attempt: int = 1,
    id: str | None = None,
    unscored: UnscoredReason | None = None,
    termination: Termination = Termination.ANSWER,
    digest: str = "sha256:0",
    benchmark: str = "bench",
    flags: tuple[str, ...] = (),
    usage: Usage = TWO_TURNS,
    seconds: dict[str, float] | None = None,
    detail: str = "",
) -> Episode:
    """An episode; without a reward it is unscored because of its sandbox unless ``unscored`` says otherwise."""
    key = EpisodeKey(phase=phase, step=step, task=task, sample=sample)
    if reward is None and unscored is None:
        unscored = UnscoredReason.SANDBOX_ERROR
    return Episode(
        id=id if id is not None else f"{key}/{attempt}",
        key=key,
        task=TaskRef(benchmark=benchmark, name=task, split="heldout", digest=digest),
        attempt=attempt,
        termination=termination,
        reward=reward,
        rewards=None if reward is None else {"reward": reward},
        unscored=unscored,
        detail=detail,
        flags=flags,
        usage=usage,
        seconds=seconds if seconds is not None else {"sandbox": 0.1, "agent": 1.0, "verify": 0.2},
    )


def a_conversation(turns: int = 2, *, new_tokens: int = 10, completion: int = 10, session: str = "s") -> list[Turn]:
    """Turns that each continue the one before: its whole sequence, ``new_tokens`` more, then a completion."""
    made: list[Turn] = []
    length = 0
    for index in range(turns):
        parent = made[-1] if made else None
        made.append(
            Turn(
                id=f"{session}-{index}",
                session=session,
                index=index,
                policy="policy",
                sampling=SamplingParams(max_tokens=completion, seed=index),
                parent=parent.id if parent else None,
                shared=length,
                context=ids(range(length, length + new_tokens)),
                completion=ids(range(1000, 1000 + completion)),
                logps=logps([-0.5 - i / 64 for i in range(completion)]),
                versions=ids([3] * completion),
                finish_reason="stop",
                message=Message(role="assistant", content=f"turn {index}"),
                prompt_tokens=length + new_tokens,
                completion_tokens=completion,
            )
        )
        length += new_tokens + completion
    return made
