"""``rl-harness serve``: what it says, what it keeps over a kill -9, and how it ends."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from rl_harness.jobs.learner import without_old
from rl_harness.learning import samples_of, weighted
from rl_harness.records import Origin, UnscoredReason
from rl_harness.runs.info import DATABASE
from rl_harness.runs.store import reading
from rl_harness.testing.chat_server import ScriptedChat
from rl_harness.testing.engine import SCRIPTED_PLUGIN
from rl_harness.testing.records import a_conversation, an_episode


def run_of(served):
    return served.directory / served.wait_for("start")["run"]


def episodes(served):
    with reading(run_of(served) / DATABASE) as store:
        return store.episodes(phase="online")


def test_an_unrewarded_episode_ends_unscored(place):
    served = place.scripted("-o", "serving.idle_timeout=0.2")
    session = served.session()
    served.say(session, "hello")
    told = served.wait_for("episode")
    assert (told["reward"], told["unscored"]) == (None, "not_rewarded")
    assert served.give(session, {"reward": 1.0})[1]["error"]["code"] == "too_late"
    # What was acknowledged is not lost: an episode with some of its rewards is scored with these.
    reply = served.say(session, "hello")
    served.give(session, {"reward": 1.0, "turn": reply.id})
    assert served.wait_for("episode", 2)["reward"] == 1.0
    first, second = episodes(served)
    assert (first.origin, first.unscored) == (Origin.ONLINE, UnscoredReason.NOT_REWARDED)
    assert list(second.turn_rewards.values()) == [1.0]


def test_a_session_expires(place):
    served = place.scripted()
    session = served.session(ttl=0.5)
    served.say(session, "hello")
    assert served.wait_for("episode")["unscored"] == "not_rewarded"
    with pytest.raises(Exception, match="401"):
        served.say(session, "hello")
    assert served.look(session)["ended_by"] == "expired"


def test_ctrl_c_finishes_what_runs(place):
    served = place.scripted("-o", "engine.delay=0.5", "-o", "engine.chunk=1", replies=("abcdef",))
    session = served.session()
    answers: list[str] = []
    calling = threading.Thread(target=lambda: answers.append(served.say(session, "hello").choices[0].message.content))
    calling.start()
    while not served.look(session)["running"]:
        time.sleep(0.02)
    assert served.stop() == 0
    calling.join()
    assert answers == ["abcdef"]
    assert served.wait_for("finish")["report"]["online"]["going_on"] == 1
    assert "the same command continues" in served.errors
    listed = json.loads(place.cli("runs", "list", "--json"))
    assert [(run["status"], run["benchmark"]) for run in listed] == [("interrupted", "online")]
    assert "1 going on" in place.cli("runs", "show", listed[0]["name"])


def test_everything_goes_on_after_a_kill(place):
    served = place.scripted()
    admin = served.admin_key
    session, other = served.session(), served.session()
    first = served.say(session, "hello")
    served.say(other, "hello")
    served.reward(other, "1.0")
    served.kill()

    again = place.scripted()
    assert again.wait_for("start")["resumed"]
    assert again.admin_key is None  # it was told before, and still holds
    again.admin_key = admin
    again.say(session, "hello", first.choices[0].message.content, "and?")
    assert len(again.look(session)["episode"]["turns"]) == 2
    assert again.give(other, {"reward": 1.0})[1]["error"]["code"] == "already_rewarded"
    assert "episode over" in again.reward(session, "0.5")
    episode = next(e for e in episodes(again) if e.reward == 0.5)
    with reading(run_of(again) / DATABASE) as store:
        one, two = store.turns(episode.id)
    # The conversation went on from the very ids that were sampled before the kill.
    assert two.parent == one.id
    assert two.shared == one.prompt_tokens + one.completion_tokens
    assert again.stop() == 0


def test_another_admin_key_is_made_on_demand_and_one_from_a_variable_stays(place):
    served = place.scripted()
    old = served.admin_key
    served.kill()
    served = place.scripted("--new-admin-key")
    assert served.admin_key not in (None, old)
    assert served.request("GET", "/rl/status", key=old)[0] == 401
    assert served.request("GET", "/rl/status", key=served.admin_key)[0] == 200
    text = (run_of(served) / DATABASE).read_bytes() + (run_of(served) / "run.log").read_bytes()
    assert served.admin_key.encode() not in text
    served.kill()
    served = place.scripted("--admin-key-env", "MY_KEY", MY_KEY="0123456789abcdef")
    assert served.admin_key is None
    assert served.request("GET", "/rl/status", key="0123456789abcdef")[0] == 200
    served.kill()
    message = place.cli("serve", "--model", "tiny", "--admin-key-env", "MY_KEY", expect=2)
    assert "MY_KEY, which is not set" in message


@pytest.mark.timeout(300)
def test_no_acknowledged_reward_is_lost_whenever_it_is_killed(place):
    rng = random.Random(7)
    acknowledged: dict[str, float] = {}
    session: dict[str, Any] | None = None
    admin = None
    for life in range(5):
        served = place.scripted()
        admin = served.admin_key or admin
        served.admin_key = admin
        session = session or served.session()
        killer = threading.Timer(rng.uniform(0.05, 1.0), served.process.kill)
        killer.start()
        try:
            while True:
                served.say(session, "hello")
                value = float(len(acknowledged) + 1)
                status, told = served.give(session, {"reward": value})
                if status == 409:  # the process before was killed after it wrote and before it told
                    continue
                assert status == 200, told
                acknowledged[told["episode"]] = value
        except AssertionError:
            raise
        except Exception:  # whatever a client makes of a server that is gone
            served.process.wait()
        killer.cancel()
        with reading(run_of(served) / DATABASE) as store:
            kept = {e.id: e.reward for e in store.episodes(phase="online")}
        assert acknowledged.items() <= kept.items(), life
    assert acknowledged


def test_programs_for_areal_run_unchanged(place):
    served = place.scripted("--areal")
    root = served.base_url.removesuffix("/v1")

    def start(body):
        return served.request("POST", "/rl/start_session", body, key=served.admin_key)

    assert served.request("POST", "/rl/start_session", {"task_id": "t"}, key="wrong-key")[0] == 401
    status, told = start({"task_id": "demo-task", "api_key": None})
    assert status == 200
    key = told["api_key"]
    assert served.request("POST", "/rl/set_reward", {"reward": 1.0}, key=key)[0] == 400
    import openai

    client = openai.OpenAI(base_url=root, api_key=key, max_retries=0)  # without /v1, as its examples have it
    reply = client.chat.completions.create(model="default", messages=[{"role": "user", "content": "hi"}])
    assert served.request("POST", "/rl/set_reward", {"reward": 0.0}, key=key) == (200, {"message": "success"})
    assert served.request("POST", "/rl/set_reward", {"reward": 1.0}, key=key)[0] == 200
    status, again = start({"task_id": "demo-task", "api_key": key})
    assert (status, again["api_key"]) == (200, key)
    assert served.wait_for("episode")["reward"] == 1.0
    reply = client.chat.completions.create(model="default", messages=[{"role": "user", "content": "hi"}])
    body = {"interaction_id": reply.id, "reward": -1.0}
    assert served.request("POST", "/rl/set_reward", body, key=key)[0] == 200
    assert served.request("POST", "/rl/end_session", {}, key=key) == (
        200,
        {"message": "success", "interaction_count": 1},
    )
    assert served.wait_for("episode", 2)["reward"] == -1.0
    assert served.request("POST", "/rl/set_reward", {"reward": 1.0}, key="unknown")[0] == 401
    # A key whose session has ended begins the next one.
    assert start({"task_id": "demo-task", "api_key": key})[1]["api_key"] == key
    client.chat.completions.create(model="default", messages=[{"role": "user", "content": "hi"}])


def test_too_many_calls_of_a_session_are_refused_only_when_asked_for(place):
    served = place.scripted("-o", "engine.delay=2", "-o", "serving.session_calls=1", "-o", "serving.refuse_busy=true")
    session, refused = served.session(), []

    def call():
        try:
            served.say(session, "hello")
        except openai.RateLimitError as error:
            refused.append(error.code)

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refused == ["busy"]


def test_a_reverse_proxys_name_has_to_be_told(place):
    """On loopback a request names this machine: a web page whose name was pointed here does not get in."""
    served = place.scripted("-o", "serving.hosts=['gateway.example']")
    session = served.session()
    address = urlsplit(session["base_url"])
    for host, status in (("gateway.example", 200), ("other.example", 421)):
        connection = HTTPConnection(address.hostname, address.port, timeout=30)
        headers = {"host": host, "authorization": f"Bearer {session['api_key']}"}
        connection.request("GET", "/v1/models", headers=headers)
        assert connection.getresponse().status == status
        connection.close()


def test_what_serve_does_not_read_is_said(place):
    told = place.cli(
        "serve", "--model", "tiny", "--dry-run", "-o", "harness.name=nop", "-o", "training.steps=3", "--json"
    )
    unused = {setting["key"] for setting in json.loads(told)["unused"]}
    assert unused == {"harness.name", "training.steps"}
    assert "only serve reads it" in place.cli("run", "--dry-run", "--json", "-o", "serving.port=1")


def test_an_address_that_cannot_be_had_is_told_before_a_run_exists(place):
    place.scripted().kill()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        options = ("-p", str(SCRIPTED_PLUGIN), "--engine", "scripted", "--model", str(place.directory / "tiny"))
        told = place.cli("serve", *options, "--name", "other", "--port", str(port), expect=1)
    assert f"port {port}" in told
    assert "in use" in told
    assert not (place.directory / "runs" / "other").exists()


async def test_a_model_behind_an_api_is_served_and_recorded_without_ids(place):
    async with ScriptedChat(["hello there"]) as chat:

        def use():
            remote = ("--model", "remote", "--base-url", chat.endpoint.base_url)
            served = place.start(*remote, OPENAI_API_KEY=chat.endpoint.api_key).ready()
            session = served.session()
            assert served.say(session, "hello").choices[0].message.content == "hello there"
            served.reward(session, "1.0")
            (episode,) = episodes(served)
            with reading(run_of(served) / DATABASE) as store:
                (turn,) = store.turns(episode.id)
            return turn

        turn = await asyncio.to_thread(use)
    assert (turn.exact, turn.message.content) == (False, "hello there")


def test_tokens_that_are_too_old_are_not_trained_on():
    episode = an_episode("t", 1.0)
    samples = samples_of(episode, a_conversation(2), group="g", advantage=1.0, gamma=1.0)
    samples = weighted(samples, "episode")
    version = int(samples[-1].versions[-1]) + 3
    assert without_old(samples, version, 3) == samples
    kept = without_old(samples, version + 1, 3)
    assert not any(sample.mask.any() or sample.weight.any() for sample in kept)
