"""What goes into the database comes out, counts once, and stays small."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import sqlite3
import tempfile
import tracemalloc
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rl_harness.errors import RunError
from rl_harness.records import Sample, SamplingParams, ToolCall, UnscoredReason, ids, logps, prompt_of, sequence_of
from rl_harness.records.turn import Message
from rl_harness.runs.rows import pack, unpack
from rl_harness.runs.store import RunStore, reading
from rl_harness.testing.records import a_conversation, an_episode


def same_turn(a, b):
    for name in type(a).__struct_fields__:
        left, right = getattr(a, name), getattr(b, name)
        if isinstance(left, np.ndarray):
            assert left.dtype == right.dtype, name
            assert left.tolist() == right.tolist(), name
        else:
            assert left == right, name


async def test_an_episode_and_its_turns_come_back_exactly(store):
    episode = an_episode(flags=("tampered",), detail="naïve \0 text")
    turns = a_conversation(3)
    turns[1] = msgspec.structs.replace(
        turns[1],
        sampling=SamplingParams(temperature=0.7, stop=("a", "b"), stop_token_ids=(1, 2)),
        message=Message(role="assistant", reasoning="why", tool_calls=(ToolCall(id="1", name="f", arguments="{}"),)),
        versions=ids([1, 1, 2, 2, 2, 2, 2, 3, 3, 3]),
        extra={"chunks": [1, 2]},
        first_token_seconds=0.25,
    )
    assert await store.add_episode(episode, turns)

    assert store.episodes() == [episode]
    back = store.turns(episode.id)
    for turn, again in zip(turns, back, strict=True):
        same_turn(turn, again)
    by_id = {turn.id: turn for turn in back}
    assert sequence_of(back[2], by_id.__getitem__).tolist() == sequence_of(turns[2], by_id.__getitem__).tolist()
    assert store.turns("nobody") == []


async def test_turns_of_a_model_without_token_ids_are_kept(store):
    (turn,) = a_conversation(1)
    remote = msgspec.structs.replace(
        turn, exact=False, context=ids([]), completion=ids([]), logps=logps([]), versions=ids([])
    )
    await store.add_episode(an_episode(), [remote])
    same_turn(store.turns(an_episode().id)[0], remote)


async def test_storing_an_episode_again_changes_nothing(store):
    episode = an_episode()
    assert await store.add_episode(episode, a_conversation())
    assert await store.add_episode(episode, a_conversation())
    assert store.episodes(attempts=True) == [episode]
    assert len(store.turns(episode.id)) == 2


async def test_a_retry_counts_once_and_the_first_attempt_stays_visible(store):
    dead = an_episode(reward=None)
    retried = an_episode(reward=0.0, attempt=2)
    assert await store.add_episode(dead, [])
    assert await store.add_episode(retried, [])
    assert store.episodes() == [retried]
    assert store.episodes(attempts=True) == [dead, retried]
    assert store.attempts(dead.key) == 2


async def test_the_last_attempt_counts_while_none_is_scored(store):
    for attempt, reason in enumerate((UnscoredReason.SANDBOX_ERROR, UnscoredReason.VERIFIER_TIMEOUT), start=1):
        await store.add_episode(an_episode(reward=None, unscored=reason, attempt=attempt), [])
    assert [e.unscored for e in store.episodes()] == [UnscoredReason.VERIFIER_TIMEOUT]


async def test_a_scored_attempt_is_not_replaced(store):
    await store.add_episode(an_episode(reward=0.0), [])
    assert not await store.add_episode(an_episode(reward=1.0, attempt=2), [])
    assert not await store.add_episode(an_episode(reward=None, attempt=3), [])
    assert [e.reward for e in store.episodes()] == [0.0]


async def test_another_episode_of_a_taken_attempt_number_gets_the_next_one(store):
    """A process that was killed may not know how far its predecessor came; nothing it did is lost for that."""
    await store.add_episode(an_episode(reward=None, id="a"), [])
    assert await store.add_episode(an_episode(reward=1.0, id="b"), [])
    assert [(e.id, e.attempt) for e in store.episodes(attempts=True)] == [("a", 1), ("b", 2)]
    assert [e.id for e in store.episodes()] == ["b"]


async def test_an_id_of_another_key_is_refused(store):
    await store.add_episode(an_episode("one", id="x"), [])
    with pytest.raises(RunError, match="stored before"):
        await store.add_episode(an_episode("two", id="x"), [])


async def test_a_failing_write_takes_no_other_down(store):
    """Writes that are committed together fail alone."""
    good = [store.add_episode(an_episode(f"task-{i}"), []) for i in range(5)]
    bad = store.add_episode(an_episode("bad"), [*a_conversation(1), *a_conversation(1)])  # one turn id twice
    results = await asyncio.gather(*good, bad, return_exceptions=True)
    assert results[:5] == [True] * 5
    assert isinstance(results[5], RunError)
    assert len(store.episodes()) == 5


async def test_a_cancelled_caller_does_not_lose_the_episode(store):
    task = asyncio.ensure_future(store.add_episode(an_episode(), a_conversation()))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    store.flush()
    assert store.episodes() == [an_episode()]


async def test_what_json_cannot_hold_is_refused_before_it_is_stored(store):
    with pytest.raises(ValueError, match="not finite"):
        await store.add_episode(an_episode(reward=math.nan), [])
    assert store.episodes() == []


async def test_lone_surrogates_do_not_cost_an_episode(store):
    episode = an_episode(detail="half \ud83d and whole \ud83d\ude00")
    await store.add_episode(episode, [])
    assert store.episodes()[0].detail == "half \ufffd and whole \U0001f600"


async def test_episodes_are_found_by_phase_and_step(store):
    for phase, step in (("train", 0), ("train", 1), ("after", 0)):
        await store.add_episode(an_episode(phase=phase, step=step), [])
    assert [e.key.step for e in store.episodes("train")] == [0, 1]
    assert [e.key.phase for e in store.episodes(step=0)] == ["train", "after"]
    assert len(store.episodes(phase="train", step=1)) == 1


async def test_a_conversation_costs_its_new_tokens_not_the_square_of_its_turns(store):
    """Prompts were stored whole: O(turns²) in memory and on disk."""

    async def bytes_stored(turns: int) -> int:
        episode = an_episode(f"of-{turns}")
        await store.add_episode(episode, a_conversation(turns, new_tokens=50, completion=50))
        with sqlite3.connect(store.path) as db:
            (size,) = db.execute(
                "SELECT sum(length(context) + length(completion) + length(logps) + length(versions) + length(t.record))"
                " FROM turns t JOIN episodes e ON e.seq = t.episode WHERE e.id = ?",
                (episode.id,),
            ).fetchone()
        db.close()
        return int(size)

    assert await bytes_stored(80) <= 4.2 * await bytes_stored(20)
    turns = store.turns(an_episode("of-80").id)
    by_id = {turn.id: turn for turn in turns}
    assert len(prompt_of(turns[-1], by_id.__getitem__)) == 79 * 100 + 50


async def test_memory_does_not_grow_with_what_is_stored(store):
    async def add(start: int, stop: int) -> None:
        for i in range(start, stop):
            await store.add_episode(an_episode(f"task-{i}"), a_conversation(4, new_tokens=500))

    await add(0, 20)
    tracemalloc.start()
    try:
        await add(20, 40)
        first, _ = tracemalloc.get_traced_memory()
        await add(40, 140)
        second, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert second - first < 200_000  # a hundred episodes are about 1 MB


def test_metrics_by_step_and_a_repeated_step_replaces_them(store):
    store.add_metrics("train", 1, {"loss": 2.0})
    store.add_metrics("train", 0, {"loss": 1.0, "kl": math.nan})
    store.add_metrics("train", 1, {"loss": 3.0, "big": math.inf})
    store.add_metrics("other", 0, {"loss": 9.0})
    first, second = store.metrics("train")
    assert first["step"] == 0
    assert first["loss"] == 1.0
    assert math.isnan(first["kl"])
    assert second == {"step": 1, "loss": 3.0, "big": math.inf}


def test_events_keep_their_order(store):
    for i in range(50):
        store.add_event("exec" if i % 2 else "note", {"i": i})
    assert [e.data["i"] for e in store.events()] == list(range(50))
    assert [e.data["i"] for e in store.events("exec")][:2] == [1, 3]
    assert all(e.at > 0 for e in store.events())


def test_state(store):
    assert store.get_state("steps") is None
    assert store.get_state("steps", 0) == 0
    store.set_state("steps", 3)
    store.set_states({"steps": 4, "rng": [1, {"a": None}]})
    assert store.get_state("steps") == 4
    assert store.get_state("rng") == [1, {"a": None}]


def test_samples_say_what_was_trained(store):
    sample = Sample(
        turn="t",
        episode="e",
        group="g",
        policy="p",
        temperature=0.7,
        prompt=ids([1]),
        completion=ids([1, 2, 3]),
        mask=logps([1, 1, 0]),
        behaviour_logps=logps([-1, -2, -3]),
        versions=ids([0, 0, 0]),
        advantage=logps([0.5, 0.5, 0.5]),
        weight=logps([0.1, 0.2, 0.3]),
    )
    store.add_samples(3, [sample, sample])
    store.add_samples(3, [sample])  # the step is done again
    (stored,) = store.samples(3)
    assert (stored.turn, stored.episode, stored.group, stored.policy, stored.temperature) == ("t", "e", "g", "p", 0.7)
    assert stored.advantage.tolist() == sample.advantage.tolist()
    assert stored.weight.tolist() == sample.weight.tolist()
    assert stored.mask.tolist() == sample.mask.tolist()
    assert store.samples(4) == []


@given(st.lists(st.integers(0, 2), max_size=6), st.integers(0, 40))
def test_packed_arrays_come_back(varied, repeated):
    for values in (varied, [7] * repeated):
        array = ids(values)
        assert unpack(pack(array, "<i4"), len(array), "<i4").tolist() == values
    assert len(pack(ids([7] * 100), "<i4")) == 4


async def test_another_connection_reads_while_this_one_writes(store):
    await store.add_episode(an_episode("one"), a_conversation())
    with reading(store.path) as other:
        assert len(other.episodes()) == 1
        await store.add_episode(an_episode("two"), a_conversation())
        assert len(other.episodes()) == 2
        with pytest.raises(RunError, match="reading only"):
            other.set_state("a", 1)


async def test_the_database_is_whole_after_closing(store):
    await store.add_episode(an_episode(), a_conversation())
    store.add_event("last", {})
    store.close()
    store.close()
    assert not store.path.with_name("db.sqlite-wal").exists()
    with reading(store.path) as again:
        assert len(again.episodes()) == 1
        assert len(again.events()) == 1
    with pytest.raises(RunError, match="closed"):
        store.set_state("a", 1)


def test_a_finished_run_of_somebody_else_can_be_read(child):
    """A directory one may not write to: no lock, no index file beside the database."""
    place = Path(tempfile.mkdtemp())  # pytest's own directories are closed to other users
    try:
        path = place / "a b?#%.sqlite"
        store = RunStore(path)
        asyncio.run(store.add_episode(an_episode(), a_conversation()))
        store.close()
        path.chmod(0o444)
        place.chmod(0o555)

        def body(say):
            if os.getuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            with reading(path) as other:
                say(other.episodes()[0].id)
            with pytest.raises(RunError, match="cannot be opened or written"):
                RunStore(path)

        process = child(body)
        assert process.line() == an_episode().id
        assert process.wait() == 0
    finally:
        place.chmod(0o755)
        shutil.rmtree(place)


def test_a_database_of_somebody_else_is_refused(tmp_path):
    path = tmp_path / "db.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE mine (a)")
    db.close()
    for readonly in (True, False):
        with pytest.raises(RunError, match="not a database of rl-harness"):
            RunStore(path, readonly=readonly)


@pytest.mark.parametrize("readonly", [True, False])
def test_a_damaged_database_is_refused(tmp_path, readonly):
    path = tmp_path / "db.sqlite"
    path.write_bytes(b"SQLite format 3\0 but not really" * 100)
    with pytest.raises(RunError, match=r"db\.sqlite.*damaged") as error:
        RunStore(path, readonly=readonly)
    assert "--fresh" in str(error.value)
