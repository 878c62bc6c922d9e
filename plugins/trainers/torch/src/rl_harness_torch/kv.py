"""Keys and values of the tokens seen so far: lanes hold the running sequences, the prefix store remembers finished
ones and prompts so that no token of a shared beginning is computed twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec
import numpy as np
import torch
from rl_harness.records.arrays import IdArray

_FIRST_LANE = 128


class KVShape(msgspec.Struct, frozen=True, kw_only=True):
    """What one token's keys and values look like, the same in every layer."""

    layers: int
    heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        return self.layers * self.heads * (self.key_size + self.value_size) * self.dtype.itemsize


class Segment:
    """Keys ``[layers, heads, n, key_size]`` and values of n consecutive tokens."""

    __slots__ = ("keys", "values")

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys = keys
        self.values = values

    @classmethod
    def empty(cls, shape: KVShape, length: int) -> Segment:
        size = (shape.layers, shape.heads, length)
        return cls(
            torch.empty(*size, shape.key_size, dtype=shape.dtype, device=shape.device),
            torch.empty(*size, shape.value_size, dtype=shape.dtype, device=shape.device),
        )

    def __len__(self) -> int:
        return self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def part(self, start: int, stop: int) -> Segment:
        """A view of some of the tokens."""
        return Segment(self.keys[:, :, start:stop], self.values[:, :, start:stop])

    def copy(self) -> Segment:
        """The same in memory of its own."""
        return Segment(
            self.keys.clone(memory_format=torch.contiguous_format),
            self.values.clone(memory_format=torch.contiguous_format),
        )

    def write(self, at: int, other: Segment) -> None:
        """Copy ``other`` to positions ``at`` and on."""
        self.keys[:, :, at : at + len(other)] = other.keys
        self.values[:, :, at : at + len(other)] = other.values


class Lane:
    """Running sequences of at most ``capacity`` tokens: rows 0 to ``len(lane)`` - 1 are in use, without gaps.

    ``keys`` is ``[layers, rows, heads, capacity, key_size]``. Sequences of very different length live in different
    lanes, so that a short one neither computes nor reserves what the longest needs.
    """

    def __init__(self, shape: KVShape, capacity: int) -> None:
        self.shape = shape
        self.capacity = capacity
        self._rows = 0
        self.keys, self.values = self._allocate(0)

    def __len__(self) -> int:
        return self._rows

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def add(self) -> int:
        """Take the next row; its content is undefined."""
        if self._rows == self.keys.shape[1]:
            keys, values = self._allocate(max(4, 2 * self._rows))
            keys[:, : self._rows] = self.keys
            values[:, : self._rows] = self.values
            self.keys, self.values = keys, values
        self._rows += 1
        return self._rows - 1

    def row(self, index: int) -> Segment:
        """A view of one row, all ``capacity`` positions of it."""
        return Segment(self.keys[:, index], self.values[:, index])

    def remove(self, index: int, last_length: int) -> None:
        """Give a row up; the last row, of ``last_length`` tokens, moves into its place."""
        last = self._rows - 1
        if index != last:
            self.row(index).write(0, self.row(last).part(0, last_length))
        self._rows = last
        if last == 0:
            self.keys, self.values = self._allocate(0)

    def _allocate(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        s = self.shape
        # Zeros, not garbage: a masked position still multiplies the value there by an exact zero, and 0 x NaN is NaN.
        return (
            torch.zeros(s.layers, rows, s.heads, self.capacity, s.key_size, dtype=s.dtype, device=s.device),
            torch.zeros(s.layers, rows, s.heads, self.capacity, s.value_size, dtype=s.dtype, device=s.device),
        )


def lane_capacity(length: int, limit: int) -> int:
    """The capacity of the lane for a sequence of ``length`` tokens: powers of two and the values half-way."""
    capacity = _FIRST_LANE
    while capacity < length:
        capacity = capacity * 3 // 2 if capacity & (capacity - 1) == 0 else capacity * 4 // 3
    return max(length, min(capacity, limit))


class _Node:
    """A run of token ids with their keys and values; children continue it, keyed by their first id."""

    __slots__ = ("children", "ids", "parent", "segment", "used")

    def __init__(self, ids: IdArray, segment: Segment | None, parent: _Node | None, used: int) -> None:
        self.ids = ids
        self.segment = segment
        self.parent = parent
        self.children: dict[int, _Node] = {}
        self.used = used


class PrefixStore:
    """A radix tree of token sequences with their keys and values; the least recently used leaves go first."""

    def __init__(self) -> None:
        self._clock = itertools.count()
        self.clear()

    def clear(self) -> None:
        """Forget everything (the weights changed)."""
        self._root = _Node(np.zeros(0, np.int32), None, None, 0)
        self.nbytes = 0

    def match(self, ids: IdArray) -> tuple[int, list[Segment]]:
        """The longest remembered beginning of ``ids``: its length and views of its keys and values, in order."""
        found: list[Segment] = []
        length = 0
        for node, same in self._walk(ids):
            assert node.segment is not None
            found.append(node.segment.part(0, same))
            length += same
        return length, found

    def missing(self, ids: IdArray) -> int:
        """Where :meth:`insert` of ``ids`` would begin to add something: the length of what is remembered."""
        return sum(same for _, same in self._walk(ids))

    def insert(self, ids: IdArray, start: int, segment: Segment) -> None:
        """Remember ``ids``; ``segment`` holds ids[start:] and at least what is not remembered yet.

        What is kept is copied, so ``segment`` may be a view of memory that is reused.
        """
        node, length = self._root, 0
        for visited, same in list(self._walk(ids)):  # whole, because a split changes what is walked
            node, length = visited, length + same
            if same < len(visited.ids):
                node = self._split(visited, same)
        if length < start:
            raise ValueError(f"only {length} ids are remembered, the segment begins at {start}")
        if length == len(ids):
            return
        kept = segment.part(length - start, len(ids) - start).copy()
        child = _Node(np.array(ids[length:]), kept, node, next(self._clock))
        node.children[int(ids[length])] = child
        self.nbytes += kept.nbytes

    def shrink(self, limit: int) -> None:
        """Drop the least recently used leaves until at most ``limit`` bytes are kept."""
        while self.nbytes > limit:
            leaf = min((node for node in self._nodes() if not node.children), key=lambda node: node.used, default=None)
            if leaf is None or leaf.segment is None or leaf.parent is None:
                return
            self.nbytes -= leaf.segment.nbytes
            del leaf.parent.children[int(leaf.ids[0])]

    def _walk(self, ids: IdArray) -> Iterator[tuple[_Node, int]]:
        """Nodes along ``ids`` with how many of their ids agree; only the last may agree in part."""
        node, at, now = self._root, 0, next(self._clock)
        while at < len(ids) and (child := node.children.get(int(ids[at]))) is not None:
            same = common_prefix(child.ids, ids[at:])
            child.used = now
            yield child, same
            if same < len(child.ids):
                return
            node, at = child, at + same

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut ``node`` in two; returns the upper part."""
        assert node.segment is not None
        assert node.parent is not None
        upper = _Node(node.ids[:at], node.segment.part(0, at).copy(), node.parent, node.used)
        node.parent.children[int(upper.ids[0])] = upper
        node.segment = node.segment.part(at, len(node.ids)).copy()
        node.ids, node.parent = node.ids[at:], upper
        upper.children[int(node.ids[0])] = node
        return upper

    def _nodes(self) -> Iterator[_Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node


def common_prefix(a: IdArray, b: IdArray) -> int:
    """How many leading ids agree."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n
