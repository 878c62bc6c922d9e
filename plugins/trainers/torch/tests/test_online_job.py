"""``serve`` with a trainer on a real (tiny, random) model: it learns from single rewards while its agent goes on, drops
no call, and survives kill -9."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rl_harness.testing.serving import Served, ServingPlace
from rl_harness.testing.tokenizer import write_tokenizer
from rl_harness_torch.testing import tiny_model

KILLS = int(os.environ.get("ONLINE_KILLS", "2"))


@pytest.fixture
def place(tmp_path):
    write_tokenizer(tiny_model(tmp_path / "model", vocab_size=261))
    place = ServingPlace(tmp_path)
    yield place
    place.kill()


def start(place: ServingPlace, trainer: str = "reinforce", **changes: Any) -> Served:
    options = {
        "engine.threads": 1,
        "backend.threads": 1,
        "sampling.max_tokens": 1,
        "training.learning_rate": 0.02,
        "online.batch_size": 8,
        **changes,
    }
    settings = [part for key, value in options.items() for part in ("-o", f"{key}={value}")]
    return place.start("--model", "model", "--trainer", trainer, *settings)


def right(reply: Any) -> float:
    """Half of the printable characters are right."""
    text = reply.choices[0].message.content or ""
    return float(len(text) == 1 and 33 <= ord(text) < 127 and ord(text) % 2 == 0)


def live(served: Served, session: dict[str, Any], episodes: int) -> list[float]:
    """What an assistant does: it answers, and is told how well it did."""
    rewards = []
    for _ in range(episodes):
        rewards.append(right(served.say(session, "Say something.")))
        status, told = served.give(session, {"reward": rewards[-1]})
        assert status == 200, told
    return rewards


@pytest.mark.timeout(300)
def test_an_assistant_learns_from_single_rewards_without_a_pause(place):
    served = start(place).ready()
    session = served.session()
    failed: list[Exception] = []
    done = threading.Event()

    def others() -> None:
        other = served.session()
        while not done.wait(0.02):  # without a rest it would take the core that the others need
            try:
                served.say(other, "And you?")
            except Exception as error:
                failed.append(error)

    calling = threading.Thread(target=others)
    calling.start()
    first = live(served, session, 40)
    last = live(served, session, 80)[-40:]
    done.set()
    calling.join()
    assert not failed
    assert sum(last) > sum(first)
    step = served.wait_for("step", 2)["metrics"]
    told = [(one["sessions"], one["rewarded"]) for one in served.events if one["event"] == "waiting"]
    assert told[0] == (0, 0)
    assert (2, 7) in told  # both assistants, and one reward before the step
    assert step["episodes"] == 8
    assert "baseline" in step
    assert served.stop() == 0
    with sqlite3.connect(next((place.directory / "runs").glob("*/db.sqlite"))) as db:
        versions = {row[0] for row in db.execute("SELECT policy_version FROM episodes")}
    assert len(versions) > 3  # later episodes were sampled by the weights that earlier ones led to


@pytest.mark.long
@pytest.mark.timeout(600)
def test_no_step_is_repeated_and_no_reward_lost_whenever_it_is_killed(place):
    rng = random.Random(3)
    session: dict[str, Any] | None = None
    admin = None
    given: set[str] = set()
    for life in range(KILLS + 1):
        served = start(place, **{"online.batch_size": 4}).ready()
        admin = served.admin_key or admin
        served.admin_key = admin
        session = session or served.session()
        if life < KILLS:
            killer = threading.Timer(rng.uniform(0.1, 4.0), served.process.kill)
            killer.start()
        began = time.monotonic()
        try:
            while life < KILLS or time.monotonic() < began + 2:
                reply = served.say(session, "Say something.")
                status, told = served.give(session, {"reward": right(reply)})
                if status == 200:
                    given.add(told["episode"])
        except Exception:  # whatever a client makes of a server that is gone
            assert life < KILLS
            served.process.wait()
    served.wait_for("step")
    assert served.stop() == 0
    with sqlite3.connect(next((place.directory / "runs").glob("*/db.sqlite"))) as db:
        kept = {row[0] for row in db.execute("SELECT id FROM episodes WHERE reward IS NOT NULL")}
        steps = [row[0] for row in db.execute("SELECT DISTINCT step FROM metrics WHERE phase = 'train' ORDER BY step")]
        trained = db.execute("SELECT trained_in, count(*) FROM online_episodes GROUP BY trained_in").fetchall()
    assert given <= kept
    assert steps == list(range(len(steps)))
    assert all(count == 4 for step, count in trained if step is not None)
    assert {step for step, _ in trained if step is not None} >= set(steps)


def test_grpo_needs_groups_and_says_so(place):
    told = place.cli("serve", "--model", "model", "--trainer", "grpo", expect=2)
    assert "--trainer reinforce" in told
    assert "group" in told


@pytest.mark.timeout(300)
def test_sessions_that_name_their_group_are_compared(place):
    served = start(place, "grpo", **{"online.group_size": 2, "online.batch_size": 2}).ready()
    assert served.request("POST", "/rl/sessions", {}, key=served.admin_key)[0] == 400
    one, two, other = (served.session(group=group) for group in ("a", "a", "b"))
    for session, reward in ((one, 1.0), (other, 1.0), (two, 0.0)):
        served.say(session, "Say something.")
        assert served.give(session, {"reward": reward})[0] == 200
    metrics = served.wait_for("step")["metrics"]
    assert (metrics["groups"], metrics["groups_trained"], metrics["episodes"]) == (1, 1, 2)


STUBBORN = """
from rl_harness.errors import EngineError
from rl_harness.hookspecs import Extension, hookimpl
from rl_harness.testing.engine import ScriptedEngine


class Stubborn(ScriptedEngine):
    async def prepare(self, source):
        raise EngineError("no room for other weights")


@hookimpl
def rl_harness_engines():
    return [Extension("stubborn", f"{__name__}:Stubborn", "keeps the weights it has")]
"""


def test_an_engine_that_takes_no_weights_is_found_before_anybody_is_served(place):
    plugin = place.directory / "stubborn.py"
    plugin.write_text(STUBBORN)
    engine = ("-p", str(plugin), "--engine", "stubborn", "-o", "backend.threads=1")
    served = place.start("--model", "model", "--trainer", "reinforce", *engine)
    assert served.process.wait() == 1
    assert "no engine could take the weights of version 0" in served.errors
    assert not [event for event in served.events if event["event"] == "serving"]


@pytest.mark.timeout(300)
def test_a_group_of_one_is_waited_for_no_longer_than_was_said(place):
    served = start(place, "grpo", **{"online.group_size": 2, "online.group_timeout": 0.1}).ready()
    session = served.session(group="alone")
    served.say(session, "Say something.")
    assert served.give(session, {"reward": 1.0})[0] == 200
    assert "one episode of group 'alone' was rewarded" in served.wait_for("note")["text"]
    assert served.request("GET", "/rl/status", key=served.admin_key)[1]["waiting"] == 0


def trainer_of(served: Served) -> int:
    """The process of its backend."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and b"trainer_worker" in (entry / "cmdline").read_bytes():
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                if int(parent) == served.process.pid:
                    return int(entry.name)
    raise AssertionError("it has no trainer")


@pytest.mark.timeout(300)
def test_a_trainer_that_died_costs_no_rewards(place):
    served = start(place).ready()
    session = served.session()
    live(served, session, 7)
    os.kill(trainer_of(served), signal.SIGKILL)
    served.say(session, "Say something.")
    served.give(session, {"reward": 0.5})
    assert served.process.wait(timeout=100) == 1
    again = start(place).ready()
    assert again.wait_for("step")["metrics"]["episodes"] == 8
    assert again.stop() == 0
    assert again.wait_for("finish")["report"]["online"]["set_aside"] == 0
