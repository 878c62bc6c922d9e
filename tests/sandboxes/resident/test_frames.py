"""The wire: frames survive any cutting, garbage is refused, and the helper runs on old Pythons."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rl_harness.sandboxes.resident import helper
from rl_harness.sandboxes.resident.frames import MAX_PAYLOAD, Decoder, ProtocolError

frames = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2**32 - 1), st.binary(max_size=300)), max_size=20)


def encode(kind: int, stream: int, payload: bytes) -> bytes:
    return helper.HEADER.pack(kind, stream, len(payload)) + payload


@given(frames, st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_frames_arrive_whole_however_the_stream_is_cut(sent: list[tuple[int, int, bytes]], cuts: list[int]) -> None:
    data = b"".join(encode(*frame) for frame in sent)
    decoder = Decoder()
    received = []
    at = turn = 0
    while at < len(data):
        size = cuts[turn % len(cuts)]
        received += decoder.feed(data[at : at + size])
        at, turn = at + size, turn + 1
    assert received == sent


@given(st.lists(st.binary(max_size=200), max_size=50))
def test_garbage_is_refused_or_held_within_one_frame(chunks: list[bytes]) -> None:
    decoder = Decoder()
    try:
        for chunk in chunks:
            for _, _, payload in decoder.feed(chunk):
                assert len(payload) <= MAX_PAYLOAD
    except ProtocolError:
        return
    assert len(decoder._buffer) <= helper.HEADER.size + MAX_PAYLOAD


def test_an_oversized_frame_is_refused_before_it_arrives() -> None:
    with pytest.raises(ProtocolError, match="65537"):
        list(Decoder().feed(helper.HEADER.pack(helper.DATA, 1, MAX_PAYLOAD + 1)))


@given(st.lists(st.binary(max_size=100), max_size=20))
def test_packed_fields_come_back(fields: list[bytes]) -> None:
    assert helper.unpack(helper.pack(fields)) == fields


def test_the_helper_is_one_file_for_any_python_from_3_6_on() -> None:
    source = Path(helper.__file__).read_text("utf-8")
    tree = ast.parse(source, feature_version=(3, 6))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert names == {"ctypes", "errno", "os", "select", "signal", "socket", "struct", "sys", "time"}
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert [node.module for node in froms] == ["typing"], "and that one only for type checkers"
