"""Providers on the engine that ``DOCKER_HOST`` names, and an engine client of the tests' own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import docker
import pytest
from docker.utils import kwargs_from_env
from rl_harness_docker.options import DockerOptions
from rl_harness_docker.provider import DockerProvider
from rl_harness_docker.testing import BASE_IMAGE

#: What one provider has seen of an image, those after it need not see again.
_PROVEN: set[tuple[str, str]] = set()


@pytest.fixture
def options() -> DockerOptions:
    return DockerOptions(image=BASE_IMAGE)


@pytest.fixture
async def provider(options: DockerOptions) -> AsyncIterator[DockerProvider]:
    provider = DockerProvider(options)
    provider._proven = _PROVEN
    await provider.preflight()
    yield provider
    await provider.close()


@pytest.fixture
def engine() -> Iterator[Any]:
    """The SDK's own client: what our provider did, seen by somebody else."""
    client = docker.APIClient(**kwargs_from_env(), timeout=60)
    yield client
    client.close()
