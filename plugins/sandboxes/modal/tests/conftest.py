"""A stand-in for Modal's service in a process of its own, one for each test worker, and providers that talk to it."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from rl_harness.testing import StandIn
from rl_harness_modal.provider import ModalProvider

TOKEN = ("ak-standin", "as-standin")


class ModalStandIn(StandIn):
    """``ask`` sends it one of the requests of ``modal_standin.control``."""

    def __init__(self, state: Path) -> None:
        super().__init__("modal_standin", Path(__file__).parent, str(state))
        self.url = f"http://127.0.0.1:{self.hello['port']}"
        self.environment = {
            "MODAL_SERVER_URL": self.url,
            "MODAL_TOKEN_ID": TOKEN[0],
            "MODAL_TOKEN_SECRET": TOKEN[1],
            "MODAL_LOGLEVEL": "ERROR",
        }

    def running(self) -> list[dict[str, Any]]:
        return [sandbox for sandbox in self.ask("sandboxes") if sandbox["running"]]


@pytest.fixture(scope="session")
def running_stand_in(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModalStandIn]:
    stand_in = ModalStandIn(tmp_path_factory.mktemp("modal"))
    yield stand_in
    stand_in.stop()


@pytest.fixture
def stand_in(running_stand_in: ModalStandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModalStandIn]:
    """Modal, as this process's environment names it, without faults and sandboxes."""
    for name in [name for name in os.environ if name.startswith("MODAL_")]:
        monkeypatch.delenv(name)
    for name, value in running_stand_in.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MODAL_CONFIG_PATH", str(tmp_path / "modal.toml"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield running_stand_in
    running_stand_in.ask("reset")


@pytest.fixture
async def provider(stand_in: ModalStandIn) -> AsyncIterator[ModalProvider]:
    provider = ModalProvider(ModalProvider.Options(patience=20))
    yield provider
    await provider.close()


@pytest.fixture
def listeners(stand_in: ModalStandIn) -> Iterator[dict[str, tuple[str, int]]]:
    """Two servers that the stand-in's machines reach if they are let; none where it cannot make networks."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server((host, 0))) for host in stand_in.hello["hosts"]]
        yield dict(zip(("reachable", "unlisted"), (server.getsockname() for server in servers), strict=False))
