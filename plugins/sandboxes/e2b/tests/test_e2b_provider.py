"""What is asked of E2B for a spec, and what is refused before it is asked."""

from __future__ import annotations

from pathlib import Path

import pytest
from rl_harness.contracts.sandbox import EnvironmentSpec, Limits, NetworkPolicy, SandboxSpec
from rl_harness.errors import SandboxError, Unsupported
from rl_harness.plugins import load_registry
from rl_harness_e2b.provider import E2BProvider

needs_e2b = pytest.mark.needs("userns", "e2b")


def test_the_provider_is_registered_and_checks_its_options() -> None:
    provider = load_registry().create("sandboxes", "e2b", {"template": "mine", "patience": 5})
    assert isinstance(provider, E2BProvider)


@needs_e2b
async def test_everything_of_a_spec_reaches_e2b_and_no_default_of_the_sdk_cuts_it_short(
    provider: E2BProvider, stand_in, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOST_SECRET", "of the host")
    spec = SandboxSpec(
        environment=EnvironmentSpec(workdir="/srv/place", env={"MODE": "test"}),
        network=NetworkPolicy.ALLOW_LIST,
        network_allow=("203.0.113.5", "198.51.100.0/24", "*.example.org", "Example.com"),
        labels={"run": "r 1"},
        lifetime=1_800.5,
    )
    sandbox = await provider.create(spec)
    [seen] = stand_in.running()
    assert seen["timeout"] == 1_801
    assert (seen["autoPause"], seen["autoResume"]) == (False, {"enabled": False})
    assert seen["network"] == {
        "allowOut": ["203.0.113.5/32", "198.51.100.0/24", "*.example.org", "example.com"],
        "denyOut": ["0.0.0.0/0"],
        "allowPublicTraffic": False,
    }
    assert seen["metadata"]["label.run"] == "r 1"
    result = await sandbox.exec("pwd; echo $MODE; id -u; env")
    assert result.stdout.startswith(b"/srv/place\ntest\n0\n")
    assert b"of the host" not in result.stdout
    assert b"standin" not in result.stdout


@needs_e2b
async def test_without_a_network_there_is_no_internet_and_with_all_of_it_no_metadata(
    provider: E2BProvider, stand_in
) -> None:
    await provider.create(SandboxSpec(network=NetworkPolicy.NONE))
    await provider.create(SandboxSpec(network=NetworkPolicy.FULL))
    closed, full = stand_in.running()
    assert (closed["allow_internet_access"], closed["network"]["denyOut"]) == (False, ["0.0.0.0/0"])
    assert full["allow_internet_access"] is True
    assert "169.254.0.0/16" in full["network"]["denyOut"]
    assert not full["network"]["allowPublicTraffic"]


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (SandboxSpec(environment=EnvironmentSpec(compose=Path("compose.yaml"))), "no compose files"),
        (SandboxSpec(environment=EnvironmentSpec(dockerfile=Path("/none/Dockerfile"))), "no such Dockerfile"),
        (SandboxSpec(environment=EnvironmentSpec(workdir="app")), "not absolute"),
        (SandboxSpec(environment=EnvironmentSpec(env={"A-B": "c"})), "A-B"),
        (SandboxSpec(limits=Limits(pids=10)), "pids"),
        (SandboxSpec(limits=Limits(disk=1 << 30)), "disk"),
        (SandboxSpec(limits=Limits(cpus=1.5)), "whole processors"),
        (SandboxSpec(network=NetworkPolicy.ALLOW_LIST, network_allow=("example.com:443",)), "example.com:443"),
        (SandboxSpec(network=NetworkPolicy.ALLOW_LIST, network_allow=("2001:db8::/32",)), "no IPv6"),
        (SandboxSpec(network=NetworkPolicy.ALLOW_LIST, network_allow=("10.1.2.3",)), "private"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_e2b_does_not_have_is_refused_without_asking_it(spec: SandboxSpec, reason: str) -> None:
    provider = E2BProvider(E2BProvider.Options())
    for asked in (provider.check, provider.create):
        with pytest.raises(Unsupported, match=reason):
            await asked(spec)


@pytest.mark.parametrize("snapshot", ["", "../x", "a b", "A", "x/y/z"])
async def test_what_cannot_be_a_snapshot_is_not_taken_for_one(snapshot: str) -> None:
    with pytest.raises(SandboxError, match="no snapshot"):
        await E2BProvider(E2BProvider.Options()).create(SandboxSpec(snapshot=snapshot))
