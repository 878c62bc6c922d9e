"""Options and addresses that cannot be."""

from __future__ import annotations

import asyncio
import json

import pytest
from pydantic import ValidationError
from rl_harness.errors import ConfigError, Unavailable
from rl_harness_docker.engine import Engine, find_address
from rl_harness_docker.options import DockerOptions
from rl_harness_docker.provider import DockerProvider


def test_only_harmless_capabilities_can_be_added() -> None:
    assert DockerOptions(capabilities=["cap_sys_ptrace"]).capabilities == ("SYS_PTRACE",)
    for name in ("SYS_ADMIN", "NET_ADMIN", "NET_RAW", "ALL", "DAC_READ_SEARCH", "MKNOD"):
        with pytest.raises(ValidationError, match=name):
            DockerOptions(capabilities=[name])


@pytest.mark.parametrize(
    "address", ["ssh://user@host", "npipe:////./pipe/docker_engine", "https://host:2376", "nonsense"]
)
def test_addresses_that_are_not_spoken_to_are_refused_with_a_way_out(address: str) -> None:
    with pytest.raises(ConfigError, match=r"sandbox\.host") as refusal:
        find_address(address)
    assert "ssh -N -L" in str(refusal.value)


@pytest.mark.parametrize(
    "address",
    [
        "tcp://127.0.0.1:99999",
        "tcp://127.0.0.1:x",
        "http://[::1",
        "tcp://[nonsense]:1",
        "unix://relative/docker.sock",
        "unix:///a\0b",
        "unix://",
    ],
)
async def test_addresses_that_cannot_be_are_an_error_of_the_option(address: str) -> None:
    provider = DockerProvider(DockerOptions(host=address))
    with pytest.raises(ConfigError, match=r"sandbox\.host") as refusal:
        await provider.preflight()
    assert "unix:///PATH" in str(refusal.value)
    await provider.close()


def test_the_environment_names_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///run/other.sock")
    assert find_address(None) == "unix:///run/other.sock"
    assert find_address("tcp://127.0.0.1:2375") == "tcp://127.0.0.1:2375"


async def answering(version: dict[str, object], asked: list[str] | None = None) -> asyncio.Server:
    """A server that says of itself what an engine of this version does, to everything that is ``asked``."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if asked is not None:
            asked.append(head.decode().split(" ")[1])
        body = json.dumps(version).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    return await asyncio.start_server(answer, "127.0.0.1", 0)


@pytest.mark.parametrize(("oldest", "spoken"), [("1.12", "1.41"), ("1.44", "1.44"), (None, "1.41")])
async def test_an_engine_is_spoken_to_in_a_version_it_still_knows(oldest: str | None, spoken: str) -> None:
    asked: list[str] = []
    async with await answering({"ApiVersion": "1.52", "MinAPIVersion": oldest}, asked) as server:
        engine = Engine(f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await engine.request("GET", "/info")
        await engine.close()
    assert asked == ["/version", f"/v{spoken}/info"]


async def test_an_engine_too_old_is_told_before_the_run() -> None:
    async with await answering({"ApiVersion": "1.40"}) as server:
        port = server.sockets[0].getsockname()[1]
        provider = DockerProvider(DockerOptions(host=f"tcp://127.0.0.1:{port}"))
        with pytest.raises(Unavailable, match=r"speaks API 1\.40; 1\.41 \(Docker 20\.10\) is the oldest"):
            await provider.preflight()
        await provider.close()


async def test_an_engine_that_is_not_there_is_told_before_the_run() -> None:
    provider = DockerProvider(DockerOptions(host="unix:///nowhere/docker.sock"))
    with pytest.raises(Unavailable, match=r"unix:///nowhere/docker\.sock does not answer") as refusal:
        await provider.preflight()
    assert "DOCKER_HOST" in str(refusal.value)
    await provider.close()


def test_an_address_without_a_scheme_is_answered_with_the_whole_one() -> None:
    with pytest.raises(
        ConfigError, match=r"sandbox\.host: localhost:2375 has no scheme\n.*write tcp://localhost:2375$"
    ):
        find_address("localhost:2375")


@pytest.mark.parametrize("number", ["4.3.1", "5.2.0"])
async def test_a_podman_that_cannot_do_is_refused_and_another_warned_of(
    number: str, caplog: pytest.LogCaptureFixture
) -> None:
    parts = [{"Name": "Podman Engine", "Version": number}]
    told = {"ApiVersion": "1.41", "Components": parts, "OSType": "linux", "Driver": "overlay"}
    async with await answering(told) as server:
        provider = DockerProvider(DockerOptions(host=f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
        if number.startswith("4"):
            with pytest.raises(Unavailable, match=r"is Podman 4\.3\.1, whose containers start without"):
                await provider.preflight()
        else:
            await provider.preflight()
            assert "is Podman 5.2.0, with which this sandbox is not tested" in caplog.text
        await provider.close()
