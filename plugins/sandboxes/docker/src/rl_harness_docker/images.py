"""Images: found, pulled, or built from a task's Dockerfile once for each content, whoever asks at the same time."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import re
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import docker.auth  # type: ignore[import-untyped]  # the SDK has no types
from docker.utils.build import PatternMatcher, create_archive, exclude_paths  # type: ignore[import-untyped]
from rl_harness.contracts.sandbox import EnvironmentSpec
from rl_harness.errors import SandboxError, TaskError
from rl_harness.sandboxes.remote import private_folder

from rl_harness_docker.containers import labels
from rl_harness_docker.dockerfile import base_images, check_image
from rl_harness_docker.engine import Engine, EngineError
from rl_harness_docker.files import read_text
from rl_harness_docker.options import DockerOptions

BUILT = "rl-harness-build"
_SHOWN_LINES = 40
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # the engine paints what goes to stderr
_PULL_TIMEOUT = 3600.0
_ONE = r"(?:[^\]\\-]|\\.)"  # a character in brackets
_PATTERN = re.compile(rf"(?:[^\[\\]|\\.|\[\^?(?:{_ONE}(?:-{_ONE})?)+\])*")


class Images:
    """The images of one provider. What was found or built once is not asked for again."""

    def __init__(self, engine: Engine, options: DockerOptions, owner: str) -> None:
        self._engine = engine
        self._options = options
        self._owner = owner
        self._running: dict[str, asyncio.Task[Any]] = {}

    async def ready(self, environment: EnvironmentSpec) -> dict[str, Any]:
        """What the engine says of the environment's image, which is pulled or built when it is missing."""
        if environment.dockerfile is not None:
            context = context_of(environment.dockerfile, environment)
            return await self.built(
                context, environment.dockerfile, self._options.build_args, environment.build_timeout
            )
        return await self.found(environment.image or self._options.image)

    async def found(self, name: str) -> dict[str, Any]:
        """The image of this name, pulled as the options say. Checked first: the name is part of the request."""
        check_image(name, "image")
        return dict(await self._once(f"image {name}", lambda: self._find(name)))

    async def built(
        self, context: Path, dockerfile: Path, build_args: Mapping[str, str], timeout: float, target: str = ""
    ) -> dict[str, Any]:
        key = f"build {context} {dockerfile} {sorted(build_args.items())} {target}"
        return dict(await self._once(key, lambda: self._build(context, dockerfile, build_args, timeout, target)))

    async def bases(self, dockerfile: Path, build_args: Mapping[str, str]) -> dict[str, str]:
        """The content of each image that a Dockerfile builds on, by the name it uses."""
        names = base_images(dockerfile, build_args)
        images = await asyncio.gather(*(self.found(name) for name in names))
        return {name: image["Id"] for name, image in zip(names, images, strict=True)}

    def forget(self) -> None:
        """Ask again: an image has gone that was there."""
        self._running = {key: task for key, task in self._running.items() if not task.done()}

    async def _once(self, key: str, work: Callable[[], Awaitable[Any]]) -> Any:
        """The result of ``work``, done once however many wait for it; a failure is not kept. It is cancelled when
        nobody waits any more."""
        task = self._running.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._running[key] = asyncio.ensure_future(work())
            task.waiting = 0  # type: ignore[attr-defined]
        task.waiting += 1  # type: ignore[attr-defined]
        try:
            return await asyncio.shield(task)
        finally:
            task.waiting -= 1  # type: ignore[attr-defined]
            if not task.waiting and not task.done():  # type: ignore[attr-defined]
                task.cancel()

    async def _find(self, name: str) -> Any:
        policy = self._options.pull
        if policy != "always" or name.startswith("sha256:"):
            try:
                return await self._engine.request("GET", f"/images/{name}/json")
            except EngineError as error:
                if error.status != 404:
                    raise
        if policy == "never" or name.startswith("sha256:"):
            raise SandboxError(
                f"image {name}: the engine does not have it",
                remedy="build or load it there, or -o sandbox.pull=missing",
            )
        await self._pull(name)
        return await self._engine.request("GET", f"/images/{name}/json")

    async def _pull(self, name: str) -> None:
        repository, tag = _split(name)
        params = {"fromImage": repository, "tag": tag}
        if self._options.platform:
            params["platform"] = self._options.platform
        registry, _ = docker.auth.resolve_repository_name(repository)
        config = await asyncio.to_thread(docker.auth.load_config)
        login = config.resolve_authconfig(registry)
        headers = {"X-Registry-Auth": docker.auth.encode_header(login).decode()} if login else {}
        try:
            async with asyncio.timeout(_PULL_TIMEOUT):
                async with self._engine.stream("POST", "/images/create", params=params, headers=headers) as response:
                    async for line in _lines(response.content):
                        if "error" in line:
                            raise EngineError(str(line["error"]))
        except EngineError as error:
            remedy = "check its name; a private registry needs: docker login"
            if name == self._options.image and "image" not in self._options.model_fields_set:
                remedy = (
                    "tasks without an image of their own get this one; name another that the engine has, or can pull, "
                    "with -o sandbox.image=IMAGE"
                )
            raise SandboxError(f"image {name}: cannot be pulled: {error.message}", remedy=remedy) from None

    async def _build(
        self, context: Path, dockerfile: Path, build_args: Mapping[str, str], timeout: float, target: str
    ) -> Any:
        bases = await self.bases(dockerfile, build_args)
        files = await asyncio.to_thread(_context_files, context, dockerfile)
        more = [_text(dockerfile), bases, dict(build_args), self._options.platform, target]
        digest = await asyncio.to_thread(_digest, context, files, more)
        name = f"{BUILT}:{digest[:32]}"
        async with _between_processes(digest):
            with contextlib.suppress(EngineError):
                # Named again, because the engine notes when that was: so long ago it was last used.
                tag = {"repo": BUILT, "tag": digest[:32]}
                await self._engine.request("POST", f"/images/{name}/tag", params=tag)
                return await self._engine.request("GET", f"/images/{name}/json")
            try:
                async with asyncio.timeout(timeout):
                    await self._run_build(context, dockerfile, files, name, build_args, target)
            except TimeoutError:
                raise SandboxError(
                    f"{dockerfile}: not built within {timeout:g} s", remedy="raise [environment] build_timeout_sec"
                ) from None
        return await self._engine.request("GET", f"/images/{name}/json")

    async def _run_build(
        self,
        context: Path,
        dockerfile: Path,
        files: list[str],
        name: str,
        build_args: Mapping[str, str],
        target: str,
    ) -> None:
        with tempfile.TemporaryFile() as archive:
            await asyncio.to_thread(create_archive, str(context), files=files, fileobj=archive)
            archive.seek(0)
            config = await asyncio.to_thread(docker.auth.load_config)
            params: dict[str, str | int | bool] = {
                "dockerfile": str(dockerfile.relative_to(context)),
                "t": name,
                "rm": 1,
                "forcerm": 1,
                "buildargs": json.dumps(dict(build_args)),
                "labels": json.dumps(labels("build", self._owner, {"context": str(context)})),
            }
            if self._options.platform:
                params["platform"] = self._options.platform
            if target:
                params["target"] = target
            headers = {"Content-Type": "application/x-tar"}
            if logins := config.get_all_credentials():
                headers["X-Registry-Config"] = docker.auth.encode_header(logins).decode()
            output: list[str] = []
            try:
                async with self._engine.stream(
                    "POST", "/build", params=params, headers=headers, data=archive
                ) as response:
                    async for line in _lines(response.content):
                        output.append(str(line.get("stream", "")))
                        if "error" in line:
                            raise EngineError(str(line["error"]))
            except EngineError as error:
                raise _build_failed(dockerfile, error, output) from None


def _build_failed(dockerfile: Path, error: EngineError, output: list[str]) -> SandboxError:
    lines = _COLOURS.sub("", "".join(output)).splitlines()
    shown = [line.rstrip() for line in lines if line.strip()][-_SHOWN_LINES:]
    remedy = None
    if "requires BuildKit" in error.message:
        remedy = "write it without --mount and here-documents, or build the image yourself and name it as docker_image"
    text = "".join(f"\n  | {line}" for line in shown)
    return SandboxError(f"{dockerfile}: the engine cannot build it: {error.message}{text}", remedy=remedy)


def _text(dockerfile: Path) -> str:
    return dockerfile.read_text("utf-8")


def _split(name: str) -> tuple[str, str]:
    """Repository and tag, or digest; ``latest`` where there is neither."""
    if "@" in name:
        repository, _, digest = name.partition("@")
        return repository, digest
    repository, colon, tag = name.rpartition(":")
    return (repository, tag) if colon and "/" not in tag else (name, "latest")


def context_of(dockerfile: Path, environment: EnvironmentSpec) -> Path:
    """The folder that the agent's image is built from."""
    folder = environment.directory
    return folder if folder is not None and dockerfile.is_relative_to(folder) else dockerfile.parent


def _context_files(context: Path, dockerfile: Path) -> list[str]:
    """What is sent to the engine: the context without what ``.dockerignore`` leaves out. Both files themselves are sent
    in any case, and what of them is left out is so by the engine."""
    patterns = ignored(context)
    return sorted(exclude_paths(str(context), patterns, dockerfile=str(dockerfile.relative_to(context))))


def ignored(context: Path) -> list[str]:
    """The patterns of ``.dockerignore``. Raises TaskError naming the file, and the line of what is no pattern."""
    file = context / ".dockerignore"
    if not os.path.lexists(file):
        return []
    patterns = []
    for number, line in enumerate(read_text(file).splitlines(), 1):
        pattern = line.strip()
        if not pattern or line.startswith("#"):
            continue
        try:
            if not _PATTERN.fullmatch(pattern):
                raise ValueError("a bracket or backslash in it is left open")
            PatternMatcher([pattern]).matches("x")
        except (ValueError, IndexError, re.error) as error:
            raise TaskError(f"{file}:{number}: {pattern!r:.80} is no pattern: {error}") from None
        patterns.append(pattern)
    return [*patterns, "!.dockerignore"] if patterns else []


def _digest(context: Path, files: list[str], more: list[Any]) -> str:
    total = hashlib.sha256()
    for item in more:
        total.update(hashlib.sha256(json.dumps(item, sort_keys=True).encode()).digest())
    for name in files:
        path = context / name
        status = path.lstat()
        total.update(f"{len(name)} {name} {status.st_mode:o} ".encode("utf-8", "surrogateescape"))
        if path.is_symlink():
            total.update(os.fsencode(path.readlink()) + b"\0")
        elif path.is_file():
            with path.open("rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
        elif not path.is_dir():
            raise TaskError(f"{path}: a device, socket or FIFO cannot be part of an image")
    return total.hexdigest()


@contextlib.asynccontextmanager
async def _between_processes(key: str) -> AsyncIterator[None]:
    """Held by one process of this machine at a time."""
    folder = Path(tempfile.gettempdir()) / f"rl-harness-docker-{os.geteuid()}"
    try:
        path = private_folder(folder) / f"{key[:2]}.lock"  # of a bounded number, as none can be removed safely
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise SandboxError(
            f"no lock for building images: {error.filename}: {error.strerror}",
            remedy="remove it, or set TMPDIR to a folder of your own",
        ) from None
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


async def _lines(content: Any) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a stream, one a line however long."""
    buffer = b""
    async for chunk in content.iter_any():
        buffer += chunk
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            if line.strip():
                yield json.loads(line)
    if buffer.strip():
        yield json.loads(buffer)
