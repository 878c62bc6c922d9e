"""How much of an episode's reward each of its turns gets: discounting along the turn tree."""

from __future__ import annotations

from collections.abc import Sequence

from rl_harness.records.turn import Turn


def continued_turn(turn: Turn, turns: dict[str, Turn]) -> str | None:
    """Id of the turn that ``turn`` goes on from: the nearest one whose completion its prompt contains.

    ``Turn.parent`` says whose ids are shared, which may be no more than a system prompt. A prompt that shares
    nothing of a completion does not go on from it: it is another branch (a sub-agent, a rewritten history). Where
    a chat template did the rewriting, the recorded turn says itself what it follows.
    """
    follows = turn.extra.get("follows")
    if follows in turns:
        return str(follows)
    parent, shared = turn.parent, turn.shared
    while parent is not None:
        node = turns[parent]
        if shared > node.prompt_tokens:
            return parent
        parent, shared = node.parent, min(shared, node.shared)
    return None


def discounts(turns: Sequence[Turn], gamma: float) -> list[float]:
    """The factor on the episode's reward for each turn, in order.

    The reward arrives after the last turn of every path: that turn's factor is 1, and a turn that others go on
    from gets ``gamma`` times the mean of theirs. Arrival order plays no part, so parallel sub-agents do not
    discount each other.
    """
    known = {turn.id: turn for turn in turns}
    if len(known) != len(turns):
        raise ValueError("two turns of one episode have the same id")
    before = [continued_turn(turn, known) for turn in turns]
    children: dict[str, list[str]] = {turn.id: [] for turn in turns}
    for turn, parent in zip(turns, before, strict=True):
        if parent is not None:
            children[parent].append(turn.id)
    factors: dict[str, float] = {}
    for root in (turn.id for turn, parent in zip(turns, before, strict=True) if parent is None):
        order = [root]
        for node in order:
            order.extend(children[node])
        for node in reversed(order):
            after = children[node]
            factors[node] = gamma * sum(factors[child] for child in after) / len(after) if after else 1.0
    if len(factors) != len(turns):
        raise ValueError("the turns of an episode form a cycle")
    return [factors[turn.id] for turn in turns]
