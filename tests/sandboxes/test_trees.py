"""Trees from a hostile sender: every trick ends in TreeError, and nothing is written outside the target."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rl_harness.sandboxes import trees
from rl_harness.sandboxes.local import storage

DIRECTORY = {"p": "", "t": "d", "m": 0o755}
END = {"p": "", "t": "end"}


def record(header: Any, data: bytes = b"") -> bytes:
    encoded = json.dumps(header).encode()
    return struct.pack(">I", len(encoded)) + encoded + data


def receive(tmp_path: Path, stream: bytes, **options: Any) -> list[str]:
    source = tmp_path / "stream"
    source.write_bytes(stream)
    (tmp_path / "out").mkdir(exist_ok=True)
    descriptors = [os.open(source, os.O_RDONLY), os.open(tmp_path / "out", os.O_RDONLY)]
    try:
        return trees.receive(*descriptors, "tree", **{"keep_links": False, **options})  # type: ignore[arg-type]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def file(path: str, data: bytes) -> bytes:
    return record({"p": path, "t": "f", "m": 0o644, "s": len(data)}, data)


@pytest.mark.parametrize(
    "stream",
    [
        record(DIRECTORY) + file("../escaped", b"x"),
        record(DIRECTORY) + file("/tmp/escaped", b"x"),
        record(DIRECTORY) + file("a/../../escaped", b"x"),
        record(DIRECTORY) + file("a\0b", b"x"),
        record(DIRECTORY) + record({"p": "l", "t": "l", "l": "inside"}) + record({"p": "inside", "t": "d", "m": 0o755})
        + file("l/through", b"x"),
        record(DIRECTORY) + record({"p": "up", "t": "l", "l": "../../x"}),
        record(DIRECTORY) + record({"p": "absolute", "t": "l", "l": "/etc/passwd"}),
        record(DIRECTORY) + record({"p": "device", "t": "c"}),
        record(DIRECTORY) + record({"p": "short", "t": "f", "m": 0o644, "s": 100}, b"only this"),
        record(DIRECTORY) + record({"p": "negative", "t": "f", "m": 0o644, "s": -1}),
        record(DIRECTORY) + record({"p": "text", "t": "f", "m": 0o644, "s": "5"}, b"12345"),
        record(DIRECTORY) + record({"p": "mode", "t": "f", "m": "x", "s": 1}, b"1"),
        record(DIRECTORY) + record(DIRECTORY),
        file("outside-any-tree", b"x"),
        record(["not", "an", "object"]),
        struct.pack(">I", 1 << 31),
        struct.pack(">I", 4) + b"\xff\xff\xff\xff",
        record(DIRECTORY),
        b"",
        struct.pack(">I", 19_000) + b"[" * 19_000,
    ],
)  # fmt: skip
def test_a_hostile_stream_is_refused(tmp_path: Path, stream: bytes) -> None:
    with pytest.raises(trees.TreeError):
        receive(tmp_path, stream)
    assert not list(tmp_path.rglob("escaped"))
    assert not list(tmp_path.rglob("through"))
    assert {path.name for path in tmp_path.iterdir()} == {"stream", "out"}


def test_set_user_id_bits_do_not_travel(tmp_path: Path) -> None:
    receive(tmp_path, record(DIRECTORY) + record({"p": "f", "t": "f", "m": 0o6755, "s": 1}, b"x") + record(END))
    assert (tmp_path / "out/tree/f").stat().st_mode & 0o7777 == 0o755


def test_at_most_the_limit_is_written(tmp_path: Path) -> None:
    stream = record(DIRECTORY) + file("a", b"x" * 60) + file("b", b"x" * 60) + record(END)
    with pytest.raises(trees.TreeError, match="more than 100 bytes"):
        receive(tmp_path, stream, limit=100)
    assert sum(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file()) <= 100
    assert receive(tmp_path, stream, limit=120) == []


def test_read_only_directories_arrive_filled(tmp_path: Path) -> None:
    stream = record(DIRECTORY) + record({"p": "d", "t": "d", "m": 0o555}) + file("d/f", b"x") + record(END)
    receive(tmp_path, stream)
    assert (tmp_path / "out/tree/d/f").read_bytes() == b"x"
    assert (tmp_path / "out/tree/d").stat().st_mode & 0o777 == 0o555
    (tmp_path / "out/tree/d").chmod(0o755)


@pytest.fixture
def deep(tmp_path: Path) -> Iterator[int]:
    """A folder with a tree deeper than any path can name, and with directories nobody may enter."""
    at = os.open(tmp_path, os.O_RDONLY)
    for name in ("victim", *["d" * 100] * 60):
        os.mkdir(name, dir_fd=at)
        following = os.open(name, os.O_RDONLY, dir_fd=at)
        os.mkdir("closed", 0o700, dir_fd=following)
        os.mkdir("closed/inner", dir_fd=following)
        os.chmod("closed", 0, dir_fd=following)
        os.close(at)
        at = following
    os.close(at)
    (tmp_path / "outside").write_text("kept")
    (tmp_path / "victim/link").symlink_to(tmp_path / "outside")
    parent = os.open(tmp_path, os.O_RDONLY)
    yield parent
    os.close(parent)


def test_a_tree_of_any_depth_is_removed(deep: int, tmp_path: Path) -> None:
    storage.remove_tree(deep, "victim")
    assert [path.name for path in tmp_path.iterdir()] == ["outside"]
    storage.remove_tree(deep, "victim")


def nested(levels: int) -> tuple[str, bytes]:
    """Directories within each other: the path of the last one, and their records."""
    paths = ["/".join("d" * 10 for _ in range(level + 1)) for level in range(levels)]
    return paths[-1], b"".join(record({"p": path, "t": "d", "m": 0o755}) for path in paths)


def test_a_deep_tree_is_walked_once_not_for_every_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "MAX_STEPS", 200)
    inner, records = nested(100)
    (tmp_path / "target").mkdir()
    receive(
        tmp_path, record(DIRECTORY) + records + b"".join(file(f"{inner}/{n}", b"x") for n in range(50)) + record(END)
    )
    assert len(list((tmp_path / "out/tree" / inner).iterdir())) == 50
    source, parent = (os.open(path, os.O_RDONLY) for path in (tmp_path / "out/tree", tmp_path / "target"))
    try:
        trees.copy(source, parent, "copy", keep_links=False)
    finally:
        os.close(source)
        os.close(parent)
    assert len(list((tmp_path / "target/copy" / inner).iterdir())) == 50


def test_a_tree_that_costs_too_many_steps_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "MAX_STEPS", 1000)
    one, records = nested(100)
    other = f"x/{one}"
    there = record({"p": "x", "t": "d", "m": 0o755}) + b"".join(
        record({"p": "x/" + "/".join(one.split("/")[:level]), "t": "d", "m": 0o755}) for level in range(1, 101)
    )
    entries = b"".join(file(f"{path}/{n}", b"") for n in range(20) for path in (one, other))
    with pytest.raises(trees.TreeError, match="too many directories"):
        receive(tmp_path, record(DIRECTORY) + records + there + entries + record(END))


@pytest.mark.parametrize("kind", [{"t": "skipped"}, {"t": "l", "l": "/etc"}, {"t": "d", "m": 0}])
def test_names_that_must_be_kept_are_bounded(
    kind: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trees, "MAX_KEPT", 1000)
    entries = [record({"p": f"{n:0100d}", **kind}) for n in range(11)]
    assert len(receive(tmp_path, record(DIRECTORY) + b"".join(entries[:9]) + record(END), skip_unsafe=True)) in (0, 9)
    again = tmp_path / "again"
    again.mkdir()
    with pytest.raises(trees.TreeError, match="too many names"):
        receive(again, record(DIRECTORY) + b"".join(entries) + record(END), skip_unsafe=True)


@pytest.mark.parametrize("mode", [0o000, 0o500, 0o755, 0o770])
def test_a_directory_has_its_mode_and_its_content(tmp_path: Path, mode: int) -> None:
    stream = record(DIRECTORY) + record({"p": "d", "t": "d", "m": mode}) + file("d/f", b"x") + record(END)
    receive(tmp_path, stream)
    assert (tmp_path / "out/tree/d").stat().st_mode & 0o777 == mode


def test_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    for entry in ({"p": "\ud800", "t": "d", "m": 0o755}, {"p": "l", "t": "l", "l": "\ud800"}):
        with pytest.raises(trees.TreeError):
            receive(tmp_path, record(DIRECTORY) + record(entry) + record(END))
        (tmp_path / "out/tree").rmdir()
