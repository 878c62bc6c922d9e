"""Images: a Dockerfile's steps, really executed in a machine whose file system then becomes the image."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import re
import secrets
import shlex
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from grpclib import GRPCError, Status
from modal_proto import api_pb2
from rl_harness.contracts.sandbox import EnvironmentSpec, Sandbox, SandboxSpec

if TYPE_CHECKING:
    from modal_standin.fleet import Fleet

REGISTRY = ("debian", "python", "ubuntu")  # all of them are this machine's own system files
RECORDED = {"CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "SHELL", "STOPSIGNAL", "MAINTAINER", "HEALTHCHECK"}


@dataclasses.dataclass(frozen=True)
class BuiltImage:
    """``content``: the snapshot of the local provider that holds its files, None for the system's own."""

    id: str
    content: str | None = None
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    workdir: str = "/root"
    expires: float | None = None


class BuildFailed(Exception):
    pass


@dataclasses.dataclass
class Build:
    done: asyncio.Task[BuiltImage]
    log: list[str]


class Images:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._built: dict[str, BuiltImage] = {}
        self.builds: dict[str, Build] = {}
        self.files: dict[str, bytes] = {}
        self.mounts: dict[str, dict[str, tuple[str, int]]] = {}

    def get(self, image_id: str) -> BuiltImage:
        image = self._built.get(image_id)
        if image is None or (image.expires is not None and image.expires <= time.time()):
            raise GRPCError(Status.NOT_FOUND, f"Image {image_id!r} not found")
        return image

    async def delete(self, image_id: str) -> None:
        image = self.get(image_id)
        del self._built[image_id]
        if image.content and all(other.content != image.content for other in self._built.values()):
            await self._fleet.provider.delete_snapshot(image.content)

    async def snapshot(self, box: Sandbox, like: BuiltImage, ttl: float) -> str:
        image_id = f"im-{secrets.token_hex(11)}"
        content = await box.snapshot(labels={"run": "modal-standin"})
        expires = time.time() + ttl if ttl > 0 else None
        self._built[image_id] = dataclasses.replace(like, id=image_id, content=content, expires=expires)
        return image_id

    def build(self, definition: api_pb2.Image, *, shared: bool, force: bool) -> str:
        """The id of the image with this definition; it is built at the first request, and after a failure."""
        digest = hashlib.sha256(definition.SerializeToString(deterministic=True)).hexdigest()[:22]
        image_id = f"im-{digest}" if not force else f"im-{secrets.token_hex(11)}"
        failed = image_id in self.builds and self.builds[image_id].done.done() and image_id not in self._built
        if image_id not in self.builds or failed:
            log: list[str] = []
            building = self._build(image_id, definition, log) if not shared else self._ready(image_id)
            self.builds[image_id] = Build(asyncio.ensure_future(building), log)
        return image_id

    async def _ready(self, image_id: str) -> BuiltImage:
        """An image of Modal's own that everybody shares has been built long ago."""
        self._built[image_id] = BuiltImage(image_id)
        return self._built[image_id]

    async def _build(self, image_id: str, definition: api_pb2.Image, log: list[str]) -> BuiltImage:
        bases = {base.docker_tag: self.get(base.image_id) for base in definition.base_images}
        mount = self.mounts.get(definition.context_mount_id, {})
        with tempfile.TemporaryDirectory(prefix="modal-context-") as folder:
            context = Path(folder)
            for name, (digest, mode) in mount.items():
                path = context / name.lstrip("/")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self.files[digest])
                path.chmod(mode or 0o644)
            recipe = Recipe(self._fleet, bases, context, dict(definition.build_args), log)
            try:
                built = await recipe.run(image_id, list(definition.dockerfile_commands))
            finally:
                await recipe.close()
        self._built[image_id] = built
        return built


@dataclasses.dataclass
class Stage:
    base: BuiltImage
    box: Sandbox | None = None
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    arguments: dict[str, str] = dataclasses.field(default_factory=dict)
    workdir: str = "/root"


class Recipe:
    """One build: every stage is a machine of its own."""

    def __init__(
        self,
        fleet: Fleet,
        bases: Mapping[str, BuiltImage],
        context: Path,
        arguments: Mapping[str, str],
        log: list[str],
    ) -> None:
        self._fleet = fleet
        self._bases = bases
        self._context = context
        self._given = arguments
        self._log = log
        self._stages: list[Stage] = []
        self._named: dict[str, Stage] = {}
        self._global: dict[str, str] = {}

    async def run(self, image_id: str, commands: Sequence[str]) -> BuiltImage:
        for number, line in enumerate(instructions(commands), 1):
            self._log.append(f"=> Step {number}: {line}\n")
            word, _, rest = line.partition(" ")
            await self._step(word.upper(), rest.strip())
        stage = self._stages[-1]
        content = await stage.box.snapshot(labels={"run": "modal-standin"}) if stage.box else stage.base.content
        return BuiltImage(image_id, content, stage.env, stage.workdir)

    async def _step(self, word: str, rest: str) -> None:
        if word == "FROM":
            return self._from(rest)
        if word == "ARG":
            return self._argument(rest)
        if not self._stages:
            raise BuildFailed(f"no build stage in current context: {word}")
        if word == "ENV":
            return self._environment(rest)
        if word == "RUN":
            return await self._run(rest)
        if word == "WORKDIR":
            stage = self._stages[-1]
            stage.workdir = str(PurePosixPath(stage.workdir) / self._expand(rest))
            return await self._run(f"mkdir -p {shlex.quote(stage.workdir)}", cwd="/")
        if word == "COPY":
            return await self._copy(rest)
        if word not in RECORDED:
            raise BuildFailed(f"the stand-in cannot execute {word}")
        return None

    def _from(self, rest: str) -> None:
        words = [word for word in self._expand(rest).split() if not word.startswith("--")]
        tag = words[0]
        if tag in self._named:
            earlier = self._named[tag]
            raise BuildFailed(f"the stand-in has no stage from the stage {tag} ({earlier.base.id})")
        if tag in self._bases:
            base = self._bases[tag]
        elif re.split("[:@]", tag)[0].removeprefix("docker.io/library/") in REGISTRY:
            base = BuiltImage(tag)
        else:
            raise BuildFailed(f"{tag}: pull access denied, repository does not exist or may require authorization")
        stage = Stage(base, env=dict(base.env), workdir=base.workdir)
        self._stages.append(stage)
        self._named[str(len(self._stages) - 1)] = stage
        if len(words) == 3:
            self._named[words[2]] = stage

    def _argument(self, rest: str) -> None:
        name, _, default = rest.partition("=")
        value = self._given.get(name, self._global.get(name, default.strip("\"'")))
        if self._stages:
            self._stages[-1].arguments[name] = value
        else:
            self._global[name] = value

    def _environment(self, rest: str) -> None:
        rest = self._expand(rest)
        if re.match(r"\w+=", rest):
            pairs = [word.partition("=")[::2] for word in shlex.split(rest)]
        else:
            pairs = [rest.partition(" ")[::2]]
        self._stages[-1].env.update(pairs)

    def _expand(self, text: str) -> str:
        stage = self._stages[-1] if self._stages else None
        values = {**self._global, **(stage.arguments if stage else {}), **(stage.env if stage else {})}
        return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda found: values.get(found[1] or found[2], ""), text)

    async def _box(self, stage: Stage) -> Sandbox:
        if stage.box is None:
            spec = SandboxSpec(
                environment=EnvironmentSpec(workdir=stage.workdir),
                labels={"run": "modal-standin"},
                snapshot=stage.base.content,
            )
            stage.box = await self._fleet.provider.create(spec)
        return stage.box

    async def _run(self, rest: str, *, cwd: str | None = None) -> None:
        stage = self._stages[-1]
        box = await self._box(stage)
        command: str | list[str] = json.loads(rest) if rest.startswith("[") else rest
        done = await box.exec(command, cwd=cwd or stage.workdir, env={**stage.arguments, **stage.env}, timeout=60)
        self._log.append((done.stdout + done.stderr).decode("utf-8", "replace"))
        if not done.ok:
            raise BuildFailed(f"RUN {rest} failed with exit code {done.exit_code}")

    async def _copy(self, rest: str) -> None:
        stage = self._stages[-1]
        box = await self._box(stage)
        words = shlex.split(self._expand(rest))
        flags = dict(word[2:].partition("=")[::2] for word in words if word.startswith("--"))
        *sources, target = [word for word in words if not word.startswith("--")]
        with tempfile.TemporaryDirectory(prefix="modal-copy-") as folder:
            for source in sources:
                if "from" in flags:
                    found = Path(folder) / "from" / PurePosixPath(source).name
                    await (await self._box(self._named[flags["from"]])).download(source, found)
                else:
                    found = self._context / source.strip("/")
                if not found.exists():
                    raise BuildFailed(f"COPY failed: file not found in build context: {source}")
                place = PurePosixPath(stage.workdir) / target
                if found.is_file() and (target.endswith(("/", ".")) or len(sources) > 1):
                    place /= found.name
                await box.upload(found, str(place))
                if "chmod" in flags:
                    await box.exec(["chmod", "-R", flags["chmod"], str(place)])

    async def close(self) -> None:
        for stage in self._stages:
            if stage.box is not None:
                await stage.box.close()


def instructions(commands: Sequence[str]) -> list[str]:
    """Dockerfile lines with continuations joined, without comments."""
    found: list[str] = []
    open_line = ""
    for command in commands:
        for line in command.splitlines():
            if line.strip().startswith("#") or not line.strip():
                continue
            open_line += line.strip()
            if open_line.endswith("\\"):
                open_line = open_line[:-1]
                continue
            found.append(open_line)
            open_line = ""
    return found
