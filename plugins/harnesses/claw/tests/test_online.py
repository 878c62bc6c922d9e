"""An assistant that lives on, outside of any sandbox, against ``serve``: only its address and key are ours."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from rl_harness.runs.store import reading
from rl_harness.testing.serving import ServingPlace
from rl_harness.testing.tokenizer import write_tokenizer
from rl_harness_claw.nanobot import Nanobot
from rl_harness_cli_agents import CliAgentOptions, Seat

pytestmark = [pytest.mark.needs("nanobot"), pytest.mark.timeout(300)]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[ServingPlace]:
    place = ServingPlace(tmp_path)
    yield place
    place.kill()


def ask(home: Path, base_url: str, api_key: str, message: str) -> str:
    """What the real program answers, with the settings it also gets in a sandbox and the memory of ``home``."""
    agent = Nanobot(CliAgentOptions(install="host"))
    seat = Seat(
        instruction=message,
        workdir=str(home),
        home=str(home),
        base_url=base_url,
        address=base_url.removesuffix("/v1"),
        api_key=api_key,
        model="tiny",
        max_turns=5,
        context_length=131_072,
        max_tokens=512,
    )
    for path, text in agent.files(seat).items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)
    done = subprocess.run(
        [*agent.package.command(str(agent.mounts[0].source)), *agent.arguments(seat)],
        env={"PATH": os.environ["PATH"], "HOME": str(home), **agent.environment(seat)},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    return done.stdout


def test_what_it_did_until_a_reward_is_an_episode_and_it_goes_on(place: ServingPlace, tmp_path: Path) -> None:
    served = place.scripted(replies=("That was the first.", "That was the second."))
    session = served.session()
    home = tmp_path / "home"
    assert "That was the first." in ask(home, served.base_url, session["api_key"], "Say which one this is.")
    served.reward(session, "1.0")
    told = served.wait_for("episode")
    assert (told["reward"], told["unscored"]) == (1.0, None)
    assert "That was the second." in ask(home, served.base_url, session["api_key"], "And this one?")
    assert len(served.look(session)["episode"]["turns"]) == 1


@pytest.mark.needs("torch")
@pytest.mark.long
def test_it_is_trained_on_rewards_that_come_later_and_goes_on_with_the_new_weights(
    place: ServingPlace, tmp_path: Path
) -> None:
    """Its model is random and says nothing of sense; it is never told of rewards, of training or of other weights."""
    from rl_harness_torch.testing import tiny_model

    # It has to read some 12,000 tokens of instructions, and to learn from them.
    small = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    folder = tiny_model(tmp_path / "model", vocab_size=4099, max_position_embeddings=65_536, **small)
    model = write_tokenizer(folder, learned=4096)
    options = {"sampling.max_tokens": 4, "online.batch_size": 2, "engine.threads": 1, "backend.threads": 1}
    settings = [part for key, value in options.items() for part in ("-o", f"{key}={value}")]
    served = place.start("--model", str(model), "--trainer", "reinforce", *settings).ready()
    session = served.session()
    home = tmp_path / "home"
    for message, reward in (("Say something.", "1.0"), ("Say something else.", "0.0")):
        ask(home, served.base_url, session["api_key"], message)
        served.reward(session, reward)
    step = served.wait_for("step")["metrics"]
    assert step["episodes"] == 2
    assert step["grad_norm"] > 0
    assert step["logp_gap_max"] < 0.01
    ask(home, served.base_url, session["api_key"], "And now?")
    served.reward(session, "1.0")
    served.wait_for("episode", 3)
    assert served.stop() == 0
    with reading(next((tmp_path / "runs").glob("*/db.sqlite"))) as store:
        versions = [
            {int(version) for turn in store.turns(episode.id) for version in turn.versions}
            for episode in store.episodes(phase="online")
        ]
    assert versions == [{0}, {0}, {1}]
