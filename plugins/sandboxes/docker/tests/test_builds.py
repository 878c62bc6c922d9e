"""Images that were built for Dockerfiles: listed with what stands on them, removed when nothing does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rl_harness.contracts import BuildInfo, EnvironmentSpec, SandboxSpec
from rl_harness.sandboxes.allowlist import with_allow_lists
from rl_harness.sandboxes.inventory import inventory, prune
from rl_harness.sandboxes.usage import Usage
from rl_harness.testing.sandbox import CHECKS, Rig
from rl_harness_docker.options import DockerOptions
from rl_harness_docker.provider import DockerProvider
from rl_harness_docker.testing import BASE_IMAGE

pytestmark = pytest.mark.needs("docker")


@pytest.fixture
def environment(tmp_path: Path, engine: Any) -> Iterator[EnvironmentSpec]:
    """A task's environment whose image nobody has built before."""
    folder = tmp_path / "environment"
    folder.mkdir()
    (folder / "Dockerfile").write_text(f"FROM {BASE_IMAGE}\nRUN echo {os.urandom(8).hex()} > /built\n")
    yield EnvironmentSpec(directory=folder, dockerfile=folder / "Dockerfile")
    for image in engine.images(filters={"label": "rl-harness.kind=build"}):
        if str(tmp_path) in image["Labels"].get("rl-harness.labels", ""):
            engine.remove_image(image["Id"], force=True)


@pytest.fixture
def usage(tmp_path: Path) -> Usage:
    return Usage(tmp_path / "usage")


async def built(provider: DockerProvider, environment: EnvironmentSpec) -> BuildInfo | None:
    """The build of this environment, seen through the wrapper that every run has around its provider."""
    found = [info for info in await with_allow_lists(provider).builds() if info.source == str(environment.directory)]
    return found[0] if found else None


async def pruned(provider: DockerProvider, usage: Usage, build: BuildInfo, **how: Any) -> bool:
    """Whether pruning takes this build. Of the engine's others, and of what stands on them, it takes nothing."""

    class Own(DockerProvider):
        async def builds(self) -> list[BuildInfo]:
            return [info for info in await provider.builds() if info.id == build.id]

        async def delete_build(self, build: str) -> bool:
            return await provider.delete_build(build)

        async def snapshots(self, labels: Any = None) -> Any:
            return [
                info for info in await provider.snapshots() if info.id in build.used_by or info.key == "of-the-test"
            ]

    own = Own(DockerOptions(image=BASE_IMAGE))
    try:
        done = await prune(with_allow_lists(own), usage, **{"ttl": 1e9, **how})
    finally:
        await own.close()
    return [info.id for info in done.builds] == [build.id]


async def test_a_build_stays_while_a_sandbox_or_a_snapshot_stands_on_it(
    provider: DockerProvider, environment: EnvironmentSpec, usage: Usage
) -> None:
    sandbox = await provider.create(SandboxSpec(environment=environment))
    build = await built(provider, environment)
    assert build is not None
    assert build.used_by == (sandbox.id,)
    assert build.size
    assert build in (await inventory(with_allow_lists(provider), usage)).builds
    assert not await pruned(provider, usage, build, everything=True)

    first = await sandbox.snapshot(labels={"run": "x"})
    await sandbox.close()
    from_first = await provider.create(SandboxSpec(environment=environment, snapshot=first))
    second = await from_first.snapshot(key="of-the-test")
    build = await built(provider, environment)
    assert build is not None
    assert set(build.used_by) == {from_first.id, first, second}
    await from_first.close()
    await provider.delete_snapshot(first)
    assert not await pruned(provider, usage, build), "the snapshot of a snapshot stands on it, and is young"

    assert await pruned(provider, usage, build, everything=True, dry_run=True), "with the snapshot it would go"
    assert await built(provider, environment)
    assert await pruned(provider, usage, build, everything=True)
    assert await built(provider, environment) is None
    assert second not in {info.id for info in await provider.snapshots()}


async def test_a_build_is_kept_for_as_long_as_it_is_asked_for(
    provider: DockerProvider, environment: EnvironmentSpec, engine: Any
) -> None:
    """Also by somebody who made it long ago: its age is not what counts."""
    await (await provider.create(SandboxSpec(environment=environment))).close()
    first = await built(provider, environment)
    another = DockerProvider(DockerOptions(image=BASE_IMAGE))
    await (await another.create(SandboxSpec(environment=environment))).close()
    await another.close()
    second = await built(provider, environment)
    assert first is not None
    assert second is not None
    assert (second.id, second.created_at) == (first.id, first.created_at)
    assert second.last_used > first.last_used >= first.created_at


async def test_what_others_named_or_built_on_a_build_keeps_it_and_is_none_of_ours(
    provider: DockerProvider, environment: EnvironmentSpec, engine: Any, tmp_path: Path
) -> None:
    await (await provider.create(SandboxSpec(environment=environment))).close()
    build = await built(provider, environment)
    assert build is not None
    mine = f"somebody-{os.urandom(4).hex()}"
    container = engine.create_container(build.id, "true")
    engine.commit(container, mine, "latest")
    engine.remove_container(container)
    try:
        assert mine not in {info.id.partition(":")[0] for info in await provider.builds()}
        found = await built(provider, environment)
        assert found is not None
        assert found.used_by == (f"{mine}:latest",)
        assert not await provider.delete_build(build.id)
        assert await provider.delete_build(f"{mine}:latest"), "there is no build of that name"
        assert engine.images(mine)
    finally:
        engine.remove_image(mine)


async def test_services_that_were_built_are_in_use_by_their_sandbox(
    provider: DockerProvider, environment: EnvironmentSpec
) -> None:
    folder = environment.directory
    assert folder is not None
    (folder / "docker-compose.yaml").write_text(
        f"services:\n  main:\n    image: {BASE_IMAGE}\n  a-db:\n    build: .\n    command: sleep 100\n"
    )
    spec = SandboxSpec(environment=EnvironmentSpec(directory=folder, compose=folder / "docker-compose.yaml"))
    sandbox = await provider.create(spec)
    build = await built(provider, environment)
    assert build is not None
    assert build.used_by == (sandbox.id,)
    snapshot = await sandbox.snapshot(labels={"run": "x"})
    await sandbox.close()
    build = await built(provider, environment)
    assert build is not None
    assert build.used_by == (snapshot,)
    await provider.delete_snapshot(snapshot)
    assert await provider.delete_build(build.id)


async def test_the_command_line_lists_builds(
    provider: DockerProvider, environment: EnvironmentSpec, tmp_path: Path
) -> None:
    await (await provider.create(SandboxSpec(environment=environment))).close()
    build = await built(provider, environment)
    assert build is not None
    command = [sys.executable, "-m", "rl_harness", "sandbox"]
    variables = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}

    def said(*arguments: str) -> str:
        return subprocess.run(
            [*command, *arguments, "--sandbox", "docker"],
            cwd=tmp_path, env=variables, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip

    listed = {info["id"]: info for info in json.loads(said("list", "--json"))["builds"]}
    assert listed[build.id]["used_by"] == []
    assert listed[build.id]["source"] == str(environment.directory)
    text = said("list")
    assert "built images\n" in text
    assert build.id in text
    would = said("prune", "--all", "--dry-run")
    assert f"would remove docker image {build.id} (built from {environment.directory}): last used" in would
    assert await built(provider, environment) == build


class Forgets(DockerProvider):
    """Does not tell what uses a build."""

    async def builds(self) -> list[BuildInfo]:
        return [msgspec.structs.replace(info, used_by=()) for info in await super().builds()]


class ClaimsRemoval(DockerProvider):
    """Says of a build in use that it is gone."""

    async def delete_build(self, build: str) -> bool:
        await super().delete_build(build)
        return True


class RemovesNothing(DockerProvider):
    async def delete_build(self, build: str) -> bool:
        return False


@pytest.mark.parametrize("fault", [Forgets, ClaimsRemoval, RemovesNothing])
async def test_the_kit_finds_a_fault(fault: type[DockerProvider], tmp_path: Path, environment: EnvironmentSpec) -> None:
    (check,) = (check for check in CHECKS if check.name.startswith("what_was_built_is_on_record"))
    provider = fault(DockerOptions(image=BASE_IMAGE))
    folder = tmp_path / "host"
    folder.mkdir()
    try:
        with pytest.raises(AssertionError):
            await check.run(provider, folder, Rig(base=BASE_IMAGE))
    finally:
        await provider.close()
