"""Sessions in one process: what becomes of turns at the edges of episodes, of secrets, of time, and of any body."""

from __future__ import annotations

import asyncio
import itertools
import json

import aiohttp
import numpy as np
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rl_harness.errors import EngineError
from rl_harness.gateway.errors import ApiError
from rl_harness.online import sessions as module
from rl_harness.online.rewards import Reward
from rl_harness.records import UnscoredReason, prompt_of


def turns_of(desk, episode):
    return desk.store.turns(episode.id)


async def test_an_episode_goes_on_from_the_ids_of_the_one_before_and_can_be_read_alone(desk):
    session, keys = await desk.sessions.start()
    first = await desk.ask(keys, "hello")
    await desk.sessions.reward(session, Reward(reward=1.0))
    await desk.ask(keys, "hello", first, "and now?")
    await desk.sessions.reward(session, Reward(reward=0.0))
    (one,), (two,) = (turns_of(desk, episode) for episode in desk.closed)
    assert two.parent is None
    prompt = prompt_of(two, {}.__getitem__)
    sampled = np.concatenate([one.context, one.completion])
    assert np.array_equal(prompt[: len(sampled)], sampled)


async def test_a_call_that_is_being_answered_when_the_reward_comes_is_of_the_next_episode(desk):
    session, keys = await desk.sessions.start()
    await desk.ask(keys, "hello")
    asked = asyncio.Event()

    def reply(request, prompt):
        asked.set()
        return "a long answer, which takes its time"

    desk.engine.reply = reply
    calling = asyncio.create_task(desk.ask(keys, "another"))
    await asked.wait()
    assert session.busy
    await desk.sessions.reward(session, Reward(reward=1.0))
    await calling
    assert [len(turns_of(desk, episode)) for episode in desk.closed] == [1]
    assert len(session.current.turns) == 1


async def test_a_turn_that_held_a_secret_is_kept_without_it_and_without_ids(desk):
    session, keys = await desk.sessions.start()
    secret = "sk-proj1234567890abcdefghijklmnop"
    first = await desk.ask(keys, f"my key is {secret}")
    await desk.ask(keys, f"my key is {secret}", first, "go on")
    await desk.sessions.reward(session, Reward(reward=1.0))
    kept = turns_of(desk, desk.closed[0])
    assert [turn.exact for turn in kept] == [False, False]
    assert all(turn.quarantined for turn in kept)
    await desk.close()
    files = [file.read_bytes() for file in desk.directory.glob("db.sqlite*")]
    assert not any(secret.encode() in data for data in files)
    await desk.open()


async def test_the_tree_of_an_assistant_that_lives_long_does_not_grow_with_it(desk, monkeypatch):
    monkeypatch.setattr(module, "TREE_LIMIT", 4)
    session, keys = await desk.sessions.start()
    said: list[str] = []
    for number in range(12):
        said.append(f"question {number}")
        said.append(await desk.ask(keys, *said))
        await desk.sessions.reward(session, Reward(reward=1.0))
    assert len(session.served.tree.turns) <= 5
    ids = [turn.id for episode in desk.closed for turn in turns_of(desk, episode)]
    assert len(set(ids)) == 12
    # Although old turns are gone from the tree, every prompt begins with the ids of the sequence before it.
    whole = [turns_of(desk, episode)[0] for episode in desk.closed]
    for before, after in itertools.pairwise(whole):
        sequence = np.concatenate([before.context, before.completion])
        assert np.array_equal(after.context[: len(sequence)], sequence)


async def test_what_waits_too_long_is_over(desk):
    _, keys = await desk.sessions.start()
    ended, ended_keys = await desk.sessions.start()
    await desk.ask(keys, "hello")
    await desk.ask(ended_keys, "hello")
    await desk.sessions.end(ended.row.id)
    desk.now += 59
    await desk.sessions.sweep()
    assert desk.closed == []
    desk.now += 2
    await desk.sessions.sweep()
    assert [episode.unscored for episode in desk.closed] == [UnscoredReason.NOT_REWARDED] * 2
    assert desk.sessions.count == 1
    with pytest.raises(ApiError, match="too late"):
        await desk.sessions.reward(desk.sessions.of_reward_key(ended_keys.reward.encode()), Reward(reward=1.0))
    desk.now += 3600
    await desk.sessions.sweep()
    assert desk.sessions.count == 0


async def test_two_rewards_at_once_are_one(desk):
    session, keys = await desk.sessions.start()
    await desk.ask(keys, "hello")
    given = [desk.sessions.reward(session, Reward(reward=float(value))) for value in range(5)]
    told = await asyncio.gather(*given, return_exceptions=True)
    assert sum(not isinstance(one, Exception) for one in told) == 1
    assert {one.status for one in told if isinstance(one, Exception)} == {409}
    assert len(desk.closed) == 1


async def test_sessions_of_one_id_started_at_once_are_one(desk):
    told = await asyncio.gather(*(desk.sessions.start(id="same") for _ in range(5)), return_exceptions=True)
    assert sum(not isinstance(one, Exception) for one in told) == 1


async def test_a_call_that_failed_is_nothing_that_a_reward_could_land_on(desk):
    session, keys = await desk.sessions.start()
    desk.engine.reply = lambda request, prompt: "an answer that breaks off"
    desk.engine.faults.append(EngineError("the engine is gone"))
    with pytest.raises(openai.InternalServerError):
        await desk.ask(keys, "hello")
    with pytest.raises(ApiError, match="no model call of this session is complete"):
        await desk.sessions.reward(session, Reward(reward=1.0))
    await desk.ask(keys, "hello")
    await desk.sessions.reward(session, Reward(reward=1.0))
    assert [len(turns_of(desk, episode)) for episode in desk.closed] == [1]


async def test_a_call_that_is_being_answered_brings_no_deleted_session_back(desk):
    session, keys = await desk.sessions.start()
    asked = asyncio.Event()

    def reply(request, prompt):
        asked.set()
        return "a long answer, which takes its time"

    desk.engine.reply = reply
    calling = asyncio.create_task(desk.ask(keys, "hello"))
    await asked.wait()
    await desk.sessions.end(session.row.id, by="deleted", wait=False)
    with pytest.raises(openai.AuthenticationError):
        await calling
    assert desk.sessions.info(session.row.id)["state"] == "over"
    assert desk.closed == []
    assert desk.engine.running == 0


PATHS = st.sampled_from(
    [
        *("/rl/reward", "/rl/sessions", "/rl/sessions/x", "/rl/sessions/x/refresh", "/rl/sessions/x/end", "/rl/status"),
        *(
            "/rl/start_session",
            "/rl/set_reward",
            "/rl/end_session",
            "/rl",
            "/rl/",
            "/rl/sessions/",
            "/rl/sessions//end",
        ),
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(
    [
        *("reward", "rewards", "turn", "name", "replace", "end", "id", "group", "ttl", "next_episode"),
        *("task_id", "api_key", "interaction_id"),
    ]
)
BODIES = st.binary(max_size=40) | st.dictionaries(NAMES, VALUES, max_size=4).map(lambda body: json.dumps(body).encode())


async def test_no_body_makes_it_fail(desk):
    _, keys = await desk.sessions.start(id="x")
    await desk.ask(keys, "hello")
    url = desk.gateway.root_url
    asked: list[tuple[str, str, bytes, str]] = []

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(st.sampled_from(["GET", "POST", "DELETE", "PUT"]), PATHS, BODIES, st.sampled_from(["admin", "reward", ""]))
    def collect(method, path, body, key):
        asked.append((method, path, body, key))

    collect()
    known = {"admin": "admin", "reward": keys.reward}
    async with aiohttp.ClientSession() as http:
        for method, path, body, key in asked:
            headers = {"Authorization": f"Bearer {known[key]}"} if key else {}
            async with http.request(method, url + path, data=body, headers=headers) as response:
                text = await response.text()
                assert response.status < 500, (method, path, body, text)
                assert json.loads(text) is not None
