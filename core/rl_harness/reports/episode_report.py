"""One task of a run, every attempt in full: the data behind ``runs show --task``."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

import msgspec

from rl_harness.errors import UnknownName
from rl_harness.records import Episode, Message, Turn
from rl_harness.records.arrays import IdArray
from rl_harness.runs.info import DATABASE, read_info
from rl_harness.runs.store import reading

Decode = Callable[[IdArray], str]


class TurnReport(msgspec.Struct, frozen=True, kw_only=True):
    """One model call. ``prompt`` is the text of the prompt's last ``new_tokens`` ids, those that follow what turn
    ``after`` (an index; None: from the beginning) had said by then. ``prompt`` and ``completion`` are None where the
    ids cannot be decoded here, or the model's address gave none; ``message`` is what the agent was given, without the
    secrets that ``quarantined`` names."""

    index: int
    after: int | None
    started_at: float
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    completion_tokens: int
    finish_reason: str
    exact: bool
    prompt: str | None
    completion: str | None
    message: Message
    quarantined: tuple[str, ...] = ()


class EpisodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """``counts``: this is the attempt whose result stands for its key."""

    episode: Episode
    counts: bool
    turns: tuple[TurnReport, ...]


class TaskReport(msgspec.Struct, frozen=True, kw_only=True):
    """``undecoded`` says why there is no text of prompts and completions, if that is so."""

    path: str
    task: str
    undecoded: str | None
    episodes: tuple[EpisodeReport, ...]


def show_task(
    path: Path, task: str, *, phase: str | None = None, decode: Decode | None = None, undecoded: str | None = None
) -> TaskReport:
    """Every attempt at ``task`` in the run at ``path``, of one phase or of all, in the order they were stored.

    ``decode`` turns token ids into text; without it ``undecoded`` says why. UnknownName names near tasks."""
    read_info(path)
    with reading(path / DATABASE) as store:
        episodes = store.episodes(phase, task=task, attempts=True)
        if not episodes:
            raise _unknown(path, task, phase, store.tasks(), store.tasks(phase))
        counted = {episode.id for episode in store.episodes(phase, task=task)}
        reports = tuple(
            EpisodeReport(
                episode=episode,
                counts=episode.id in counted,
                turns=_turns(store.turns(episode.id), decode),
            )
            for episode in episodes
        )
    return TaskReport(path=str(path), task=task, undecoded=undecoded, episodes=reports)


def _unknown(path: Path, task: str, phase: str | None, everywhere: list[str], there: list[str]) -> UnknownName:
    if task in everywhere:
        return UnknownName(f"{path}: task {task!r} has no episode of phase {phase!r}", remedy="leave --phase out")
    near = difflib.get_close_matches(task, there, n=3, cutoff=0.5) or there[:3]
    if not near:
        return UnknownName(f"{path}: there is no episode yet" + (f" of phase {phase!r}" if phase else ""))
    return UnknownName(f"{path}: there is no episode of a task {task!r}", remedy=f"did you mean {' or '.join(near)}?")


def _turns(turns: list[Turn], decode: Decode | None) -> tuple[TurnReport, ...]:
    indexes = {turn.id: turn.index for turn in turns}
    return tuple(
        TurnReport(
            index=turn.index,
            after=indexes.get(turn.parent) if turn.parent is not None else None,
            started_at=turn.started_at,
            seconds=turn.seconds,
            prompt_tokens=turn.prompt_tokens,
            cached_tokens=turn.cached_tokens,
            new_tokens=len(turn.context),
            completion_tokens=turn.completion_tokens,
            finish_reason=turn.finish_reason,
            exact=turn.exact,
            prompt=decode(turn.context) if decode and turn.exact else None,
            completion=decode(turn.completion) if decode and turn.exact else None,
            message=turn.message,
            quarantined=turn.quarantined,
        )
        for turn in turns
    )
