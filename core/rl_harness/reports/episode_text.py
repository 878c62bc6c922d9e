"""``runs show --task`` for people: each attempt from its heading down to every turn and command, in order of time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from rl_harness.excerpts import printable
from rl_harness.records import Episode, Event, Message
from rl_harness.reports.episode_report import EpisodeReport, TaskReport, TurnReport
from rl_harness.reports.tables import duration, number

#: Characters shown of one prompt, completion or output; ``--json`` has all that is recorded.
_MOST = 4000


def task_text(report: TaskReport) -> str:
    """The whole report in plain characters."""
    attempts = "attempt" if len(report.episodes) == 1 else "attempts"
    heading = f"{report.path}: task {report.task}, {len(report.episodes)} {attempts}"
    if report.undecoded is not None and any(turn.exact for e in report.episodes for turn in e.turns):
        heading += f"\nprompts are not shown as text: {report.undecoded}"
    return "\n\n".join([heading, *("\n".join(_episode(episode)) for episode in report.episodes)])


def _episode(report: EpisodeReport) -> Iterator[str]:
    episode = report.episode
    uncounted = "" if report.counts else " (does not count)"
    yield f"{episode.key}, attempt {episode.attempt}{uncounted}: {_result(episode)}"
    yield f"  ended by {episode.termination.value}, started {_clock(episode.started_at)}, policy version " + str(
        episode.policy_version
    )
    if episode.detail:
        yield from _block("detail", episode.detail)
    if episode.answer is not None:
        yield from _block("answer", episode.answer)
    if episode.flags:
        yield f"  flags: {', '.join(episode.flags)}"
    phases = [f"{phase} {number(seconds)}" for phase, seconds in episode.seconds.items()]
    usage = episode.usage
    yield f"  seconds: {', '.join(phases) or 'not recorded'}"
    yield (
        f"  turns {usage.turns}  tokens: prompt {usage.prompt_tokens} (cached {usage.cached_tokens}), "
        f"completion {usage.completion_tokens}"
    )
    happened: list[tuple[float, Iterator[str]]] = [(turn.started_at, _turn(turn)) for turn in report.turns]
    happened += [(event.at, _event(event)) for event in episode.events]
    for _, lines in sorted(happened, key=lambda item: item[0]):
        yield ""
        yield from lines


def _result(episode: Episode) -> str:
    if episode.unscored is not None:
        return f"unscored, {episode.unscored.value}"
    rewards = episode.rewards or {}
    named = ", ".join(f"{name} {number(value)}" for name, value in rewards.items()) if len(rewards) > 1 else ""
    return f"reward {number(episode.reward)}" + (f" ({named})" if named else "")


def _turn(turn: TurnReport) -> Iterator[str]:
    after = "" if turn.after is None else f", {turn.new_tokens} new after turn {turn.after + 1}"
    yield (
        f"  turn {turn.index + 1}, {duration(turn.seconds)}: prompt {turn.prompt_tokens} tokens (cached "
        f"{turn.cached_tokens}{after}), completion {turn.completion_tokens} tokens, {turn.finish_reason}"
    )
    if turn.quarantined:
        yield f"    held a secret ({', '.join(turn.quarantined)}): kept without ids, and not trained on"
    if turn.prompt is not None:
        yield from _block("prompt" if turn.after is None else "prompt, what is new", turn.prompt)
    yield from _block("completion", turn.completion if turn.completion is not None else _said(turn.message))


def _said(message: Message) -> str:
    parts = [f"(reasoning) {message.reasoning}"] if message.reasoning else []
    parts += [message.content] if message.content else []
    parts += [f"(tool call) {call.name} {call.arguments}" for call in message.tool_calls]
    return "\n".join(parts)


def _event(event: Event) -> Iterator[str]:
    data = dict(event.data)
    if event.kind != "exec":
        yield f"  event {event.kind}"
        for name, value in data.items():
            yield from _block(name, str(value))
        return
    yield f"  command, {duration(data.get('seconds'))}: {_outcome(data)}"
    yield from _block("command", str(data.get("command", "")))
    if "output" in data:
        yield from _block("output", str(data["output"]))


def _outcome(data: dict[str, Any]) -> str:
    said = "timed out" if data.get("timed_out") else f"exit code {data.get('exit_code')}"
    return f"{said}, output truncated" if data.get("truncated") else said


def _block(name: str, text: str) -> Iterator[str]:
    """A name and a text of any number of lines, marked at the left so that nothing in it passes for ours."""
    yield f"    {name}:"
    for line in _shortened(text).splitlines() or ["(empty)"]:
        yield f"    | {printable(line)}"


def _shortened(text: str) -> str:
    if len(text) <= _MOST:
        return text
    head = _MOST // 4  # what is new stands at the end
    left_out = f"[... {len(text) - _MOST} characters left out; --json has them ...]"
    return f"{text[:head]}\n{left_out}\n{text[-(_MOST - head) :]}"


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
