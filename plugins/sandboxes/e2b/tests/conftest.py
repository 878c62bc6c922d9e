"""A stand-in for E2B in a process of its own, one for each test worker, and providers that talk to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from rl_harness_e2b.provider import E2BProvider

KEY = "e2b_standin"


class StandIn:
    """The running stand-in; ``ask`` sends it one of the requests of ``e2b_standin.control``."""

    def __init__(self, state: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "e2b_standin", str(state)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self.url = f"http://127.0.0.1:{self._answer()['port']}"
        self.environment = {
            "E2B_API_URL": self.url,
            "E2B_SANDBOX_URL": self.url,
            "E2B_API_KEY": KEY,
            "E2B_HTTP_VERSION": "1.1",
        }

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the stand-in has died"
        return json.loads(line)

    def ask(self, do: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def running(self) -> list[dict[str, Any]]:
        return [sandbox for sandbox in self.ask("sandboxes") if sandbox["state"] != "ended"]

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


@pytest.fixture(scope="session")
def running_stand_in(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    stand_in = StandIn(tmp_path_factory.mktemp("e2b"))
    yield stand_in
    stand_in.stop()


@pytest.fixture
def stand_in(running_stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StandIn]:
    """E2B, as this process's environment names it, without faults and sandboxes."""
    for name in [name for name in os.environ if name.startswith("E2B_")]:
        monkeypatch.delenv(name)
    for name, value in running_stand_in.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield running_stand_in
    running_stand_in.ask("reset")


@pytest.fixture
async def provider(stand_in: StandIn) -> AsyncIterator[E2BProvider]:
    provider = E2BProvider(E2BProvider.Options(patience=20))
    yield provider
    await provider.close()
