"""The prefix store remembers what was computed and nothing else; lanes keep running sequences apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_harness.records import ids
from rl_harness.records.arrays import IdArray
from rl_harness_torch.kv import KVShape, Lane, PrefixStore, Segment, common_prefix, lane_capacity

SHAPE = KVShape(layers=2, heads=1, key_size=3, value_size=2, dtype=torch.float32, device=torch.device("cpu"))


def segment_of(sequence: IdArray) -> Segment:
    """Keys and values that tell which beginning they belong to, as real ones do."""
    keys = torch.tensor([float(hash(tuple(sequence[: i + 1].tolist())) % 9973) for i in range(len(sequence))])
    return Segment(
        keys[None, None, :, None].expand(2, 1, -1, 3).contiguous(),
        (keys + 1)[None, None, :, None].expand(2, 1, -1, 2).contiguous(),
    )


def assert_holds(store: PrefixStore, sequence: IdArray, length: int) -> None:
    known, segments = store.match(sequence)
    assert known == length
    got = torch.cat([s.keys for s in segments], 2) if segments else torch.empty(2, 1, 0, 3)
    assert torch.equal(got, segment_of(sequence).keys[:, :, :length])


def test_a_prompt_is_found_by_its_longest_remembered_beginning() -> None:
    store = PrefixStore()
    store.insert(ids([1, 2, 3, 4]), 0, segment_of(ids([1, 2, 3, 4])))
    assert_holds(store, ids([1, 2, 3, 4, 5]), 4)
    assert_holds(store, ids([1, 2, 9]), 2)
    assert_holds(store, ids([7]), 0)


def test_a_continued_conversation_adds_only_its_new_tokens() -> None:
    store = PrefixStore()
    store.insert(ids([1, 2, 3]), 0, segment_of(ids([1, 2, 3])))
    before = store.nbytes
    longer = ids([1, 2, 3, 4, 5])
    store.insert(longer, 2, segment_of(longer).part(2, 5))
    assert store.nbytes == before // 3 * 5
    assert_holds(store, longer, 5)


def test_a_gap_between_what_is_known_and_what_is_given_is_refused() -> None:
    with pytest.raises(ValueError, match="only 0 ids are remembered"):
        PrefixStore().insert(ids([1, 2]), 1, segment_of(ids([1, 2])).part(1, 2))


def test_what_was_kept_does_not_change_when_the_given_memory_is_reused() -> None:
    store, sequence = PrefixStore(), ids([1, 2])
    given_segment = segment_of(sequence)
    store.insert(sequence, 0, given_segment)
    given_segment.keys.zero_()
    assert_holds(store, sequence, 2)


def test_the_least_recently_used_goes_first_and_shared_beginnings_last() -> None:
    store = PrefixStore()
    for tail in (7, 8, 9):
        sequence = ids([1, 2, tail])
        store.insert(sequence, 0, segment_of(sequence))
    store.match(ids([1, 2, 7]))
    token = SHAPE.token_bytes
    store.shrink(4 * token)
    assert_holds(store, ids([1, 2, 8]), 2)
    assert_holds(store, ids([1, 2, 7]), 3)
    store.shrink(0)
    assert store.nbytes == 0
    assert_holds(store, ids([1]), 0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=12), st.integers(0, 20))
def test_the_store_agrees_with_a_plain_set_of_sequences(sequences: list[list[int]], limit: int) -> None:
    store = PrefixStore()
    for sequence in sequences:
        store.insert(ids(sequence), 0, segment_of(ids(sequence)))
    beginnings = {tuple(s[: i + 1]) for s in sequences for i in range(len(s))}
    assert store.nbytes == len(beginnings) * SHAPE.token_bytes
    for sequence in sequences:
        assert_holds(store, ids(sequence), len(sequence))
    store.shrink(limit * SHAPE.token_bytes)
    assert store.nbytes <= limit * SHAPE.token_bytes
    for sequence in sequences:
        known, _ = store.match(ids(sequence))
        assert_holds(store, ids(sequence), known)


def test_a_row_that_leaves_a_lane_takes_nothing_of_the_others_with_it() -> None:
    lane = Lane(SHAPE, 8)
    sequences = [ids([i, i + 1]) for i in range(6)]
    for sequence in sequences:
        lane.row(lane.add()).write(0, segment_of(sequence))
    lane.remove(1, 2)
    assert len(lane) == 5
    for row, sequence in ((0, sequences[0]), (1, sequences[5]), (4, sequences[4])):
        assert torch.equal(lane.row(row).part(0, 2).keys, segment_of(sequence).keys)


@pytest.mark.parametrize(
    ("length", "capacity"), [(1, 128), (128, 128), (129, 192), (193, 256), (300, 384), (900, 1000)]
)
def test_lanes_grow_by_steps_up_to_the_context(length: int, capacity: int) -> None:
    assert lane_capacity(length, 1000) == capacity


def test_common_prefix() -> None:
    assert common_prefix(ids([1, 2, 3]), ids([1, 2, 4, 5])) == 2
    assert common_prefix(ids([1, 2]), ids([1, 2, 4])) == 2
    assert common_prefix(np.zeros(0, np.int32), ids([1])) == 0
