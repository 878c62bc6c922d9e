"""The conformance kit of sandbox providers against a real engine."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from rl_harness.contracts import Sandbox
from rl_harness.testing.sandbox import BROKEN_CHECKS, CHECKS, Check, Rig
from rl_harness_docker.options import DockerOptions
from rl_harness_docker.provider import DockerProvider
from rl_harness_docker.sandbox import DockerSandbox
from rl_harness_docker.testing import BASE_IMAGE

pytestmark = [pytest.mark.needs("docker"), pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def provider() -> AsyncIterator[DockerProvider]:
    """One for all checks, as for all episodes of a run."""
    provider = DockerProvider(DockerOptions(image=BASE_IMAGE))
    await provider.preflight()
    yield provider
    await provider.close()


@pytest.fixture
def rig(options: DockerOptions, engine: Any, listeners: list[tuple[str, int]]) -> Rig:
    async def crash(sandbox: Sandbox) -> None:
        assert isinstance(sandbox, DockerSandbox)
        await asyncio.to_thread(engine.kill, sandbox.container)

    reachable, unlisted = listeners
    return Rig(options=options, base=BASE_IMAGE, crash=crash, reachable=reachable, unlisted=unlisted)


@pytest.fixture
def listeners(engine: Any) -> Iterator[list[tuple[str, int]]]:
    """Servers on two addresses of this machine that the containers of its engine reach."""
    subnet = ipaddress.ip_network(engine.inspect_network("bridge")["IPAM"]["Config"][0]["Subnet"])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outward:
        outward.connect(("192.0.2.1", 9))  # sends nothing: it only chooses a way out
        own = outward.getsockname()[0]
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server((host, 0))) for host in (own, str(subnet[1]))]
        yield [server.getsockname() for server in servers]


# Killing one command goes by the container's own grep, killing all processes by the engine: see the README.
OWN_KILL = "no_command_outlives_its_kill_that_the_programs_of_its_machine_only_claim"
BROKEN = [check for check in BROKEN_CHECKS if check.name != OWN_KILL]


@pytest.mark.parametrize("check", [*CHECKS, *BROKEN], ids=str)
async def test_conformance(check: Check, provider: DockerProvider, rig: Rig, tmp_path: Path) -> None:
    if reason := check.inapplicable(provider.capabilities, rig):
        pytest.skip(reason)
    await check.run(provider, tmp_path, rig)
