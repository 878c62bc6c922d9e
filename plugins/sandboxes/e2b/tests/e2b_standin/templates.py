"""Templates and snapshots, which E2B keeps alike: builds are really executed in a machine whose files become one."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import re
import secrets
import tarfile
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from rl_harness.contracts.sandbox import EnvironmentSpec, Sandbox, SandboxSpec

from e2b_standin.machines import TEAM, ApiError, Content, Fleet

REGISTRY = ("debian", "python", "ubuntu", "e2bdev/base")  # all of them are this machine's own system files
NAME = re.compile(r"[a-z0-9_-]+")


class BuildFailed(Exception):
    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


@dataclasses.dataclass
class Build:
    id: str
    cpus: int
    memory: int
    limited: bool
    created_at: float
    status: str = "waiting"
    reason: str = ""
    step: int = 0
    log: list[str] = dataclasses.field(default_factory=list)
    task: asyncio.Task[None] | None = None
    definition: Mapping[str, Any] | None = None


@dataclasses.dataclass
class Template:
    id: str
    name: str
    snapshot_of: str = ""
    content: Content | None = None
    created_at: float = 0.0
    builds: list[Build] = dataclasses.field(default_factory=list)

    @property
    def reference(self) -> str:
        return f"{TEAM}/{self.name}:default" if self.name else f"{self.id}:default"


class Templates:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._known: dict[str, Template] = {}
        self.uploads: dict[str, bytes] = {}
        self.filesystem_snapshots = True
        self.reset()

    def reset(self) -> None:
        for template in self._known.values():
            for build in template.builds:
                if build.task is not None:
                    build.task.cancel()
        self._known = {"base": Template("base-template", "base", content=Content())}

    def find(self, reference: str) -> Template:
        """By ``id``, ``name`` or ``team/name``, with or without a tag."""
        identifier, _, tag = reference.partition(":")
        team, _, name = identifier.rpartition("/")
        if not NAME.fullmatch(name) or (team and not NAME.fullmatch(team)):
            raise ApiError(400, f"Invalid template reference: invalid template ID: {reference}")
        for template in self._known.values():
            if name in (template.id, template.name) and team in ("", TEAM) and tag in ("", "default"):
                return template
        raise ApiError(404, f"template '{reference}' not found")

    def content(self, reference: str) -> tuple[Template, Content]:
        template = self.find(reference)
        if template.content is None:
            raise ApiError(400, f"template '{reference}' has no ready build")
        return template, template.content

    def snapshots(self) -> list[Template]:
        found = [template for template in self._known.values() if template.snapshot_of]
        return sorted(found, key=lambda template: template.created_at, reverse=True)

    def names(self) -> list[str]:
        return list(self._known)

    async def snapshot(self, sandbox: str, name: str | None, *, memory: bool) -> Template:
        if not memory and not self.filesystem_snapshots:
            raise ApiError(400, "filesystem-only snapshots are not enabled", "snapshot_filesystem_only_disabled")
        machine = self._fleet.get(sandbox)
        if machine.state != "running":
            raise ApiError(409, f"Sandbox '{sandbox}' cannot be snapshotted while in '{machine.state}' state")
        if name is not None and not NAME.fullmatch(name):
            raise ApiError(400, f"Invalid name: invalid template ID: {name}")
        files = await machine.freeze()
        template = Template(
            secrets.token_hex(10),
            name or "",
            snapshot_of=sandbox,
            content=dataclasses.replace(machine.content, files=files),
            created_at=time.time(),
        )
        self._known[template.name or template.id] = template
        return template

    def delete(self, reference: str) -> None:
        template = self.find(reference)
        for machine in self._fleet.machines.values():
            if machine.base == template.id and machine.state != "ended":
                raise ApiError(
                    400, f"cannot delete template '{template.id}' because there are {machine.state} sandboxes using it"
                )
        self._known.pop(template.name or template.id)

    # ----------------------------------------------------------------------------------------------------- builds

    def request(self, name: str, cpus: int | None, memory: int | None) -> tuple[Template, Build]:
        if not NAME.fullmatch(name):
            raise ApiError(400, f"Invalid name: invalid template ID: {name}")
        if memory is not None and (memory % 2 or memory < 128):
            raise ApiError(400, f"Memory must be an even number of at least 128 MiB, not {memory}")
        template = self._known.setdefault(name, Template(secrets.token_hex(10), name, created_at=time.time()))
        build = Build(str(uuid.uuid4()), cpus or 2, memory or 512, cpus is not None or memory is not None, time.time())
        template.builds.append(build)
        return template, build

    def build(self, reference: str, build_id: str) -> tuple[Template, Build]:
        template = self.find(reference)
        for build in template.builds:
            if build.id == build_id:
                return template, build
        raise ApiError(404, f"build '{build_id}' not found")

    def start(self, reference: str, build_id: str, definition: Mapping[str, Any]) -> None:
        template, build = self.build(reference, build_id)
        build.status = "building"
        build.definition = definition
        build.task = asyncio.create_task(self._run(template, build, definition))

    async def _run(self, template: Template, build: Build, definition: Mapping[str, Any]) -> None:
        try:
            content = self._base(definition)
            template.content = await Recipe(self._fleet, self.uploads, content, build).run(definition.get("steps", []))
            build.status = "ready"
        except BuildFailed as error:
            build.status, build.reason, build.step = "error", str(error), error.step
        except ApiError as error:
            build.status, build.reason = "error", error.message
        except Exception as error:
            build.status, build.reason = "error", f"{type(error).__name__}: {error}"
            raise

    def _base(self, definition: Mapping[str, Any]) -> Content:
        if "fromTemplate" in definition:
            return self.content(definition["fromTemplate"])[1]
        image = definition["fromImage"]
        if re.split("[:@]", image)[0].removeprefix("docker.io/library/") not in REGISTRY:
            raise BuildFailed(f"failed to pull image '{image}': repository does not exist or requires a login", 0)
        return Content()


class Recipe:
    """One build, in a machine of its own."""

    def __init__(self, fleet: Fleet, uploads: Mapping[str, bytes], base: Content, build: Build) -> None:
        self._fleet = fleet
        self._uploads = uploads
        self._base = base
        self._build = build
        self._env = dict(base.env)
        self._workdir = "/"
        self._box: Sandbox | None = None

    async def run(self, steps: list[Mapping[str, Any]]) -> Content:
        spec = SandboxSpec(
            environment=EnvironmentSpec(workdir="/"), labels={"run": "e2b-standin"}, snapshot=self._base.files
        )
        box = self._box = await self._fleet.provider.create(spec)
        try:
            for number, step in enumerate(steps, 1):
                self._build.log.append(f"[{number}/{len(steps)}] {step['type']} {' '.join(step['args'])}")
                await self._step(number, step["type"], step["args"], step.get("filesHash", ""))
            files = await box.snapshot(labels={"run": "e2b-standin"})
        finally:
            await box.close()
        build = self._build
        return Content(files, self._env, self._workdir, build.cpus, build.memory, build.limited or self._base.limited)

    async def _step(self, number: int, kind: str, args: list[str], uploaded: str) -> None:
        if kind == "RUN":
            await self._execute(number, ["/bin/bash", "-l", "-c", args[0]])
        elif kind == "ENV":
            values = [await self._expanded(value) for value in args[1::2]]
            self._env.update(zip(args[::2], values, strict=True))
        elif kind == "WORKDIR":
            self._workdir = str(PurePosixPath(self._workdir) / await self._expanded(args[0]))
            await self._execute(number, ["mkdir", "-p", self._workdir], cwd="/")
        elif kind == "COPY":
            await self._copy(number, args, uploaded)
        elif kind != "USER":
            raise BuildFailed(f"the stand-in cannot execute {kind}", number)

    async def _expanded(self, word: str) -> str:
        assert self._box is not None
        if "$" not in word:
            return word
        for special in ("\\", '"', "`", "$("):
            word = word.replace(special, f"\\{special}")
        done = await self._box.exec(["/bin/sh", "-c", f'printf %s "{word}"'], cwd="/", env=self._env)
        return done.stdout.decode()

    async def _execute(self, number: int, argv: list[str], cwd: str | None = None) -> None:
        assert self._box is not None
        done = await self._box.exec(argv, cwd=cwd or self._workdir, env=self._env, timeout=60)
        self._build.log += (done.stdout + done.stderr).decode("utf-8", "replace").splitlines()
        if not done.ok:
            raise BuildFailed(f"failed to run command '{argv[-1]}': exit status {done.exit_code}", number)

    async def _copy(self, number: int, args: list[str], uploaded: str) -> None:
        assert self._box is not None
        source, target, _, mode = args
        if uploaded not in self._uploads:
            raise BuildFailed(f"files of '{source}' were not uploaded", number)
        place = PurePosixPath(self._workdir) / await self._expanded(target)
        with tempfile.TemporaryDirectory(prefix="e2b-copy-") as folder:
            with tarfile.open(fileobj=io.BytesIO(self._uploads[uploaded])) as archive:
                if strange := [item.name for item in archive if not _plain(item)]:
                    raise BuildFailed(f"the upload of '{source}' holds {strange[0]!r}", number)
                archive.extractall(folder)  # filters came with Python 3.11.4
            found = Path(folder) / source.strip("/")
            if not found.exists():
                raise BuildFailed(f"COPY failed: '{source}' is not in the build context", number)
            if found.is_file() and target.endswith(("/", ".")):
                place /= found.name
            entries = [found] if found.is_file() else list(found.iterdir())
            for entry in entries:
                await self._box.upload(entry, str(place if found.is_file() else place / entry.name))
        if mode:
            await self._box.exec(["chmod", "-R", mode, str(place)])


def _plain(item: tarfile.TarInfo) -> bool:
    path = PurePosixPath(item.name)
    inside = not path.is_absolute() and ".." not in path.parts
    return inside and (item.isreg() or item.isdir() or (item.issym() and not item.linkname.startswith("/")))
