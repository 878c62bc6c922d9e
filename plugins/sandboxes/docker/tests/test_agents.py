"""A command-line agent that is installed inside its container by a set-up step."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from rl_harness_docker.testing import BASE_IMAGE

pytest.importorskip("rl_harness_cli_agents", reason="needs rl-harness-cli-agents")

from rl_harness_cli_agents.testing_install import check_install_in_sandbox

pytestmark = [pytest.mark.needs("docker"), pytest.mark.timeout(300)]
#: What the base image leaves out of this machine's Python, and a set-up step makes environments with.
PARTS = ("usr/lib/python3.*/ensurepip/*.py", "usr/share/python-wheels/pip-*", "usr/share/python-wheels/setuptools-*")


@pytest.fixture
def parts() -> dict[str, bytes]:
    return {f"root{path}": path.read_bytes() for part in PARTS for path in Path("/").glob(part)}


async def test_an_agent_installs_itself_for_its_own_sandbox_alone(provider, parts, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    environment = {**parts, "Dockerfile": f"FROM {BASE_IMAGE}\nCOPY root /\n"}
    task = await asyncio.to_thread(check_install_in_sandbox, tmp_path, "docker", environment=environment)
    (made,) = [info.id for info in await provider.snapshots() if info.labels.get("environment") == task]
    await provider.delete_snapshot(made)
