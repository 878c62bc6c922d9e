"""The conformance kit of sandbox providers against a real engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rl_harness.testing.sandbox import CHECKS, Check
from rl_harness_docker.options import DockerOptions
from rl_harness_docker.provider import DockerProvider
from rl_harness_docker.testing import BASE_IMAGE

pytestmark = pytest.mark.needs("docker")


@pytest.fixture
async def provider() -> AsyncIterator[DockerProvider]:
    provider = DockerProvider(DockerOptions(image=BASE_IMAGE))
    await provider.preflight()
    yield provider
    await provider.close()


@pytest.mark.parametrize("check", CHECKS, ids=str)
async def test_conformance(check: Check, provider: DockerProvider, tmp_path: Path) -> None:
    if reason := check.inapplicable(provider.capabilities):
        pytest.skip(reason)
    await check.run(provider, tmp_path)
