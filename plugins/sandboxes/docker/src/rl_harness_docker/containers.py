"""The form of our containers: labels they are known by, and the security and limits they start with."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping
from typing import Any

from rl_harness.contracts.sandbox import Limits, NetworkPolicy, SandboxSpec

from rl_harness_docker.channel import FIRST
from rl_harness_docker.options import KEPT_CAPABILITIES, DockerOptions

KIND, OWNER, LABELS = "rl-harness.kind", "rl-harness.owner", "rl-harness.labels"
SNAPSHOT_OF, PARTS, KEY = "rl-harness.snapshot", "rl-harness.parts", "rl-harness.key"
"""Labels. ``KIND`` is sandbox, service, network, snapshot, fork or build."""

BRIDGE = "rl-harness"


def new_name() -> str:
    """For a sandbox; those of its services begin with it."""
    return f"rl-harness-{secrets.token_hex(8)}"


NAME_LENGTH = len(new_name())


def labels(kind: str, owner: str, given: Mapping[str, str]) -> dict[str, str]:
    """One label holds all that were given: separate ones would be inherited by way of snapshots."""
    return {KIND: kind, OWNER: owner, LABELS: json.dumps(dict(given), sort_keys=True)}


def given_labels(found: Mapping[str, str] | None) -> dict[str, str]:
    try:
        return {str(key): str(value) for key, value in json.loads((found or {})[LABELS]).items()}
    except (KeyError, ValueError, AttributeError):
        return {}


def limits_of(limits: Limits, options: DockerOptions) -> dict[str, Any]:
    """The limits as the engine takes them: the task's, or the options' where it has none."""
    host: dict[str, Any] = {"PidsLimit": limits.pids or options.pids}
    memory = limits.memory or options.memory
    if memory:
        host["Memory"] = host["MemorySwap"] = int(memory)
    if cpus := limits.cpus or options.cpus:
        host["NanoCpus"] = math.ceil(cpus * 1e9)
    if limits.disk:
        host["StorageOpt"] = {"size": str(limits.disk)}
    return host


def security(options: DockerOptions) -> dict[str, Any]:
    return {
        "CapDrop": ["ALL"],
        "CapAdd": sorted({*KEPT_CAPABILITIES, *options.capabilities}),
        "SecurityOpt": ["no-new-privileges"],
        "Privileged": False,
        "Init": True,
        "LogConfig": {"Type": "none"},
        "IpcMode": "private",
        "RestartPolicy": {"Name": "no"},
        **({"Runtime": options.runtime} if options.runtime else {}),
    }


def main_container(
    spec: SandboxSpec, image: str, options: DockerOptions, container_labels: Mapping[str, str]
) -> dict[str, Any]:
    """The body of the request that creates the agent's container."""
    host = {**security(options), **limits_of(spec.limits, options), **network(spec.network)}
    body: dict[str, Any] = {
        "Image": image,
        "Entrypoint": ["/bin/sh", "-c", FIRST, str(max(1, math.ceil(spec.lifetime)))],
        "Cmd": [],
        "User": "0",
        "WorkingDir": "/",  # not the task's, without which an agent that replaced it could not be graded
        "OpenStdin": True,
        "StdinOnce": True,
        "AttachStdin": True,
        "Labels": dict(container_labels),
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": host,
    }
    if options.read_only:
        host["ReadonlyRootfs"] = True
        body["Volumes"] = {path: {} for path in writable(spec)}
    return body


def writable(spec: SandboxSpec) -> tuple[str, ...]:
    """What can be written in a sandbox that is otherwise read-only."""
    return (spec.environment.workdir, "/tmp")


def network(policy: NetworkPolicy) -> dict[str, Any]:
    if policy is NetworkPolicy.NONE:
        return {"NetworkMode": "none"}
    return {"NetworkMode": BRIDGE, "Sysctls": {"net.ipv6.conf.all.disable_ipv6": "1"}}
