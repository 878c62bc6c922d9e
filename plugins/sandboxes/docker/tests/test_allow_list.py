"""An allow-list for containers, which have no network then: what outlives kills, pauses and forks, and for whom."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from rl_harness.contracts import EnvironmentSpec, NetworkPolicy, Sandbox, SandboxSpec
from rl_harness.errors import SandboxError
from rl_harness.sandboxes.allowlist import with_allow_lists
from rl_harness_docker.options import DockerOptions
from rl_harness_docker.provider import DockerProvider
from rl_harness_docker.testing import BASE_IMAGE

pytestmark = pytest.mark.needs("docker")

LABELS = {"run": "docker-allow-list"}  # others use this engine at the same time
FETCH = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=60).read().decode())"


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """Of a server at every loopback address of this machine."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(EOFError, OSError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi")
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "0.0.0.0", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def fetched(sandbox: Sandbox, port: int, host: str = "127.0.0.2", user: str | None = None) -> str:
    result = await sandbox.exec(["python3", "-c", FETCH, f"http://{host}:{port}/"], user=user, timeout=90)
    return (result.stdout if result.ok else result.stderr.splitlines()[-1]).decode().strip()


async def listed(provider: DockerProvider, **fields: Any) -> Sandbox:
    spec = SandboxSpec(network=NetworkPolicy.ALLOW_LIST, network_allow=("127.0.0.2",), labels=LABELS, **fields)
    return await with_allow_lists(provider).create(spec)


async def test_the_way_out_is_there_for_every_user_and_after_kills_pauses_and_forks(
    provider: DockerProvider, port: int
) -> None:
    sandbox = await listed(provider)
    assert await fetched(sandbox, port) == "hi"
    assert await fetched(sandbox, port, user="nobody") == "hi"
    assert "HTTP Error 403: 127.0.0.3 is not in allowed_hosts" in await fetched(sandbox, port, "127.0.0.3")
    await sandbox.kill_processes()
    assert await fetched(sandbox, port) == "hi"
    await sandbox.pause()
    await sandbox.resume()
    assert await fetched(sandbox, port) == "hi"
    await sandbox.pause()
    (fork,) = await sandbox.fork(1)
    assert await fetched(fork, port) == "hi"
    await fork.close()
    await sandbox.close()
    assert await provider.list(LABELS) == []


async def test_services_are_reached_beside_the_proxy(provider: DockerProvider, port: int, tmp_path: Path) -> None:
    compose = tmp_path / "docker-compose.yaml"
    compose.write_text(
        f"services:\n  web:\n    image: {BASE_IMAGE}\n    hostname: shop.internal\n"
        "    command: sh -c 'echo served > /srv/index.html; exec busybox httpd -f -p 80 -h /srv'\n"
        "    healthcheck: {test: 'busybox wget -q -O /dev/null http://127.0.0.1/', interval: 100ms}\n"
        "  main: {depends_on: {web: {condition: service_healthy}}, environment: {NO_PROXY: mine}}\n"
    )
    sandbox = await listed(provider, environment=EnvironmentSpec(directory=tmp_path, compose=compose))
    assert await fetched(sandbox, 80, "web") == "served"
    assert await fetched(sandbox, port) == "hi"
    assert (await sandbox.exec("echo $NO_PROXY")).stdout == b"localhost,127.0.0.1,::1,mine,web,shop.internal,main\n"
    assert "403" in await fetched(sandbox, port, "127.0.0.3")
    await sandbox.close()


async def test_an_image_without_python_is_told_of_before_any_agent(provider: DockerProvider, engine: Any) -> None:
    bare = await provider.create(SandboxSpec(labels=LABELS))
    removed = await bare.exec("rm -f $(ls -d /usr/bin/python* /usr/local/bin/python* 2>/dev/null)", user="root")
    assert removed.ok
    snapshot = await bare.snapshot()
    await bare.close()
    try:
        with pytest.raises(SandboxError, match=r"allowlist.*Python in the sandbox.*no python3"):
            await listed(provider, snapshot=snapshot)
    finally:
        await provider.delete_snapshot(snapshot)
    assert await provider.list(LABELS) == []


async def test_a_container_of_an_ordinary_user_whose_root_is_read_only_has_it_too(port: int) -> None:
    provider = DockerProvider(DockerOptions(image=BASE_IMAGE, read_only=True, user="nobody"))
    try:
        sandbox = await listed(provider, environment=EnvironmentSpec(env={"MINE": "1"}))
        assert await fetched(sandbox, port) == "hi"
        assert (await sandbox.exec("echo $MINE $NO_PROXY")).stdout == b"1 localhost,127.0.0.1,::1\n"
    finally:
        await provider.close()
