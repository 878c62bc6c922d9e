"""A registry that asks who is there: pulls and builds bring what ``docker login`` left, to that registry alone."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rl_harness.contracts import EnvironmentSpec, SandboxSpec
from rl_harness.errors import SandboxError
from rl_harness_docker.provider import DockerProvider
from rl_harness_docker.testing import BASE_IMAGE

pytestmark = pytest.mark.needs("docker")

LOGIN = base64.b64encode(b"somebody:their password").decode()


class Registry:
    """Has no image at all, and tells that only to whoever logs in. ``logins`` are those it was sent."""

    def __init__(self) -> None:
        self.logins: list[str] = []
        self.address = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = await reader.read(1)
        if first == b"\x16":  # TLS is tried first
            writer.close()
            return
        head = (first + await reader.readuntil(b"\r\n\r\n")).decode()
        given = [line.partition(" ")[2] for line in head.split("\r\n") if line.lower().startswith("authorization:")]
        self.logins += given
        status = "404 Not Found" if given == [f"Basic {LOGIN}"] else "401 Unauthorized"
        if status.startswith("404") and head.split(" ")[1] == "/v2/":
            status = "200 OK"
        code = "MANIFEST_UNKNOWN" if given else "UNAUTHORIZED"
        body = json.dumps({"errors": [{"code": code, "message": code.lower()}]})
        more = 'WWW-Authenticate: Basic realm="ours"\r\nDocker-Distribution-Api-Version: registry/2.0\r\n'
        writer.write(
            f"HTTP/1.1 {status}\r\n{more}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            f"Connection: close\r\n\r\n{'' if head.startswith('HEAD') else body}".encode()
        )
        await writer.drain()
        writer.close()


@pytest.fixture
async def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Registry]:
    """With somebody logged in to it, and somebody else to another one."""
    registry = Registry()
    async with await asyncio.start_server(registry.answer, "127.0.0.1", 0) as server:
        registry.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        other = base64.b64encode(b"nobody:other").decode()
        auths = {registry.address: {"auth": LOGIN}, "registry.invalid": {"auth": other}}
        (tmp_path / "config.json").write_text(json.dumps({"auths": auths}))
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
        yield registry


async def test_a_pull_brings_the_login(provider: DockerProvider, registry: Registry) -> None:
    image = f"{registry.address}/private/image:1"
    with pytest.raises(SandboxError, match="cannot be pulled") as failure:
        await provider.create(SandboxSpec(environment=EnvironmentSpec(image=image)))
    assert set(registry.logins) == {f"Basic {LOGIN}"}
    assert "manifest" in failure.value.message


@pytest.mark.parametrize(
    "dockerfile",
    [
        pytest.param("FROM {}\nRUN true\n", id="the image it builds on"),
        pytest.param(f"FROM {BASE_IMAGE}\nCOPY --from={{}} /file /file\n", id="an image it copies from"),
    ],
)
async def test_a_build_brings_the_login(
    provider: DockerProvider, registry: Registry, tmp_path: Path, dockerfile: str
) -> None:
    folder = tmp_path / "environment"
    folder.mkdir()
    (folder / "Dockerfile").write_text(dockerfile.format(f"{registry.address}/private/image:1"))
    with pytest.raises(SandboxError):
        await provider.create(
            SandboxSpec(environment=EnvironmentSpec(directory=folder, dockerfile=folder / "Dockerfile"))
        )
    assert set(registry.logins) == {f"Basic {LOGIN}"}


async def test_who_is_not_logged_in_is_told_how(provider: DockerProvider, registry: Registry, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SandboxError) as failure:
        await provider.create(SandboxSpec(environment=EnvironmentSpec(image=f"{registry.address}/private/image:1")))
    assert registry.logins == []
    assert "docker login" in (failure.value.remedy or "")
