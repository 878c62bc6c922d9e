"""Machines from images and Dockerfiles, which the stand-in really builds, and from snapshots."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from rl_harness.contracts.sandbox import EnvironmentSpec, SandboxSpec
from rl_harness.errors import SandboxError
from rl_harness_modal.provider import ModalProvider

pytestmark = pytest.mark.needs("root", "userns", "modal")

DOCKERFILE = """\
# A comment, a platform, a stage, arguments and a continued line.
ARG TAG=bookworm
FROM --platform=linux/amd64 debian:${TAG} AS made
RUN echo built > /artefact
FROM --platform=linux/amd64 python:3.12-slim
ARG WHO=nobody
ENV GREETING="hello $WHO" OTHER=1
WORKDIR /srv/place
COPY data/ data/
COPY --chmod=755 run.sh /usr/local/bin/greet
COPY --from=made /artefact /artefact
RUN echo made >> made && \\
    cat data/file >> made
CMD ["greet"]
"""


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    folder = tmp_path / "environment"
    (folder / "data").mkdir(parents=True)
    (folder / "data/file").write_text("of the context\n")
    (folder / "run.sh").write_text('#!/bin/sh\necho "$GREETING"\n')
    (folder / "Dockerfile").write_text(DOCKERFILE)
    return folder


def spec(folder: Path, **fields: object) -> SandboxSpec:
    made = EnvironmentSpec(directory=folder, dockerfile=folder / "Dockerfile", workdir="/srv/place", **fields)
    return SandboxSpec(environment=made, labels={"run": "images"})


async def test_a_dockerfile_is_built_with_its_context_and_arguments(environment: Path, stand_in) -> None:
    provider = ModalProvider(ModalProvider.Options(patience=5, build_args={"WHO": "you"}))
    (environment / "workspace").mkdir()
    (environment / "workspace/given").write_text("given\n")
    sandbox = await provider.create(spec(environment, env={"OTHER": "2"}))
    result = await sandbox.exec("greet; echo $OTHER; cat /artefact made given; ls")
    assert result.stdout == b"hello you\n2\nbuilt\nmade\nof the context\ngiven\ndata\ngiven\nmade\n"
    await provider.close()


async def test_a_build_that_fails_shows_its_output(environment: Path, provider: ModalProvider) -> None:
    dockerfile = environment / "Dockerfile"
    dockerfile.write_text(DOCKERFILE + "RUN echo why it fails >&2; exit 7\n")
    with pytest.raises(SandboxError, match="failed with exit code 7") as caught:
        await provider.create(spec(environment))
    assert "why it fails" in str(caught.value)


async def test_an_image_that_does_not_exist_is_said_before_anything_runs(provider: ModalProvider, stand_in) -> None:
    made = EnvironmentSpec(image="no-such-image:1")
    with pytest.raises(SandboxError, match="no-such-image:1: pull access denied"):
        await provider.fingerprint(SandboxSpec(environment=made))
    assert stand_in.ask("sandboxes") == []


async def test_an_images_own_commands_are_there(provider: ModalProvider) -> None:
    sandbox = await provider.create(SandboxSpec(environment=EnvironmentSpec(image="python:3.12")))
    assert (await sandbox.exec(["python3", "-c", "print(1 + 1)"])).stdout == b"2\n"


async def test_the_fingerprint_follows_everything_that_decides_the_image(environment: Path, stand_in) -> None:
    async def fingerprint(**options: object) -> str:
        provider = ModalProvider(ModalProvider.Options(patience=5, **options))
        found = await provider.fingerprint(spec(environment))
        await provider.close()
        return found["image"]

    first = await fingerprint()
    assert await fingerprint() == first
    seen = {first, await fingerprint(build_args={"WHO": "you"})}
    (environment / "data/file").write_text("changed\n")
    seen.add(await fingerprint())
    (environment / "Dockerfile").write_text(DOCKERFILE.replace("OTHER=1", "OTHER=3"))
    seen.add(await fingerprint())
    assert len(seen) == 4


async def test_many_sandboxes_of_one_image_wait_for_one_build(
    environment: Path, provider: ModalProvider, stand_in
) -> None:
    (environment / "Dockerfile").write_text("FROM debian\nRUN sleep 0.5; head -c 8 /dev/urandom | od > /once\n")
    made = await asyncio.gather(*(provider.create(spec(environment)) for _ in range(4)))
    assert len({(await sandbox.read_file("/once")) for sandbox in made}) == 1
    assert stand_in.ask("calls")["ImageGetOrCreate"] <= 2  # the FROM line is an image of its own


async def test_a_build_that_takes_too_long_is_given_up(environment: Path, provider: ModalProvider) -> None:
    (environment / "Dockerfile").write_text("FROM debian\nRUN sleep 3\n")
    with pytest.raises(SandboxError, match=r"not built within 0.5 s"):
        await provider.create(spec(environment, build_timeout=0.5))


# ------------------------------------------------------------------------------------------------------- snapshots


async def test_a_snapshot_keeps_its_images_variables_and_is_asked_of_modal(
    environment: Path, provider: ModalProvider, stand_in
) -> None:
    sandbox = await provider.create(spec(environment))
    await sandbox.exec("echo kept > /kept; rm made")
    snapshot = await sandbox.snapshot(key="k", labels={"benchmark": "b"})
    child = await provider.create(SandboxSpec(snapshot=snapshot, environment=EnvironmentSpec(workdir="/srv/place")))
    assert (await child.exec("greet; cat /kept; ls")).stdout == b"hello nobody\nkept\ndata\n"
    assert [info.key for info in await provider.snapshots({"benchmark": "b"})] == ["k"]


async def test_a_snapshot_that_modal_dropped_is_not_listed(stand_in, tmp_path: Path) -> None:
    provider = ModalProvider(ModalProvider.Options(patience=5, snapshot_ttl=1, state_dir=tmp_path / "list"))
    sandbox = await provider.create(SandboxSpec())
    snapshot = await sandbox.snapshot(key="k")
    assert [info.id for info in await provider.snapshots()] == [snapshot]
    await asyncio.sleep(1.1)
    assert await provider.snapshots() == []
    assert list((tmp_path / "list").iterdir()) == []
    with pytest.raises(SandboxError, match="not found"):
        await provider.create(SandboxSpec(snapshot=snapshot))
    await provider.close()


async def test_a_lost_answer_makes_no_second_snapshot(provider: ModalProvider, stand_in) -> None:
    sandbox = await provider.create(SandboxSpec())
    stand_in.ask("fault", method="TaskSnapshotFilesystem", status="UNAVAILABLE", answer_lost=True)
    snapshot = await sandbox.snapshot()
    assert [found["snapshots"] for found in stand_in.running()] == [[snapshot]]


async def test_files_of_the_list_that_cannot_be_read_are_passed_over(stand_in, tmp_path: Path) -> None:
    provider = ModalProvider(ModalProvider.Options(patience=5, state_dir=tmp_path))
    for name, text in (("im-1.json", "{"), ("im-2.json", "[]"), ("im-3.json", '{"key": 1, "labels": 2}')):
        (tmp_path / name).write_text(text)
    assert await provider.snapshots() == []
    await provider.close()
