"""Checkpoints appear complete or not at all, whatever moment the process dies at."""

from __future__ import annotations

import asyncio
import os
import shutil

import pytest
from rl_harness.errors import RunError
from rl_harness.runs.checkpoints import Checkpoints
from rl_harness.runs.store import RunStore


@pytest.fixture
def checkpoints(tmp_path, store):
    return Checkpoints(tmp_path / "checkpoints", store)


async def save(checkpoints, step, content="weights", state=None):
    folder = checkpoints.path(step)
    assert not folder.exists()
    assert folder.parent.is_dir()
    (folder / "inner").mkdir(parents=True)
    (folder / "model.safetensors").write_text(f"{content} {step}")
    (folder / "inner" / "optimizer").write_text("momentum")
    return await checkpoints.commit(step, state)


async def test_the_latest_is_found_with_its_state(checkpoints):
    assert checkpoints.latest() is None
    await save(checkpoints, 1, state={"step": 1})
    final = await save(checkpoints, 2, state={"step": 2})
    assert checkpoints.latest() == (2, final)
    assert (final / "model.safetensors").read_text() == "weights 2"
    assert checkpoints.state(2) == {"step": 2}


async def test_old_ones_are_pruned(checkpoints):
    for step in range(1, 6):
        await save(checkpoints, step)
    checkpoints.prune(2)
    assert sorted(path.name for path in checkpoints.directory.iterdir()) == ["step-000004", "step-000005"]
    assert checkpoints.latest()[0] == 5
    with pytest.raises(ValueError, match="at least one"):
        checkpoints.prune(0)


async def test_a_step_done_again_replaces_its_checkpoint(checkpoints):
    await save(checkpoints, 1, "old")
    final = await save(checkpoints, 1, "new weights")
    assert (final / "model.safetensors").read_text() == "new weights 1"
    assert checkpoints.latest() == (1, final)


async def test_what_was_not_committed_does_not_exist(checkpoints):
    await save(checkpoints, 1)
    partial = checkpoints.path(2)
    partial.mkdir()
    (partial / "model.safetensors").write_text("half")
    assert checkpoints.latest()[0] == 1
    checkpoints.sweep()
    assert not partial.exists()
    with pytest.raises(RunError, match="nothing was written"):
        await checkpoints.commit(3)


@pytest.mark.parametrize("damage", ["truncated", "missing file", "missing folder"])
async def test_a_damaged_checkpoint_is_passed_over(checkpoints, damage):
    first = await save(checkpoints, 1, state={"at": 1})
    second = await save(checkpoints, 2, state={"at": 2})
    if damage == "truncated":
        (second / "model.safetensors").write_text("we")
    elif damage == "missing file":
        (second / "inner" / "optimizer").unlink()
    else:
        shutil.rmtree(second)
    step, path = checkpoints.latest()
    assert (step, path) == (1, first)
    assert checkpoints.state(step) == {"at": 1}
    checkpoints.prune(1)
    assert checkpoints.latest() == (1, first)
    assert not second.exists()


async def test_files_added_later_do_no_harm(checkpoints):
    final = await save(checkpoints, 1)
    (final / "README.md").write_text("mine")
    assert checkpoints.latest() == (1, final)


#: Everything that changes the disk: a crash can come before any of them.
_OPERATIONS = [(os, "rename"), (os, "unlink"), (os, "rmdir"), (os, "mkdir"), (RunStore, "_submit")]


class Crash(BaseException):
    pass


@pytest.mark.parametrize("step", [2, 3], ids=["done again", "new"])
async def test_a_crash_before_any_operation_leaves_a_valid_checkpoint(tmp_path, monkeypatch, step):
    """Saves and prunes again and again, dying before the first, second, third … operation until one gets through."""
    for survived in range(200):
        place = tmp_path / f"{survived}"
        place.mkdir()
        store = RunStore(place / "db.sqlite")
        checkpoints = Checkpoints(place / "checkpoints", store)
        await save(checkpoints, 1, "old")
        await save(checkpoints, 2, "old")
        with monkeypatch.context() as patch:
            _die_after(patch, survived)
            try:
                await save(checkpoints, step, "new")
                checkpoints.prune(1)
                done = True
            except Crash:
                done = False
        store.close()

        again = RunStore(place / "db.sqlite")
        checkpoints = Checkpoints(place / "checkpoints", again)
        checkpoints.sweep()
        found, path = checkpoints.latest()
        text = (path / "model.safetensors").read_text()
        assert text in (f"old {found}", f"new {found}")
        assert (path / "inner" / "optimizer").read_text() == "momentum"
        await save(checkpoints, step, "after")
        assert checkpoints.latest()[0] == step
        again.close()
        if done:
            assert survived > 10  # it did die at many points
            return
    pytest.fail("it never got through")


def _die_after(patch: pytest.MonkeyPatch, operations: int) -> None:
    left = [operations]

    def dying(original):
        def call(*args, **kwargs):
            if left[0] == 0:
                raise Crash
            left[0] -= 1
            return original(*args, **kwargs)

        return call

    for owner, name in _OPERATIONS:
        patch.setattr(owner, name, dying(getattr(owner, name)))


def test_checkpoints_survive_kill_minus_nine(tmp_path, child):
    """A process saves and prunes as fast as it can and is killed; what it reported is the latest, or a later one."""

    def body(say):
        async def saving():
            store = RunStore(tmp_path / "db.sqlite")
            checkpoints = Checkpoints(tmp_path / "checkpoints", store)
            latest = checkpoints.latest()
            for step in range(1 + (latest[0] if latest else 0), 10_000):
                await save(checkpoints, step, state={"step": step})
                say(str(step))
                checkpoints.prune(2)

        asyncio.run(saving())

    reported = 0
    for _ in range(5):
        process = child(body)
        for _ in range(4):
            reported = max(reported, int(process.line()))
        process.kill()
        process.wait()
        reported = max([reported, *map(int, process.rest())])
        store = RunStore(tmp_path / "db.sqlite")
        checkpoints = Checkpoints(tmp_path / "checkpoints", store)
        step, path = checkpoints.latest()
        assert step >= reported
        assert (path / "model.safetensors").read_text() == f"weights {step}"
        assert checkpoints.state(step) == {"step": step}
        store.close()
