"""Inspect AI: docker compose for each sandbox."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from inspect_ai.util._concurrency import init_concurrency
from inspect_ai.util._sandbox.docker.cleanup import project_cleanup_startup
from inspect_ai.util._sandbox.docker.docker import DockerSandboxEnvironment
from inspect_ai.util._subprocess import init_max_subprocesses
from measure import Client, main

FOLDER = Path(tempfile.mkdtemp())
COMPOSE = FOLDER / "compose.yaml"


def content(file: Path) -> bytes:
    return file.read_bytes()


class Inspect(Client):
    async def start(self) -> None:
        if not COMPOSE.exists():
            COMPOSE.write_text(
                f"services:\n  default:\n    image: {os.environ['IMAGE']}\n    x-local: true\n    init: true\n"
                "    command: tail -f /dev/null\n    network_mode: none\n    working_dir: /app\n"
            )
            init_concurrency()
            init_max_subprocesses()
            project_cleanup_startup()
        self.environments = await DockerSandboxEnvironment.sample_init("benchmark", str(COMPOSE), {})
        self.sandbox = self.environments["default"]

    async def ready(self) -> None:
        pass

    async def echo(self) -> str:
        return (await self.sandbox.exec(["echo", "hello"])).stdout.strip()

    async def upload(self, file: Path) -> None:
        await self.sandbox.write_file(f"/app/{file.name}", content(file))

    async def stop(self) -> None:
        await DockerSandboxEnvironment.sample_cleanup("benchmark", str(COMPOSE), self.environments, False)


if __name__ == "__main__":
    main(Inspect)
