"""A lock is as alive as its process, no more and no less."""

from __future__ import annotations

import os
import subprocess
import time

from rl_harness.locks import Lock, holder, is_held


def test_a_lock_is_held_once_and_released(tmp_path):
    path = tmp_path / "lock"
    assert not is_held(path)
    lock = Lock(path)
    assert lock.acquire(patience=0)
    lock.sign()
    assert is_held(path)
    assert holder(path) == f"pid {os.getpid()}"
    assert not Lock(path).acquire(patience=0)
    lock.release()
    assert not is_held(path)
    assert Lock(path).acquire(patience=0)


def test_kill_minus_nine_frees_it(tmp_path, child):
    path = tmp_path / "lock"

    def hold(say):
        lock = Lock(path)
        assert lock.acquire(patience=0)
        lock.sign()
        say("held")
        time.sleep(60)

    process = child(hold)
    assert process.line() == "held"
    assert is_held(path)
    assert holder(path) == f"pid {process.pid}"
    process.kill()
    process.wait()
    assert not is_held(path)


def test_children_that_outlive_the_holder_do_not_keep_it(tmp_path, child):
    """A forked worker or a started program shares open files with its parent: the lock must not be among them."""
    path = tmp_path / "lock"

    def hold(say):
        lock = Lock(path)
        assert lock.acquire(patience=0)
        program = subprocess.Popen(["sleep", "60"])
        worker = os.fork()
        if worker == 0:
            time.sleep(60)
            os._exit(0)
        say(f"{program.pid} {worker}")
        time.sleep(60)

    process = child(hold)
    survivors = [int(pid) for pid in process.line().split()]
    try:
        assert is_held(path)
        process.kill()
        process.wait()
        assert not is_held(path)
    finally:
        for pid in survivors:
            os.kill(pid, 9)


def test_a_holder_that_said_nothing_is_still_a_holder(tmp_path):
    (tmp_path / "lock").write_bytes(b"\xff not json")
    assert holder(tmp_path / "lock") == "another process"
