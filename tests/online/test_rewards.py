"""Rewards as those who give them see it: what each is for, when an episode is over, and what is refused."""

from __future__ import annotations

import json

import pytest


@pytest.fixture(scope="module")
def served(make_place):
    return make_place().scripted()


def test_a_reward_makes_an_episode_of_what_was_done_and_the_agent_goes_on(served):
    session = served.session()
    first = served.say(session, "hello")
    assert first.choices[0].message.content in ("yes", "no", "well")
    assert "reward 1, episode over" in served.reward(session, "1.0")
    assert served.look(session)["last_episode"]["reward"] == 1.0
    assert served.look(session)["episode"] is None
    # The same key and the same client: the next episode.
    served.say(session, "hello", first.choices[0].message.content, "and now?")
    told = served.look(session)
    assert told["episodes"] == 2
    assert len(told["episode"]["turns"]) == 1
    assert "reward -0.5" in served.reward(session, "-0.5")


def test_the_key_of_the_agent_rewards_nothing_and_the_reward_key_calls_nothing(served):
    session = served.session()
    served.say(session, "hello")
    swapped = {**session, "reward_key": session["api_key"], "api_key": session["reward_key"]}
    status, told = served.give(swapped, {"reward": 1.0})
    assert (status, told["error"]["code"]) == (401, "invalid_reward_key")
    with pytest.raises(Exception, match="401"):
        served.say(swapped, "hello")
    assert "no session has this reward key" in served.reward(swapped, "1.0", expect=1)
    assert served.request("POST", "/rl/reward", {"reward": 1.0})[0] == 401
    assert "finite" in served.reward(session, "nan", expect=2)
    for key in (None, session["api_key"], session["reward_key"]):
        for method, path in (("POST", "/rl/sessions"), ("GET", "/rl/sessions"), ("GET", "/rl/status")):
            assert served.request(method, path, {} if method == "POST" else None, key=key)[0] == 401


@pytest.mark.parametrize(
    "body",
    [
        *(b'{"reward": NaN}', b'{"reward": Infinity}', b'{"reward": 1e999}', b'{"reward": true}', b'{"reward": "1"}'),
        *(
            b'{"reward": null}',
            b'{"rewards": {}}',
            b'{"reward": 1, "rewards": {"a": 1}}',
            b'{"reward": 1, "unknown": 2}',
        ),
        *(b'{"rewards": {"a b": 1}}', b'{"rewards": {"a": NaN}}', b'{"reward": 1, "name": ""}', b"", b"[]", b"{"),
        *(b'{"reward": 1, "turn": "x", "name": "y"}', b"\xff\xfe"),
    ],
)
def test_what_is_no_reward_is_refused_and_changes_nothing(served, body):
    session = served.session()
    served.say(session, "hello")
    status, told = served.request("POST", "/rl/reward", body, key=session["reward_key"])
    assert status == 400, told
    assert told["error"]["message"]
    assert served.look(session)["episode"]["rewards"] == {}


def test_a_second_reward_is_refused_unless_it_replaces_the_first(served):
    session = served.session()
    assert served.give(session, {"reward": 1.0})[1]["error"]["code"] == "no_turns"
    served.say(session, "hello")
    assert served.give(session, {"reward": 1.0})[0] == 200
    status, told = served.give(session, {"reward": 1.0})
    assert (status, told["error"]["code"]) == (409, "already_rewarded")
    assert "already" in served.reward(session, "0.0", expect=1)
    assert "reward 0.25" in served.reward(session, "0.25", "--replace")
    assert served.look(session)["last_episode"]["reward"] == 0.25


def test_one_turn_is_rewarded_by_the_id_of_its_reply_or_its_own(served):
    session = served.session()
    first, second = served.say(session, "hello"), served.say(session, "another")
    assert "episode goes on" in served.reward(session, "1.0", "--turn", first.id)
    assert served.give(session, {"reward": 1.0, "turn": first.id})[0] == 409
    turns = served.look(session)["episode"]["turns"]
    status, told = served.give(session, {"reward": 0.5, "turn": turns[1], "end": True})
    assert (status, told["closed"], told["reward"]) == (200, True, 1.5)
    status, told = served.give(session, {"reward": 0.25, "turn": second.id, "replace": True})
    assert (status, told["reward"]) == (200, 1.25)
    status, told = served.give(session, {"reward": 1.0, "turn": "chatcmpl-unknown"})
    assert (status, told["error"]["code"]) == (404, "unknown_turn")


def test_named_rewards_add_up_to_their_mean_until_the_episode_is_said_to_be_over(served):
    session = served.session()
    served.say(session, "hello")
    assert "episode goes on" in served.reward(session, "1.0", "--name", "helpful")
    assert served.give(session, {"reward": 1.0, "name": "helpful"})[0] == 409
    told = json.loads(served.reward(session, "0.0", "--name", "brief", "--end", "--json"))
    assert (told["closed"], told["reward"]) == (True, 0.5)
    served.say(session, "again")
    status, told = served.give(session, {"rewards": {"helpful": 1.0, "brief": 1.0}})
    assert (status, told["closed"], told["reward"]) == (200, True, 1.0)


def test_a_session_that_was_ended_still_waits_for_its_reward(served):
    session = served.session(id="chosen")
    served.say(session, "hello")
    status, told = served.request("POST", "/rl/sessions/chosen/end", key=served.admin_key)
    assert (status, told["state"]) == (200, "waiting for a reward")
    with pytest.raises(Exception, match="401"):
        served.say(session, "hello")
    assert "episode over" in served.reward(session, "1.0")
    status, told = served.give(session, {"reward": 1.0})
    assert (status, told["error"]["code"]) == (409, "already_rewarded")
    assert served.request("POST", "/rl/sessions", {"id": "chosen"}, key=served.admin_key)[0] == 409
    assert served.request("POST", "/rl/sessions/chosen/end", key=served.admin_key)[0] == 410


def test_a_deleted_session_is_over_unscored_and_a_reward_comes_too_late(served):
    session = served.session()
    served.say(session, "hello")
    status, told = served.request("DELETE", f"/rl/sessions/{session['id']}", key=served.admin_key)
    assert (status, told["state"]) == (200, "over")
    status, told = served.give(session, {"reward": 1.0})
    assert (status, told["error"]["code"]) == (410, "too_late")
    assert served.look(session)["state"] == "over"
    assert served.request("GET", "/rl/sessions/none", key=served.admin_key)[0] == 404
    empty = served.session()
    served.request("DELETE", f"/rl/sessions/{empty['id']}", key=served.admin_key)
    assert served.give(empty, {"reward": 1.0})[0] == 410


def test_refreshing_begins_the_next_episode_if_asked(served):
    session = served.session(ttl=60)
    served.say(session, "hello")
    path = f"/rl/sessions/{session['id']}/refresh"
    status, told = served.request("POST", path, {"ttl": 600}, key=served.admin_key)
    assert (status, len(told["episode"]["turns"])) == (200, 1)
    assert told["expires_at"] > session["expires_at"] + 300
    status, told = served.request("POST", path, {"next_episode": True}, key=served.admin_key)
    assert (status, told["episode"], told["last_episode"]["reward"]) == (200, None, None)
    for bad in ({"ttl": 0}, {"ttl": "x"}, {"other": 1}):
        assert served.request("POST", path, bad, key=served.admin_key)[0] == 400


def test_bad_requests_of_an_administrator(served):
    for body in ({"id": "a b"}, {"id": "a:b"}, {"id": "../x"}, {"ttl": -1}, {"group": ""}, {"other": 1}, b"{"):
        assert served.request("POST", "/rl/sessions", body, key=served.admin_key)[0] == 400
    assert served.request("GET", "/rl/other", key=served.admin_key)[0] == 404
    assert served.request("POST", "/rl/start_session", {"task_id": "t"}, key=served.admin_key)[0] == 404


def test_the_secret_address_needs_no_key(served):
    import openai

    session = served.session()
    client = openai.OpenAI(base_url=session["secret_url"], api_key="none", max_retries=0)
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}])
    assert len(served.look(session)["episode"]["turns"]) == 1
