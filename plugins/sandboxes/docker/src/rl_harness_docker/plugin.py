"""Registers the docker sandbox; imports nothing heavy."""

from __future__ import annotations

from rl_harness.hookspecs import Extension, hookimpl


@hookimpl
def rl_harness_sandboxes() -> list[Extension]:
    return [Extension("docker", "rl_harness_docker.provider:DockerProvider", "containers of a Docker engine")]
