"""What the assistants say of themselves, and the one that must be in the image already."""

from __future__ import annotations

import dataclasses
import re
import tomllib

import pytest
from rl_harness.contracts import SandboxCapabilities
from rl_harness.errors import Unavailable
from rl_harness_claw.__main__ import agents
from rl_harness_claw.zeroclaw import ZeroClaw
from rl_harness_cli_agents import CliAgentOptions, Seat
from rl_harness_cli_agents.__main__ import load

SEAT = Seat(
    instruction='--say "hi"\n',
    workdir="/app",
    home="/tmp/home",
    base_url="http://127.0.0.1:1/v1",
    address="http://127.0.0.1:1",
    api_key="key",
    model='a "model"',
    max_turns=5,
    context_length=4096,
    max_tokens=512,
)


@pytest.mark.parametrize("name", agents())
def test_nothing_of_an_assistant_lies_in_the_working_directory(name: str) -> None:
    kind = load(agents()[name])
    agent = kind(CliAgentOptions(install="present"))
    assert agent.name == name
    assert all(path.startswith(f"{SEAT.home}/") for path in agent.files(SEAT))
    assert agent.arguments(SEAT)[-1] == '--message=Work in the directory /app.\n\n--say "hi"\n'
    assert "key" not in " ".join(agent.arguments(SEAT))


@pytest.mark.parametrize("option", ["context_length", "max_tokens"])
@pytest.mark.parametrize("name", agents())
def test_an_option_changes_what_an_assistant_is_told(name: str, option: str) -> None:
    agent = load(agents()[name])(CliAgentOptions(install="present"))
    assert agent.files(SEAT) != agent.files(dataclasses.replace(SEAT, **{option: 70_002}))


def test_zeroclaw_must_be_in_the_image() -> None:
    agent = ZeroClaw(CliAgentOptions())
    agent.adapt(SandboxCapabilities(mounts=True))
    assert (agent.mounts, agent.setup) == ((), ())
    (text,) = agent.files(SEAT).values()
    config = tomllib.loads(text)
    # What its sources resolve, and refuse to load when it is missing: agent, profiles and provider, by alias.
    (alias,) = config["agents"]
    assert agent.arguments(SEAT)[:3] == ["agent", "--agent", alias]
    kind, _, provider = config["agents"][alias]["model_provider"].partition(".")
    assert config["providers"]["models"][kind][provider] == {
        "uri": SEAT.base_url,
        "api_key": SEAT.api_key,
        "model": SEAT.model,
        "max_tokens": SEAT.max_tokens,
    }
    assert config["risk_profiles"][config["agents"][alias]["risk_profile"]]["level"] == "full"
    assert config["runtime_profiles"][config["agents"][alias]["runtime_profile"]]["max_tool_iterations"] == 5
    assert all(re.fullmatch(r"[a-z0-9]([a-z0-9_]*[a-z0-9])?", name) for name in (alias, provider))
    assert list(agent.files(SEAT)) == [f"{agent.environment(SEAT)['ZEROCLAW_CONFIG_DIR']}/config.toml"]
    with pytest.raises(Unavailable, match="zeroclaw is not installed"):
        ZeroClaw(CliAgentOptions(install="host")).adapt(SandboxCapabilities(mounts=True))
