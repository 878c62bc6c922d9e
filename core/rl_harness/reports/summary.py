"""What a set of episodes amounts to: rates with intervals, and everything that must stand beside them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from rl_harness.records import Episode, Termination
from rl_harness.records.episode import WAITING
from rl_harness.reports.statistics import Interval, bootstrap_mean, clustered_wilson, pass_at_k

_SLOWEST = 5


def passes(episode: Episode) -> bool:
    """A task is passed when its reward is 1."""
    return episode.reward is not None and episode.reward >= 1.0 - 1e-9


class PassAtK(msgspec.Struct, frozen=True, kw_only=True):
    """pass@k averaged over the ``tasks`` with at least k scored episodes; ``left_out`` tasks had fewer."""

    k: int
    value: float | None
    tasks: int
    left_out: int


class Slow(msgspec.Struct, frozen=True, kw_only=True):
    task: str
    episode: str
    seconds: float
    termination: str


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """``scored`` is the denominator of ``pass_rate`` and ``reward_mean``; ``unscored`` (reason to count) is what is
    missing from it. Rates are None when nothing is scored. ``because`` maps each of those reasons, and ``agent_error``,
    to what went wrong in one such episode.

    ``low`` and ``high`` bound the pass rate at 95 % (Wilson; clustered by task when tasks were attempted more than
    once), ``reward_low`` and ``reward_high`` the mean reward (percentile bootstrap over tasks, seeded; None where
    rewards do not vary). ``out_of_time`` episodes were ended by the time limit while for most of their agent's time a
    model call was being answered: they say how fast the model is served. ``seconds`` are totals by phase;
    ``wall_seconds`` those in which at least one of the episodes ran, so that neither concurrency nor a pause before
    resuming counts. ``tokens_per_second`` is over these: ``prompt`` (of which ``cached`` were not computed anew) and
    ``sampled``; None where the engine reports no tokens.
    """

    episodes: int
    tasks: int
    scored: int
    passed: int
    pass_rate: float | None
    low: float | None
    high: float | None
    pass_at_k: tuple[PassAtK, ...]
    reward_mean: float | None
    reward_low: float | None
    reward_high: float | None
    unscored: dict[str, int]
    because: dict[str, str]
    terminations: dict[str, int]
    out_of_time: int
    flags: dict[str, int]
    turns: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    seconds: dict[str, float]
    wall_seconds: float
    tokens_per_second: dict[str, float] | None
    slowest: tuple[Slow, ...]

    @property
    def unscored_total(self) -> int:
        return sum(self.unscored.values())


def summarise(episodes: Iterable[Episode], *, k: Sequence[int] = (1,), seed: int = 0) -> Summary:
    """Summarise episodes, one for each key (earlier attempts that do not count are not to be passed in)."""
    episodes = list(episodes)
    scored = [episode for episode in episodes if episode.reward is not None]
    by_task: dict[tuple[str, str], list[Episode]] = {}
    for episode in episodes:
        by_task.setdefault((episode.task.benchmark, episode.task.name), []).append(episode)
    by_task = dict(sorted(by_task.items()))  # so that the bootstrap does not depend on which episode ended first
    rewards = [[e.reward for e in group if e.reward is not None] for group in by_task.values()]
    totals = [len(group) for group in rewards]
    passed = [sum(passes(e) for e in group) for group in by_task.values()]
    with_score = [i for i, total in enumerate(totals) if total]
    rate = low = high = mean = None
    reward_interval: Interval | None = None
    if scored:
        rate = sum(passed) / len(scored)
        low, high = clustered_wilson([passed[i] for i in with_score], [totals[i] for i in with_score])
        sums = [math.fsum(rewards[i]) for i in with_score]
        mean = math.fsum(sums) / len(scored)
        reward_interval = bootstrap_mean(sums, [totals[i] for i in with_score], seed=seed)
    wall = _wall_seconds(episodes)
    return Summary(
        episodes=len(episodes),
        tasks=len(by_task),
        scored=len(scored),
        passed=sum(passed),
        pass_rate=rate,
        low=low,
        high=high,
        pass_at_k=tuple(_pass_at(n, passed, totals) for n in k),
        reward_mean=mean,
        reward_low=reward_interval.low if reward_interval else None,
        reward_high=reward_interval.high if reward_interval else None,
        unscored=_counted(e.unscored.value for e in episodes if e.unscored is not None),
        because=_because(episodes),
        terminations=_counted(e.termination.value for e in episodes),
        out_of_time=sum(map(_out_of_time, episodes)),
        flags=_counted(flag for e in episodes for flag in e.flags),
        turns=sum(e.usage.turns for e in episodes),
        prompt_tokens=sum(e.usage.prompt_tokens for e in episodes),
        cached_tokens=sum(e.usage.cached_tokens for e in episodes),
        completion_tokens=sum(e.usage.completion_tokens for e in episodes),
        seconds=_seconds(episodes),
        wall_seconds=wall,
        tokens_per_second=_tokens_per_second(episodes, wall),
        slowest=_slowest(episodes),
    )


def _pass_at(k: int, passed: Sequence[int], totals: Sequence[int]) -> PassAtK:
    values = [pass_at_k(p, n, k) for p, n in zip(passed, totals, strict=True) if n >= k]
    return PassAtK(
        k=k,
        value=math.fsum(values) / len(values) if values else None,
        tasks=len(values),
        left_out=len(totals) - len(values),
    )


def _because(episodes: Sequence[Episode]) -> dict[str, str]:
    """What went wrong, from the first episode of each reason."""
    found: dict[str, str] = {}
    for e in sorted(episodes, key=lambda e: (e.started_at, e.id)):
        if e.unscored is not None or e.termination is Termination.AGENT_ERROR:
            found.setdefault((e.unscored or e.termination).value, f"{e.key.task}: {e.detail}")
    return found


def _out_of_time(episode: Episode) -> bool:
    waited, agent = episode.seconds.get(WAITING, 0.0), episode.seconds.get("agent", 0.0)
    return episode.termination is Termination.TIME_LIMIT and waited > agent / 2


def _counted(names: Iterable[str]) -> dict[str, int]:
    """Most frequent first, then by name."""
    return dict(sorted(Counter(names).items(), key=lambda item: (-item[1], item[0])))


def _seconds(episodes: Sequence[Episode]) -> dict[str, float]:
    totals: Counter[str] = Counter()
    for episode in episodes:
        totals.update(episode.seconds)
    return dict(totals)


def _wall_seconds(episodes: Sequence[Episode]) -> float:
    """The length of the union of the episodes' times."""
    total, covered = 0.0, -math.inf
    for start, end in sorted((e.started_at, e.started_at + busy_seconds(e)) for e in episodes):
        total += max(0.0, end - max(start, covered))
        covered = max(covered, end)
    return total


def _tokens_per_second(episodes: Sequence[Episode], wall: float) -> dict[str, float] | None:
    prompt, cached, sampled = (
        sum(getattr(e.usage, name) for e in episodes)
        for name in ("prompt_tokens", "cached_tokens", "completion_tokens")
    )
    if wall <= 0 or not prompt + sampled:
        return None
    return {"prompt": prompt / wall, "cached": cached / wall, "sampled": sampled / wall}


def _slowest(episodes: Sequence[Episode]) -> tuple[Slow, ...]:
    timed = sorted(((busy_seconds(e), e) for e in episodes), key=lambda pair: (-pair[0], pair[1].id))
    return tuple(
        Slow(task=e.key.task, episode=e.id, seconds=seconds, termination=e.termination.value)
        for seconds, e in timed[:_SLOWEST]
        if seconds > 0
    )


def busy_seconds(episode: Episode) -> float:
    """Wall seconds of an episode without the time it waited for its turn."""
    return sum(seconds for phase, seconds in episode.seconds.items() if phase not in ("queue", WAITING))
