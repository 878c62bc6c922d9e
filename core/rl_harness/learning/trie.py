"""The prefix trie of a batch: every distinct prefix once, laid out depth-first and cut into micro-batches.

A node is a token at a position after one exact prefix, so the hidden state there is the same for every sequence
that passes it; work is done once a node and gathered back along each sequence's path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rl_harness.records.arrays import IdArray

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Packed:
    """One micro-batch: the unique tokens of some sequences in depth-first order.

    ``parent[k]`` is the node before k (-1 at a root) and ``depth[k]`` its position. Node q may attend to node k
    exactly when ``k <= q < end[k]``. ``members`` are the sequences' indices, ``paths[i]`` the nodes of
    ``members[i]``: ``tokens[paths[i]]`` are its ids.
    """

    tokens: IdArray
    depth: IdArray
    parent: IdArray
    end: IdArray
    members: tuple[int, ...]
    paths: tuple[Indices, ...]

    def __len__(self) -> int:
        return len(self.tokens)

    def visible(self) -> NDArray[np.bool_]:
        """``[q, k]``: whether q may attend to k. Quadratic; for a kernel that takes a dense mask."""
        index = np.arange(len(self))
        return (index[:, None] >= index[None, :]) & (index[:, None] < self.end[None, :])


def pack(sequences: Sequence[IdArray], budget: int) -> list[Packed]:
    """Cut the trie of ``sequences`` into micro-batches of at most ``budget`` unique tokens.

    Each is a run of the depth-first order, so sequences with a long common prefix stay together; what a cut
    separates is repeated on both sides. A sequence longer than the budget has a micro-batch of its own.
    """
    if budget < 1:
        raise ValueError(f"a budget of {budget} tokens holds nothing")
    if any(len(sequence) == 0 for sequence in sequences):
        raise ValueError("an empty sequence has no path")
    order, shared = depth_first(sequences)
    batches: list[Packed] = []
    start, size = 0, 0
    for i, member in enumerate(order):
        new = len(sequences[member]) - (shared[i] if i > start else 0)
        if i > start and size + new > budget:
            batches.append(_layout(sequences, order[start:i], shared[start:i]))
            start, size, new = i, 0, len(sequences[member])
        size += new
    if order:
        batches.append(_layout(sequences, order[start:], shared[start:]))
    return batches


def depth_first(sequences: Sequence[IdArray]) -> tuple[list[int], list[int]]:
    """Sequences in depth-first order of their trie, the child with more nodes first, and for each the length
    of the prefix it shares with the one before it (0 for the first)."""
    if not sequences:
        return [], []
    # Big-endian bytes compare as the ids do, and a prefix sorts before what it is a prefix of.
    order = sorted(range(len(sequences)), key=lambda i: sequences[i].astype(">u4").tobytes())
    shared = [0] + [common_prefix(sequences[a], sequences[b]) for a, b in pairwise(order)]
    return _heavy_first(order, shared, [len(sequence) for sequence in sequences])


def common_prefix(a: IdArray, b: IdArray) -> int:
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


def _heavy_first(order: list[int], shared: list[int], lengths: list[int]) -> tuple[list[int], list[int]]:
    """Reorder siblings by size at every branching. A sorted run [lo, hi) with common depth d is a subtree; its
    children are the maximal runs inside that share more than d."""
    out: list[int] = []
    out_shared: list[int] = []
    stack: list[tuple[int, int, int, int]] = [(0, len(order), 0, 0)]  # lo, hi, depth, prefix shared with what is before
    # sizes of runs come from prefix sums: nodes of [lo, hi) below depth d = Σ (length - shared) + (shared[lo] - d)
    fresh = np.concatenate([[0], np.cumsum([lengths[i] - s for i, s in zip(order, shared, strict=True)])])
    while stack:
        lo, hi, depth, before = stack.pop()
        if hi - lo == 1:
            out.append(order[lo])
            out_shared.append(before)
            continue
        ends_here = [i for i in range(lo, hi) if lengths[order[i]] == depth]
        for i, at in enumerate(ends_here):  # sequences that are a prefix of all others in the run
            out.append(order[at])
            out_shared.append(before if i == 0 else depth)
        first = lo + len(ends_here)
        if first == hi:
            continue
        starts = [first] + [i for i in range(first + 1, hi) if shared[i] == depth]
        runs = list(zip(starts, [*starts[1:], hi], strict=True))
        runs.sort(key=lambda run: fresh[run[1]] - fresh[run[0]] + shared[run[0]], reverse=True)
        children = []
        for i, (a, b) in enumerate(runs):
            inner = lengths[order[a]] if b - a == 1 else min(shared[a + 1 : b])
            children.append((a, b, inner, before if i == 0 and not ends_here else depth))
        stack.extend(reversed(children))
    return out, out_shared


def _layout(sequences: Sequence[IdArray], members: list[int], shared: list[int]) -> Packed:
    paths: list[Indices] = []
    size = 0
    for i, member in enumerate(members):
        keep = paths[-1][: shared[i]] if i else np.zeros(0, dtype=np.int64)
        new = len(sequences[member]) - len(keep)
        paths.append(np.concatenate([keep, np.arange(size, size + new)]))
        size += new
    tokens = np.zeros(size, dtype=np.int32)
    depth = np.zeros(size, dtype=np.int32)
    parent = np.full(size, -1, dtype=np.int32)
    end = np.zeros(size, dtype=np.int32)
    for member, path in zip(members, paths, strict=True):
        tokens[path] = sequences[member]
        depth[path] = np.arange(len(path))
        parent[path[1:]] = path[:-1]
        # Later sequences extend the nodes they share: the last to pass a node closes it.
        end[path] = path[-1] + 1
    return Packed(tokens=tokens, depth=depth, parent=parent, end=end, members=tuple(members), paths=tuple(paths))
