"""What is asked of Modal for a spec, and what is refused before it is asked."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rl_harness.contracts.sandbox import EnvironmentSpec, Limits, NetworkPolicy, SandboxSpec
from rl_harness.errors import Unsupported
from rl_harness.plugins import load_registry
from rl_harness_modal import tags
from rl_harness_modal.provider import ModalProvider


def test_the_provider_is_registered_and_checks_its_options() -> None:
    provider = load_registry().create("sandboxes", "modal", {"gpu": "H100", "patience": 5})
    assert isinstance(provider, ModalProvider)
    assert provider.capabilities.gpu


@pytest.mark.needs("userns", "modal")
async def test_everything_of_a_spec_reaches_modal_and_no_default_of_the_sdk_cuts_it_short(
    provider: ModalProvider, stand_in, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOST_SECRET", "of the host")
    spec = SandboxSpec(
        environment=EnvironmentSpec(workdir="/srv/place", env={"MODE": "test"}),
        limits=Limits(memory=300 << 20, cpus=1.5),
        network=NetworkPolicy.ALLOW_LIST,
        network_allow=("10.1.2.3", "192.168.0.0/16", "*.example.org", "Example.com"),
        labels={"run": "r 1"},
        lifetime=7_200.5,
    )
    sandbox = await provider.create(spec)
    [seen] = stand_in.running()
    assert (seen["timeout"], seen["idle_timeout"]) == (7_201, None)
    assert (seen["memory"], seen["milli_cpu"]) == ([300, 300], [1500, 1500])
    assert seen["network"] == "ALLOWLIST"
    assert seen["cidrs"] == ["10.1.2.3/32", "192.168.0.0/16"]
    assert seen["domains"] == ["*.example.org", "example.com"]
    result = await sandbox.exec("pwd; echo $MODE; env")
    assert result.stdout.startswith(b"/srv/place\ntest\n")
    assert b"of the host" not in result.stdout
    assert b"standin" not in result.stdout


@pytest.mark.needs("userns", "modal")
async def test_a_gpu_is_asked_for_and_such_sandboxes_are_found_and_reaped(stand_in) -> None:
    provider = ModalProvider(ModalProvider.Options(gpu="H100:2"))
    spec = SandboxSpec(labels={"run": "gpu"}, environment=EnvironmentSpec(env={"MODE": "gpu"}))
    sandbox = await provider.create(spec)
    [seen] = stand_in.running()
    assert (seen["gpu"], seen["network"]) == ("H100", "BLOCKED")
    assert (await sandbox.exec("echo $MODE", stdin=b"")).stdout == b"gpu\n"
    assert [info.id for info in await provider.list({"run": "gpu"})] == [sandbox.id]
    assert await provider.reap({"run": "gpu"}, force=True) == 1
    assert not await sandbox.alive()
    await provider.close()


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (SandboxSpec(environment=EnvironmentSpec(compose=Path("compose.yaml"))), "no compose files"),
        (SandboxSpec(environment=EnvironmentSpec(dockerfile=Path("/none/Dockerfile"))), "no such Dockerfile"),
        (SandboxSpec(environment=EnvironmentSpec(workdir="app")), "not absolute"),
        (SandboxSpec(environment=EnvironmentSpec(env={"A-B": "c"})), "A-B"),
        (SandboxSpec(limits=Limits(pids=10)), "pids"),
        (SandboxSpec(limits=Limits(disk=1 << 30)), "disk"),
        (SandboxSpec(lifetime=86_401), "24 hours"),
        (SandboxSpec(network=NetworkPolicy.ALLOW_LIST, network_allow=("example.com:443",)), "example.com:443"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_modal_does_not_have_is_refused_without_asking_it(spec: SandboxSpec, reason: str) -> None:
    provider = ModalProvider(ModalProvider.Options())
    for asked in (provider.check, provider.create):
        with pytest.raises(Unsupported, match=reason):
            await asked(spec)


@given(st.dictionaries(st.text(min_size=1), st.text()))
def test_labels_survive_as_tags_of_plain_short_text(labels: dict[str, str]) -> None:
    made = tags.encode(labels)
    assert tags.decode(made) == labels
    assert all(value.isascii() and 0 < len(value) <= 60 for value in made.values())


def test_other_peoples_tags_are_left_out() -> None:
    assert tags.decode({"team": "x", "a.b": "c", ".1": "d", **tags.encode({"run": "r"})}) == {"run": "r"}
