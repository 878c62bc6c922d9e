"""Templates: what an environment's image and limits are to E2B, named by their content and built once."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from e2b import AsyncTemplate, DockerfileSyntaxError, TemplateException
from e2b.api import handle_api_exception
from e2b.api.client.api.templates import get_templates_template_id
from e2b.api.client.models import TemplateBuildStatus, TemplateWithBuilds
from e2b.api.client_async import get_api_client
from e2b.connection_config import ConnectionConfig
from e2b.template.dockerfile_parser import parse_dockerfile
from rl_harness.contracts.sandbox import EnvironmentSpec, Limits
from rl_harness.errors import SandboxError, Unsupported

from rl_harness_e2b.limits import resources
from rl_harness_e2b.service import Gone, Service

_LOG_LINES = 40
_NOT_FOUND = 404


class Template(msgspec.Struct, frozen=True):
    """``name`` of a template. ``recipe`` builds it; None for one that must be there."""

    name: str
    recipe: Any = None
    cpus: int | None = None
    memory: int | None = None


def template_of(environment: EnvironmentSpec, limits: Limits, base: str, args: Mapping[str, str]) -> Template:
    """The template of an environment. ``base`` serves where it names no image. Blocking; raises Unsupported."""
    cpus, memory = resources(limits)
    if environment.dockerfile is not None:
        builder = _from_dockerfile(environment.dockerfile, args)
    elif environment.image is not None:
        builder = AsyncTemplate().from_image(environment.image)
    elif cpus is None and memory is None:
        return Template(base)
    else:
        builder = AsyncTemplate().from_template(base)
    try:
        content = AsyncTemplate.to_json(builder)
    except (ValueError, OSError, TemplateException) as error:
        raise Unsupported(f"{environment.dockerfile}: {error}") from None
    digest = hashlib.sha256(json.dumps([content, cpus, memory]).encode()).hexdigest()
    return Template(f"rl-harness-{digest[:40]}", builder, cpus, memory)


class _WithoutCommand:
    """A builder that leaves out what a Dockerfile starts: a sandbox starts nothing by itself, here as elsewhere."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._builder, name)

    def set_start_cmd(self, start_cmd: str, ready_cmd: str) -> Any:
        return self._builder


def _from_dockerfile(dockerfile: Path, args: Mapping[str, str]) -> Any:
    try:
        text = dockerfile.read_text("utf-8")
    except (OSError, UnicodeError) as error:
        raise Unsupported(f"{dockerfile}: cannot be read: {error}") from None
    template = AsyncTemplate(file_context_path=str(dockerfile.parent))
    builder = template.from_image("base")
    notes = io.StringIO()
    try:
        with contextlib.redirect_stdout(notes):  # the SDK prints what it ignores
            base = parse_dockerfile(_with_args(text, args), _WithoutCommand(builder))
    except (DockerfileSyntaxError, TemplateException, ValueError) as error:
        raise Unsupported(
            f"{dockerfile}: E2B cannot build it: {error}",
            remedy="choose a sandbox that builds any Dockerfile, such as docker",
        ) from None
    if unknown := [line for line in notes.getvalue().splitlines() if line.startswith("Unsupported")]:
        raise Unsupported(f"{dockerfile}: E2B cannot build it: {unknown[0]}")
    return template.from_image(base)


def _with_args(text: str, args: Mapping[str, str]) -> str:
    """The Dockerfile with other defaults for its ARGs, which is what build arguments are to E2B."""
    for name, value in args.items():
        if "$" in value:
            raise Unsupported(f"build argument {name}={value}: E2B would expand the dollar sign")
        quoted = '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
        text = re.sub(rf"(?im)^\s*ARG\s+{re.escape(name)}(?:=.*)?$", partial(_line, f"ARG {name}={quoted}"), text)
    return text


def _line(line: str, _: re.Match[str]) -> str:
    return line


async def find(service: Service, template: Template) -> str | None:
    """The id of the template's newest finished build; None when it is not there, or was never built to its end."""

    async def look(options: dict[str, Any]) -> str | None:
        client = get_api_client(ConnectionConfig(**options))
        answer = await get_templates_template_id.asyncio_detailed(template.name, client=client, limit=100)
        if answer.status_code == _NOT_FOUND:
            return None
        found = answer.parsed
        if not isinstance(found, TemplateWithBuilds):
            raise handle_api_exception(answer)
        ready = [build for build in found.builds if build.status is TemplateBuildStatus.READY]
        return str(max(ready, key=lambda build: build.created_at).build_id) if ready else None

    return await service.call(f"look for the template {template.name}", look)


async def build(service: Service, template: Template, timeout: float) -> str:
    """Build a template, whose files take ``timeout`` seconds at most to get there; the id of the build. What went wrong
    is told with the end of the build's output."""
    log: list[str] = []

    async def attempt(options: dict[str, Any]) -> str:
        log.clear()
        made = await AsyncTemplate.build(
            template.recipe,
            template.name,
            cpu_count=template.cpus,
            memory_mb=template.memory,
            on_build_logs=lambda entry: log.append(entry.message),
            **options,
        )
        return str(made.build_id)

    try:
        return await service.call("build the template", attempt, timeout=timeout)
    except Gone:
        raise
    except SandboxError as error:
        tail = "\n".join(log[-_LOG_LINES:])
        raise SandboxError(f"{error.message}\n{tail}".rstrip(), remedy=error.remedy) from None
