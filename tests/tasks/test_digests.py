"""The digest covers names, executable bits and contents, and nothing that merely looking at a task leaves behind."""

from __future__ import annotations

import shutil

from rl_harness.digests import digest_directory


def test_equal_directories_have_equal_digests(write_task, tmp_path):
    task = write_task()
    shutil.copytree(task, tmp_path / "copy")
    assert digest_directory(task) == digest_directory(tmp_path / "copy")


def test_every_kind_of_change_counts(write_task):
    task = write_task()
    seen = {digest_directory(task)}
    script = task / "tests/test.sh"

    def changed() -> bool:
        before = len(seen)
        seen.add(digest_directory(task))
        return len(seen) > before

    script.write_text("#!/bin/sh\n")
    assert changed()
    script.chmod(0o644)
    assert changed()
    script.rename(task / "tests/other.sh")
    assert changed()
    (task / "environment/workspace/empty").mkdir()
    assert changed()
    (task / "environment/workspace/link").symlink_to("names.txt")
    assert changed()


def test_what_tools_leave_behind_does_not_count(write_task):
    task = write_task()
    before = digest_directory(task)
    (task / "tests/__pycache__").mkdir()
    (task / "tests/__pycache__/x.pyc").write_bytes(b"x")
    (task / "tests/test.sh").chmod(0o700)
    assert digest_directory(task) == before


def test_moving_bytes_from_a_name_to_the_content_changes_the_digest(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a/xy").write_text("z")
    (tmp_path / "b/x").write_text("yz")
    assert digest_directory(tmp_path / "a") != digest_directory(tmp_path / "b")
