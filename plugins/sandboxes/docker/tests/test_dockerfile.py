"""What a Dockerfile builds on: flags, arguments, stages."""

from __future__ import annotations

from pathlib import Path

import pytest
from rl_harness.errors import TaskError
from rl_harness_docker.dockerfile import base_images
from rl_harness_docker.engine import Engine
from rl_harness_docker.images import Images
from rl_harness_docker.options import DockerOptions


def bases(folder: Path, text: str, **build_args: str) -> list[str]:
    file = folder / "Dockerfile"
    file.write_text(text)
    return base_images(file, build_args)


@pytest.mark.parametrize(
    ("text", "images"),
    [
        ("FROM --platform=linux/amd64 python:3.11\n", ["python:3.11"]),
        ("from python:3.11 as build\n", ["python:3.11"]),
        ("ARG TAG=3.11\nFROM python:${TAG}\n", ["python:3.11"]),
        ("ARG TAG\nFROM python:${TAG:-3.12}-slim\n", ["python:3.12-slim"]),
        ('ARG BASE="debian:12"\nARG IMAGE=$BASE\nFROM $IMAGE\n', ["debian:12"]),
        (
            "FROM a AS one\nFROM one AS two\nFROM b\nCOPY --from=two /x /x\nCOPY --chown=1 --from=c:1 /y /y\n",
            ["a", "b", "c:1"],
        ),
        ("FROM a\nCOPY --from=0 /x /x\n", ["a"]),
        ("FROM scratch\nCOPY x /\n", []),
        ("# syntax=docker/dockerfile:1\n# escape=`\nFROM `\n  a:1 `\n  AS x\n", ["a:1"]),
        ("# FROM commented\nFROM a\nRUN <<END\nFROM not-this\nEND\nRUN echo \\\n  FROM nor-this\n", ["a"]),
        ("FROM registry.example:5000/team/a@sha256:00 AS x\nFROM a\n", ["registry.example:5000/team/a@sha256:00", "a"]),
    ],
)
def test_base_images(tmp_path: Path, text: str, images: list[str]) -> None:
    assert bases(tmp_path, text) == images


def test_build_arguments_override_only_what_is_declared(tmp_path: Path) -> None:
    assert bases(tmp_path, "ARG TAG=1\nFROM a:$TAG\n", TAG="2", OTHER="3") == ["a:2"]
    assert bases(tmp_path, "FROM a\nARG TAG=1\nFROM b:x$TAG\n", TAG="2") == ["a", "b:x"]


@pytest.mark.parametrize("text", ["", "RUN true\n", "FROM\n", "FROM a b\n", "FROM $NOTHING\n"])
def test_what_names_no_image_is_refused_with_file_and_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(TaskError, match=r"Dockerfile"):
        bases(tmp_path, text)


@pytest.mark.parametrize("name", ["../../containers/json?x=", "UPPER:bad", "a:b:c", "a/%2e%2e/b", "a#b", "a//b", "a@b"])
async def test_what_is_no_name_of_an_image_reaches_no_engine(tmp_path: Path, name: str) -> None:
    for text in (f"# first\nFROM {name}\n", f"FROM a\nCOPY --from={name} /x /x\n"):
        with pytest.raises(TaskError, match=r"Dockerfile:2: .* is not the name of an image"):
            bases(tmp_path, text)
    images = Images(Engine("unix:///nonexistent/socket"), DockerOptions(), "owner")
    with pytest.raises(TaskError, match="is not the name of an image"):
        await images.found(name)
