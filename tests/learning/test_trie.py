"""The prefix trie: exact paths, one node a prefix, micro-batches within their budget."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rl_harness.learning.trie import depth_first, pack
from rl_harness.records import ids

sequences = st.lists(
    st.lists(st.integers(0, 2) | st.just(300), min_size=1, max_size=8).map(ids), min_size=1, max_size=12
)


def prefixes(sequences) -> set[tuple[int, ...]]:
    return {tuple(s[: i + 1].tolist()) for s in sequences for i in range(len(s))}


@given(sequences, st.integers(1, 40))
def test_every_path_spells_its_sequence(sequences, budget):
    seen = []
    for packed in pack(sequences, budget):
        for member, path in zip(packed.members, packed.paths, strict=True):
            seen.append(member)
            assert packed.tokens[path].tolist() == sequences[member].tolist()
            assert packed.depth[path].tolist() == list(range(len(path)))
            assert packed.parent[path].tolist() == [-1, *path[:-1].tolist()]
    assert sorted(seen) == list(range(len(sequences)))


@given(sequences, st.integers(1, 40))
def test_a_micro_batch_holds_each_prefix_once_and_keeps_to_its_budget(sequences, budget):
    for packed in pack(sequences, budget):
        assert len(packed) == len(prefixes([sequences[m] for m in packed.members]))
        assert len(packed) <= budget or len(packed.members) == 1


@given(sequences)
def test_a_node_sees_exactly_its_ancestors(sequences):
    (packed,) = pack(sequences, 10_000)
    expected = np.zeros((len(packed), len(packed)), dtype=bool)
    for path in packed.paths:
        for i, node in enumerate(path):
            expected[node, path[: i + 1]] = True
    np.testing.assert_array_equal(packed.visible(), expected)


@given(sequences)
def test_neighbours_share_what_is_said_of_them(sequences):
    order, shared = depth_first(sequences)
    assert shared[0] == 0
    for a, b, n in zip(order, order[1:], shared[1:], strict=False):
        assert sequences[a][:n].tolist() == sequences[b][:n].tolist()
        assert len(sequences[a]) == n or len(sequences[b]) == n or sequences[a][n] != sequences[b][n]


def test_the_heavy_child_comes_first():
    light, heavy_a, heavy_b = ids([1, 2]), ids([1, 3, 4, 4, 4]), ids([1, 3, 5, 5])
    order, _ = depth_first([light, heavy_a, heavy_b])
    assert order == [1, 2, 0]


def test_ids_sort_as_numbers_and_not_as_little_endian_bytes():
    order, shared = depth_first([ids([256, 1]), ids([1, 1]), ids([256, 2])])
    assert shared.count(1) == 1
    assert len(pack([ids([256, 1]), ids([1, 1]), ids([256, 2])], 100)[0]) == 5
    assert sorted(order) == [0, 1, 2]


def test_turns_of_a_conversation_cost_their_last_prompt_once():
    conversation = np.arange(1000, dtype=np.int32)
    turns = [conversation[:n] for n in range(100, 1001, 100)]
    (packed,) = pack(turns, 1000)
    assert len(packed) == 1000
    assert sum(map(len, turns)) == 5500


def test_a_deep_comb_needs_no_recursion():
    n = 3000
    (packed,) = pack([ids([0] * i + [1]) for i in range(n)], 10**9)
    assert len(packed) == 2 * n - 1


def test_nothing_packs_to_nothing_and_nonsense_is_refused():
    assert pack([], 10) == []
    with pytest.raises(ValueError, match="empty sequence"):
        pack([ids([])], 10)
    with pytest.raises(ValueError, match="budget"):
        pack([ids([1])], 0)
