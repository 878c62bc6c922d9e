"""A task as the rest of the harness sees it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import msgspec

from rl_harness.contracts.sandbox import EnvironmentSpec, HostMount, Limits, NetworkPolicy, SandboxSpec, SetupStep

VerifierMode = Literal["separate", "shared", "answer"]


class Artifact(msgspec.Struct, frozen=True, kw_only=True):
    """A file or tree of the agent's sandbox that the verifier's sandbox gets, without what ``exclude`` matches
    (shell patterns, on names relative to ``source`` and on base names)."""

    source: str
    exclude: tuple[str, ...] = ()


class VerifierSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt is graded.

    ``separate``: ``tests/test.sh`` in a fresh sandbox made of ``environment``, to which ``artifacts`` (by default
    the working directory) are carried. ``shared``: in the sandbox the agent used. ``answer``: the final answer's
    text is compared with ``answers`` on the host, without a sandbox. ``bundled``: the verifier's own image holds
    ``/tests`` already.
    """

    mode: VerifierMode
    timeout: float = 600.0
    env: Mapping[str, str] = {}
    user: str | None = None
    artifacts: tuple[Artifact, ...] = ()
    artifact_limit: int = 256 << 20
    answers: tuple[str, ...] = ()
    environment: EnvironmentSpec = EnvironmentSpec()
    limits: Limits = Limits()
    network: NetworkPolicy = NetworkPolicy.NONE
    network_allow: tuple[str, ...] = ()
    bundled: bool = False


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One task directory, read and checked. ``digest`` covers every file of it.

    ``name`` is the directory's name; ``package`` the ``org/name`` its ``task.toml`` may give. ``gpus`` is how many
    the task asks for. ``solution`` is its ``solution/`` directory, if it has one.
    """

    name: str
    directory: Path
    instruction: str
    digest: str
    environment: EnvironmentSpec
    limits: Limits
    network: NetworkPolicy
    network_allow: tuple[str, ...] = ()
    gpus: int = 0
    agent_timeout: float
    verifier: VerifierSpec
    max_turns: int | None = None
    needs_sandbox: bool = True
    solution: Path | None = None
    solution_env: Mapping[str, str] = {}
    allow_tampered: bool = False
    package: str | None = None
    metadata: Mapping[str, Any] = {}

    def sandbox_spec(
        self,
        labels: Mapping[str, str],
        *,
        isolated: bool = True,
        agent_timeout: float | None = None,
        setup: tuple[SetupStep, ...] = (),
        mounts: tuple[HostMount, ...] = (),
    ) -> SandboxSpec:
        """The agent's sandbox; ``setup`` and ``mounts`` are its harness's. One that is not ``isolated`` cannot do
        without a network, and is not asked to: that every result of it is marked ``unisolated`` says so."""
        return SandboxSpec(
            environment=self.agent_environment(setup),
            limits=self.limits,
            network=_available(self.network, isolated),
            network_allow=self.network_allow,
            labels=labels,
            lifetime=(agent_timeout or self.agent_timeout) + self.verifier.timeout + 300.0,
            mounts=mounts,
        )

    def agent_environment(self, setup: tuple[SetupStep, ...]) -> EnvironmentSpec:
        """The task's environment, with what its harness installs there."""
        if not setup:
            return self.environment
        return msgspec.structs.replace(self.environment, setup=(*self.environment.setup, *setup))

    def verifier_spec(self, labels: Mapping[str, str], *, isolated: bool = True) -> SandboxSpec:
        """The fresh sandbox a ``separate`` verifier runs in.

        Without the task's workspace where that is all the environment has and the agent's replaces it: what the agent
        deleted stays deleted."""
        environment = self.verifier.environment
        if self.workspace_is_carried and not self.verifier_is_prepared:
            environment = msgspec.structs.replace(environment, directory=None)
        return SandboxSpec(
            environment=environment,
            limits=self.verifier.limits,
            network=_available(self.verifier.network, isolated),
            network_allow=self.verifier.network_allow,
            labels=labels,
            lifetime=self.verifier.timeout + 300.0,
        )

    @property
    def workspace_is_carried(self) -> bool:
        """Whether the verifier's working directory is replaced by what the agent left of its own."""
        workdir = PurePosixPath(self.verifier.environment.workdir)
        return any(workdir.is_relative_to(artifact.source) for artifact in self.verifier.artifacts)

    @property
    def verifier_is_prepared(self) -> bool:
        """Whether an image or set-up steps made the verifier's environment, which may have needed the workspace."""
        environment = self.verifier.environment
        return bool(environment.image or environment.dockerfile or environment.compose or environment.setup)


def _available(network: NetworkPolicy, isolated: bool) -> NetworkPolicy:
    return NetworkPolicy.FULL if network is NetworkPolicy.NONE and not isolated else network
