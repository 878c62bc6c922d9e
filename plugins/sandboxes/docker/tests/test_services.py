"""Sandboxes of several containers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rl_harness.contracts import EnvironmentSpec, SandboxSpec
from rl_harness.errors import SandboxError
from rl_harness_docker.provider import DockerProvider
from rl_harness_docker.testing import BASE_IMAGE

pytestmark = pytest.mark.needs("docker")

COMPOSE = f"""
services:
  web:
    image: {BASE_IMAGE}
    command: sh -c "echo hello > /srv/index.html; exec busybox httpd -f -p 80 -h /srv"
    healthcheck: {{test: "busybox wget -q -O /dev/null http://127.0.0.1/", interval: 100ms}}
  main:
    depends_on: {{web: {{condition: service_healthy}}}}
    environment: {{GREETING: hi}}
"""


def environment(folder: Path, text: str, **more: Any) -> EnvironmentSpec:
    (folder / "docker-compose.yaml").write_text(text)
    return EnvironmentSpec(directory=folder, compose=folder / "docker-compose.yaml", **more)


def traces(engine: Any, name: str) -> list[str]:
    found = [each["Names"][0] for each in engine.containers(all=True, filters={"name": name})]
    return found + [each["Name"] for each in engine.networks(names=[name])]


async def test_services_are_reached_by_name_and_nothing_else_is(
    provider: DockerProvider, tmp_path: Path, engine: Any
) -> None:
    spec = SandboxSpec(environment=environment(tmp_path, COMPOSE))
    sandbox = await provider.create(spec)
    assert traces(engine, sandbox.id)
    result = await sandbox.exec("wget -q -O- http://web/; echo $GREETING; echo changed > f")
    assert result.stdout == b"hello\nhi\n", result
    result = await sandbox.exec("bash -c 'exec 3<>/dev/tcp/1.1.1.1/53'", timeout=2)
    assert not result.ok

    snapshot = await sandbox.snapshot()
    await sandbox.close()
    assert traces(engine, sandbox.id) == []
    again = await provider.create(SandboxSpec(environment=spec.environment, snapshot=snapshot))
    result = await again.exec("cat f; wget -q -O- http://web/")
    assert result.stdout == b"changed\nhello\n", result
    await again.close()
    await provider.delete_snapshot(snapshot)
    assert not [tag for image in engine.images() for tag in image["RepoTags"] or () if snapshot.split(":")[1] in tag]


async def test_a_service_that_fails_says_why(provider: DockerProvider, tmp_path: Path, engine: Any) -> None:
    text = (
        f"services:\n  db: {{image: {BASE_IMAGE}, command: \"sh -c 'echo no space left >&2; exit 3'\"}}\n"
        f"  late: {{image: {BASE_IMAGE}, command: sleep 600, depends_on: "
        "{db: {condition: service_completed_successfully}}}\n"
    )
    with pytest.raises(SandboxError, match=r"service db: exited, exit code 3: no space left"):
        await provider.create(SandboxSpec(environment=environment(tmp_path, text), labels={"run": "failing"}))
    assert [each for each in engine.containers(all=True) if "failing" in str(each["Labels"])] == []


async def test_services_that_are_never_ready_end_at_the_limit(provider: DockerProvider, tmp_path: Path) -> None:
    text = (
        f"services:\n  db: {{image: {BASE_IMAGE}, command: sleep 600, healthcheck: {{test: 'false', interval: 1h}}}}\n"
        "  main: {depends_on: {db: {condition: service_healthy}}}\n"
    )
    with pytest.raises(SandboxError, match="were not ready within 1 s"):
        await provider.create(SandboxSpec(environment=environment(tmp_path, text, build_timeout=1.0)))
