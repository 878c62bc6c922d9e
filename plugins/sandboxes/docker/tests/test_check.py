"""What is wrong with a task's files is told before a run, by a provider that has asked no engine for anything."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from rl_harness.contracts.sandbox import EnvironmentSpec, SandboxSpec
from rl_harness.errors import SandboxError, TaskError
from rl_harness_docker.images import _between_processes
from rl_harness_docker.options import DockerOptions
from rl_harness_docker.provider import DockerProvider


def environment(folder: Path, files: dict[str, str], image: str | None) -> EnvironmentSpec:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    dockerfile, compose = folder / "Dockerfile", folder / "docker-compose.yaml"
    return EnvironmentSpec(
        directory=folder,
        image=image,
        dockerfile=dockerfile if dockerfile.exists() else None,
        compose=compose if compose.exists() else None,
    )


async def check(spec: EnvironmentSpec) -> None:
    provider = DockerProvider(DockerOptions(host="unix:///nonexistent/docker.sock"))
    try:
        await provider.check(SandboxSpec(environment=spec))
    finally:
        await provider.close()


@pytest.mark.parametrize(
    ("files", "image", "said"),
    [
        ({}, "Not An Image", "'Not An Image' is not the name of an image"),
        ({"Dockerfile": "RUN true\n"}, None, "Dockerfile: has no FROM"),
        ({"Dockerfile": "FROM \x00\x01\n"}, None, "Dockerfile:1: FROM"),
        ({"Dockerfile": "FROM a\nCOPY --from=B:/ /x /x\n"}, None, "Dockerfile:2: COPY --from"),
        ({"docker-compose.yaml": "services: {db: {image: 'a b'}}"}, None, "docker-compose.yaml: services.db.image"),
        ({"docker-compose.yaml": "services: {db: {build: db}}"}, None, "db/Dockerfile: cannot be read"),
        (
            {"docker-compose.yaml": "services: {db: {build: db}}", "db/Dockerfile": "FROM\n"},
            None,
            "db/Dockerfile:1: FROM",
        ),
        ({"docker-compose.yaml": "services: {db: {image: a}}", "Dockerfile": "FROM A\n"}, None, "Dockerfile:1: FROM"),
        ({"docker-compose.yaml": "services: {main: {working_dir: /x}}"}, None, "services.main.working_dir"),
    ],
)
async def test_what_is_wrong_is_named(tmp_path: Path, files: dict[str, str], image: str | None, said: str) -> None:
    with pytest.raises(TaskError) as refusal:
        await check(environment(tmp_path, files, image))
    assert said in refusal.value.message


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("caf\xe9\n".encode("latin-1"), r"cannot be read: .*utf-8"),
        (b"\xff\xfe\0", r"cannot be read"),
        (None, r"cannot be read: it is not a regular file"),
        (b"# fine: [\n*.pyc\n\n  data/[z-a]\n", r":4: 'data/\[z-a\]' is no pattern: bad character range"),
        (b"a[\n", r":1: 'a\[' is no pattern: .*left open"),
        (b"!sub/[]\n", r":1: .* is no pattern"),
        (b"a\\\n", r":1: .* is no pattern: .*left open"),
    ],
    ids=["latin-1", "utf-16", "folder", "range", "bracket", "nothing in brackets", "backslash"],
)
@pytest.mark.parametrize("service", [False, True])
async def test_what_is_wrong_with_what_is_ignored_is_named(
    tmp_path: Path, content: bytes | None, said: str, service: bool
) -> None:
    folder = tmp_path / "db" if service else tmp_path
    files = {"docker-compose.yaml": "services: {db: {build: db}}"} if service else {}
    spec = environment(tmp_path, {**files, "db/Dockerfile" if service else "Dockerfile": "FROM a\n"}, None)
    if content is None:
        (folder / ".dockerignore").mkdir()
    else:
        (folder / ".dockerignore").write_bytes(content)
    with pytest.raises(TaskError, match=rf"{folder}/\.dockerignore:? ?{said}"):
        await check(spec)


async def test_good_patterns_pass(tmp_path: Path) -> None:
    files = {"Dockerfile": "FROM a\n", ".dockerignore": "**/*.py[co]\n!keep\n[^a-c]?\n\\[x\n/a/../b/\n[!x]\n\u00e9\n"}
    await check(environment(tmp_path, files, None))


@pytest.mark.parametrize(
    "name",
    [
        "a",
        "a__b",
        "debian:12-slim",
        "localhost:5000/a/b_c/d-e:V.1",
        "Registry.example/a",
        "[::1]:5000/a",
        "a@sha256:" + "0f" * 32,
        "sha256:" + "0f" * 32,
    ],
)
async def test_names_of_images_pass(tmp_path: Path, name: str) -> None:
    await check(environment(tmp_path, {}, name))


async def test_good_files_pass(tmp_path: Path) -> None:
    compose = "services: {main: {depends_on: [db]}, db: {image: postgres:16}, seed: {build: seed}}"
    files = {"docker-compose.yaml": compose, "Dockerfile": "FROM a AS b\nFROM b\n", "seed/Dockerfile": "FROM scratch\n"}
    await check(environment(tmp_path, files, None))


@pytest.mark.parametrize("link", ["folder", "lock"])
async def test_a_lock_that_another_user_put_there_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    victims = tmp_path / "victims"
    victims.mkdir()
    (victims / "00.lock").write_text("precious")
    folder = tmp_path / f"rl-harness-docker-{os.geteuid()}"
    if link == "folder":
        folder.symlink_to(victims)
    else:
        folder.mkdir(mode=0o700)
        (folder / "00.lock").symlink_to(victims / "00.lock")
    with pytest.raises(SandboxError, match=str(folder)):
        async with _between_processes("00"):
            pass
    assert (victims / "00.lock").read_text() == "precious"
