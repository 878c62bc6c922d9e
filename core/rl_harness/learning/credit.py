"""How much of an episode's reward each of its turns gets: discounting along the turn tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rl_harness.records.turn import Turn, continued_turn


def discounts(turns: Sequence[Turn], gamma: float) -> list[float]:
    """The factor on the episode's reward for each turn, in order.

    The reward arrives after the last turn of every path: that turn's factor is 1, and a turn that others go on
    from gets ``gamma`` times the mean of theirs. Arrival order plays no part, so parallel sub-agents do not
    discount each other.
    """
    return returns(turns, gamma, final=1.0)


def returns(
    turns: Sequence[Turn], gamma: float, *, final: float, rewards: Mapping[str, float] | None = None
) -> list[float]:
    """What each turn led to, in order: its own reward (``rewards``, by turn id), plus ``gamma`` times the mean of the
    returns of the turns that go on from it, or ``final`` if none does."""
    own = rewards or {}
    known = {turn.id: turn for turn in turns}
    if len(known) != len(turns):
        raise ValueError("two turns of one episode have the same id")
    if unknown := sorted(own.keys() - known.keys()):
        raise ValueError(f"rewards for turns that the episode does not have: {', '.join(unknown)}")
    before = [continued_turn(turn, known) for turn in turns]
    children: dict[str, list[str]] = {turn.id: [] for turn in turns}
    for turn, parent in zip(turns, before, strict=True):
        if parent is not None:
            children[parent].append(turn.id)
    values: dict[str, float] = {}
    for root in (turn.id for turn, parent in zip(turns, before, strict=True) if parent is None):
        order = [root]
        for node in order:
            order.extend(children[node])
        for node in reversed(order):
            after = children[node]
            later = gamma * sum(values[child] for child in after) / len(after) if after else final
            values[node] = own.get(node, 0.0) + later
    if len(values) != len(turns):
        raise ValueError("the turns of an episode form a cycle")
    return [values[turn.id] for turn in turns]
