"""Images: built once for each content with their whole context, and failures in the engine's own words."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rl_harness.contracts import EnvironmentSpec, SandboxSpec
from rl_harness.errors import SandboxError, UnsafeFiles, Unsupported
from rl_harness.sandboxes.snapshots import Snapshots
from rl_harness.tasks.carry import collect, place
from rl_harness.tasks.task import Artifact
from rl_harness_docker.options import DockerOptions
from rl_harness_docker.provider import DockerProvider
from rl_harness_docker.testing import BASE_IMAGE

pytestmark = pytest.mark.needs("docker")


@pytest.fixture
def environment(tmp_path: Path) -> EnvironmentSpec:
    """A task's environment whose image nobody has built before."""
    folder = tmp_path / "environment"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub/data").write_text(os.urandom(8).hex())
    (folder / "secret.env").write_text("never sent")
    (folder / ".dockerignore").write_text("*.env\n# a comment\nDockerfile\n.dockerignore\n")
    (folder / "Dockerfile").write_text(
        f"ARG BASE={BASE_IMAGE}\nFROM --platform=linux/amd64 ${{BASE}} AS one\nFROM one\nARG WHO=nobody\n"
        "COPY . /context/\nENV FROM_IMAGE=yes\nRUN echo $WHO > /who\n"
    )
    return EnvironmentSpec(directory=folder, dockerfile=folder / "Dockerfile")


@pytest.fixture(autouse=True)
def no_images_left(engine: Any, tmp_path: Path) -> Any:
    yield
    remove_built(engine, tmp_path)


def remove_built(engine: Any, folder: Path) -> None:
    for image in engine.images(filters={"label": "rl-harness.kind=build"}):
        if str(folder) in image["Labels"].get("rl-harness.labels", ""):  # other tests have images of their own
            engine.remove_image(image["Id"], force=True)


async def output(provider: DockerProvider, environment: EnvironmentSpec, command: str) -> str:
    sandbox = await provider.create(SandboxSpec(environment=environment))
    try:
        result = await sandbox.exec(command)
        return (result.stdout + result.stderr).decode()
    finally:
        await sandbox.close()


async def test_the_whole_context_but_what_is_ignored(provider: DockerProvider, environment: EnvironmentSpec) -> None:
    said = await output(provider, environment, "cd /context; find . -type f | sort; cat /who; echo $FROM_IMAGE")
    assert said == "./sub/data\nnobody\nyes\n"


async def test_build_arguments_reach_the_build(environment: EnvironmentSpec) -> None:
    provider = DockerProvider(DockerOptions(image=BASE_IMAGE, build_args={"WHO": "somebody"}))
    assert await output(provider, environment, "cat /who") == "somebody\n"
    await provider.close()


def built_by_another_process(given: bytes) -> str:
    code = (
        "import asyncio, pickle, sys; from rl_harness_docker.provider import DockerProvider;"
        "options, environment = pickle.load(sys.stdin.buffer);"
        "print(asyncio.run(DockerProvider(options)._images.ready(environment))['Id'])"
    )
    done = subprocess.run([sys.executable, "-c", code], input=given, capture_output=True, check=True)
    return done.stdout.decode().strip()


async def test_many_who_ask_at_once_build_once(
    provider: DockerProvider, environment: EnvironmentSpec, engine: Any
) -> None:
    """Within a process and between two."""
    assert environment.dockerfile is not None
    environment.dockerfile.write_text(f"FROM {BASE_IMAGE}\nCOPY sub /sub\nRUN head -c 9 /dev/urandom > /x\n")
    given = pickle.dumps((DockerOptions(image=BASE_IMAGE), environment))
    elsewhere = asyncio.create_task(asyncio.to_thread(built_by_another_process, given))
    said = await asyncio.gather(*(output(provider, environment, "cat /x | od -t x1") for _ in range(3)))
    assert len(set(said)) == 1
    image = await elsewhere
    sandbox = await provider.create(SandboxSpec(environment=environment))
    assert engine.inspect_container(sandbox.container)["Image"] == image
    await sandbox.close()


async def test_a_changed_context_is_another_image(environment: EnvironmentSpec) -> None:
    assert environment.directory is not None
    (environment.directory / "Dockerfile").write_text(f"FROM {BASE_IMAGE}\nCOPY . /context/\n")
    seen = []
    for text in ("one", "two", "one"):
        (environment.directory / "sub/data").write_text(text)
        provider = DockerProvider(DockerOptions(image=BASE_IMAGE))
        seen.append(await output(provider, environment, "cat /context/sub/data"))
        await provider.close()
    assert seen == ["one", "two", "one"]


async def test_a_moved_tag_shows(
    environment: EnvironmentSpec, engine: Any, options: DockerOptions, tmp_path: Path
) -> None:
    assert environment.dockerfile is not None
    name = f"rl-harness-moving-{os.urandom(4).hex()}"
    environment.dockerfile.write_text(f"FROM {name}\nRUN cat /etc/version > /seen\n")
    found = []
    try:
        for version in ("1", "2"):
            container = engine.create_container(BASE_IMAGE, ["sh", "-c", f"echo {version} > /etc/version"])["Id"]
            engine.start(container)
            engine.wait(container)
            engine.commit(container, name)
            engine.remove_container(container)
            provider = DockerProvider(options)
            found.append(
                (
                    await provider.fingerprint(SandboxSpec(environment=environment)),
                    await output(provider, environment, "cat /seen"),
                )
            )
            await provider.close()
    finally:
        remove_built(engine, tmp_path)
        engine.remove_image(name, force=True)
    (before, one), (after, two) = found
    assert (one, two) == ("1\n", "2\n")
    assert before.keys() == after.keys()
    assert before[f"main: {name}"] != after[f"main: {name}"]


async def test_what_does_not_build_is_shown(provider: DockerProvider, environment: EnvironmentSpec) -> None:
    assert environment.dockerfile is not None
    environment.dockerfile.write_text(f"FROM {BASE_IMAGE}\nRUN (echo about; echo to fail) >&2; exit 7\n")
    with pytest.raises(SandboxError) as failure:
        await provider.create(SandboxSpec(environment=environment))
    assert str(environment.dockerfile) in failure.value.message
    assert "\n  | about\n  | to fail\n" in failure.value.message
    assert "returned a non-zero code: 7" in failure.value.message


async def test_a_build_ends_at_its_limit(provider: DockerProvider, environment: EnvironmentSpec, engine: Any) -> None:
    assert environment.dockerfile is not None
    environment.dockerfile.write_text(f"FROM {BASE_IMAGE}\nRUN sleep 4343\n")
    slow = EnvironmentSpec(directory=environment.directory, dockerfile=environment.dockerfile, build_timeout=2.0)
    with pytest.raises(SandboxError, match="not built within 2 s"):
        await provider.create(SandboxSpec(environment=slow))

    def wait_until_stopped() -> None:
        while any("sleep 4343" in (each["Command"] or "") for each in engine.containers(all=True)):
            time.sleep(0.05)

    await asyncio.to_thread(wait_until_stopped)


async def test_an_image_that_does_not_exist(provider: DockerProvider) -> None:
    name = "localhost:1/rl-harness/no-such-image:9"
    with pytest.raises(SandboxError, match="cannot be pulled") as failure:
        await provider.create(SandboxSpec(environment=EnvironmentSpec(image=name)))
    assert name in failure.value.message
    never = DockerProvider(DockerOptions(pull="never"))
    with pytest.raises(SandboxError, match="the engine does not have it"):
        await never.create(SandboxSpec(environment=EnvironmentSpec(image=name)))
    await never.close()


class ElsewhereByDefault(DockerOptions):
    image: str = "localhost:1/rl-harness/no-such-image:9"


async def test_a_default_that_cannot_be_pulled_is_told_as_one() -> None:
    """Without a way to the registry, an image was missing that nobody had asked for."""
    for options, told in (
        (ElsewhereByDefault(), "tasks without an image of their own get this one; name another"),
        (ElsewhereByDefault(image="localhost:1/rl-harness/other:9"), "check its name"),
    ):
        provider = DockerProvider(options)
        with pytest.raises(SandboxError, match=f"cannot be pulled.*\n.*{told}"):
            await provider.create(SandboxSpec())
        await provider.close()


async def test_a_file_of_holes_is_not_written_out(provider: DockerProvider) -> None:
    """It would fill the engine's disk and keep its processor busy for hours, whoever has gone meanwhile."""
    sandbox = await provider.create(SandboxSpec())
    assert (await sandbox.exec("truncate -s 900G sparse")).ok
    with pytest.raises(SandboxError, match="900 GiB were written"):
        await sandbox.snapshot()
    with pytest.raises(SandboxError, match="900 GiB were written"):
        await sandbox.fork(2)


async def test_volumes_are_in_no_snapshot(provider: DockerProvider, environment: EnvironmentSpec) -> None:
    assert environment.dockerfile is not None
    environment.dockerfile.write_text(f"FROM {BASE_IMAGE}\nVOLUME /data\n")
    sandbox = await provider.create(SandboxSpec(environment=environment))
    with pytest.raises(Unsupported, match="/data on volumes"):
        await sandbox.snapshot()
    await sandbox.close()


async def test_the_images_user_runs_commands(provider: DockerProvider, environment: EnvironmentSpec) -> None:
    assert environment.dockerfile is not None
    environment.dockerfile.write_text(f"FROM {BASE_IMAGE}\nRUN mkdir /app && chown 65534 /app\nUSER nobody\n")
    sandbox = await provider.create(SandboxSpec(environment=environment))
    await sandbox.write_file("/app/given", b"x")
    result = await sandbox.exec("id -un; echo more >> given; cat given; id -u", user="root")
    assert result.stdout == b"root\nxmore\n0\n"
    result = await sandbox.exec("id -un; echo mine >> given; cat given")
    assert result.stdout == b"nobody\nxmore\nmine\n", result
    await sandbox.close()


@pytest.mark.parametrize(
    ("dockerfile", "said"),
    [
        ("FROM scratch\nCOPY sub /sub\n", "its containers end as soon as they are started"),
        (f"FROM {BASE_IMAGE}\nRUN rm /bin/sh\n", "its containers end as soon as they are started"),
        (f"FROM {BASE_IMAGE}\nUSER nosuch\n", "as user nosuch: .*unable to find user nosuch"),
        (
            f"FROM {BASE_IMAGE}\nRUN chmod 700 /usr/bin/dash /usr/bin/bash\nUSER nobody\n",
            "as user nobody: .*ermission denied",
        ),
    ],
    ids=["scratch", "no shell", "no such user", "nothing for its user"],
)
async def test_an_image_in_which_no_command_runs_is_its_authors_doing(
    provider: DockerProvider, environment: EnvironmentSpec, dockerfile: str, said: str, tmp_path: Path
) -> None:
    """Told when it is prepared, and not to be taken for what an agent did."""
    assert environment.dockerfile is not None
    environment.dockerfile.write_text(dockerfile)
    snapshots = Snapshots(provider, identity="test", state=tmp_path / "state")
    with pytest.raises(SandboxError, match=f"(?s)no command runs in this image: {said}") as failure:
        await snapshots.build(SandboxSpec(environment=environment))
    assert not isinstance(failure.value, UnsafeFiles)
    assert str(environment.dockerfile) in failure.value.message
    await snapshots.close()


async def test_a_working_directory_on_volumes_is_carried_to_the_verifier(
    provider: DockerProvider, environment: EnvironmentSpec
) -> None:
    assert environment.dockerfile is not None
    environment.dockerfile.write_text(
        f"FROM {BASE_IMAGE}\nRUN mkdir -p /app/data/sub && touch /app/old /app/data/sub/old\nVOLUME /app /app/data\n"
    )
    spec = SandboxSpec(environment=environment)
    agents, fresh = await asyncio.gather(provider.create(spec), provider.create(spec))
    assert (await agents.exec("rm old data/sub/old; echo new > new; echo new > data/sub/new")).ok
    async with collect(agents, [Artifact(source="/app")], limit=1 << 20) as carried:
        await place(carried, fresh, clean=True)
    result = await fresh.exec("find . -type f | sort | xargs grep -H .")
    assert result.stdout == b"./data/sub/new:new\n./new:new\n", result
    await asyncio.gather(agents.close(), fresh.close())


async def test_an_image_removed_meanwhile_is_built_again(
    provider: DockerProvider, environment: EnvironmentSpec, engine: Any, tmp_path: Path
) -> None:
    assert environment.dockerfile is not None
    environment.dockerfile.write_text(f"FROM {BASE_IMAGE}\nCOPY sub /sub\n")
    await output(provider, environment, "true")
    remove_built(engine, tmp_path)
    assert await output(provider, environment, "ls /sub") == "data\n"
