"""A stand-in for E2B in a process of its own, one for each test worker, and providers that talk to it."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from rl_harness.testing import StandIn
from rl_harness_e2b.provider import E2BProvider

KEY = "e2b_standin"


class E2BStandIn(StandIn):
    """``ask`` sends it one of the requests of ``e2b_standin.control``."""

    def __init__(self, state: Path) -> None:
        super().__init__("e2b_standin", Path(__file__).parent, str(state))
        self.url = f"http://127.0.0.1:{self.hello['port']}"
        self.environment = {
            "E2B_API_URL": self.url,
            "E2B_SANDBOX_URL": self.url,
            "E2B_API_KEY": KEY,
            "E2B_HTTP_VERSION": "1.1",
        }

    def running(self) -> list[dict[str, Any]]:
        return [sandbox for sandbox in self.ask("sandboxes") if sandbox["state"] != "ended"]


@pytest.fixture(scope="session")
def running_stand_in(tmp_path_factory: pytest.TempPathFactory) -> Iterator[E2BStandIn]:
    stand_in = E2BStandIn(tmp_path_factory.mktemp("e2b"))
    yield stand_in
    stand_in.stop()


@pytest.fixture
def stand_in(running_stand_in: E2BStandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[E2BStandIn]:
    """E2B, as this process's environment names it, without faults and sandboxes."""
    for name in [name for name in os.environ if name.startswith("E2B_")]:
        monkeypatch.delenv(name)
    for name, value in running_stand_in.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield running_stand_in
    running_stand_in.ask("reset")


@pytest.fixture
async def provider(stand_in: E2BStandIn) -> AsyncIterator[E2BProvider]:
    provider = E2BProvider(E2BProvider.Options(patience=20))
    yield provider
    await provider.close()


@pytest.fixture
def listeners(stand_in: E2BStandIn) -> Iterator[dict[str, tuple[str, int]]]:
    """Two servers that the stand-in's machines reach if they are let; none where it cannot make networks."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server((host, 0))) for host in stand_in.hello["hosts"]]
        yield dict(zip(("reachable", "unlisted"), (server.getsockname() for server in servers), strict=False))
