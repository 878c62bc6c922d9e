"""The options of ``--sandbox docker``."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import ByteSize, Field, field_validator
from rl_harness.contracts.common import Options

#: What root inside needs to install packages, change owners and users, and end other users' processes. Everything
#: else that Docker gives by default goes: raw sockets, device nodes, chroot, audit, file capabilities, low ports.
KEPT_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID")

#: May be asked for; all others lead out of a container or around its network policy.
OFFERED_CAPABILITIES = frozenset({"NET_BIND_SERVICE", "SETFCAP", "SETPCAP", "SYS_CHROOT", "SYS_PTRACE", "AUDIT_WRITE"})

_PLATFORM = re.compile(r"[a-z0-9_]+(/[a-z0-9_]+){0,2}")


class DockerOptions(Options):
    host: str | None = Field(None, description="address of the engine; default: DOCKER_HOST or docker's own context")
    image: str = Field("python:3.12-slim-bookworm", description="image of tasks that have none of their own")
    pull: Literal["missing", "always", "never"] = Field(
        "missing", description="when images are fetched from a registry"
    )
    platform: str | None = Field(None, description="platform of images, such as linux/amd64; default: the engine's")
    build_args: dict[str, str] = Field({}, description="build arguments of Dockerfiles that declare them")
    user: str | None = Field(None, description="user that commands run as; default: the image's")
    runtime: str | None = Field(None, description="the engine's runtime, such as runsc; default: the engine's choice")
    read_only: bool = Field(False, description="only the working directory and /tmp can be written; no snapshots then")
    capabilities: tuple[str, ...] = Field((), description="Linux capabilities on top of the few that root keeps")
    memory: ByteSize | None = Field(None, ge=6 << 20, description="memory of a sandbox whose task sets no limit")
    cpus: float | None = Field(None, gt=0, description="processor cores of a sandbox whose task sets no limit")
    pids: int = Field(1024, ge=16, description="most processes of a sandbox whose task sets no limit")

    @field_validator("capabilities")
    @classmethod
    def _offered(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        names = tuple(name.upper().removeprefix("CAP_") for name in value)
        if refused := sorted(set(names) - OFFERED_CAPABILITIES - set(KEPT_CAPABILITIES)):
            raise ValueError(f"{', '.join(refused)} cannot be given; only {', '.join(sorted(OFFERED_CAPABILITIES))}")
        return names

    @field_validator("platform")
    @classmethod
    def _is_platform(cls, value: str | None) -> str | None:
        if value is not None and not _PLATFORM.fullmatch(value):
            raise ValueError(f"{value!r} is not a platform such as linux/amd64")
        return value
