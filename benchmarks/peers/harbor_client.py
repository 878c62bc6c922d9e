"""Harbor: docker compose for each environment."""

from __future__ import annotations

import logging
import os
import tempfile
import uuid
from pathlib import Path

from harbor.environments.docker.docker import DockerEnvironment
from harbor.models.task.config import EnvironmentConfig
from harbor.models.trial.paths import TrialPaths
from measure import Client, main


class Harbor(Client):
    async def start(self) -> None:
        logging.disable(logging.CRITICAL)
        folder = Path(tempfile.mkdtemp())
        (folder / "environment").mkdir()
        paths = TrialPaths(folder / "trial")
        paths.mkdir()
        self.environment = DockerEnvironment(
            environment_dir=folder / "environment",
            environment_name="benchmark",
            session_id=f"benchmark-{uuid.uuid4().hex[:8]}",
            trial_paths=paths,
            task_env_config=EnvironmentConfig(docker_image=os.environ["IMAGE"]),
        )
        await self.environment.start(force_build=False)

    async def ready(self) -> None:
        pass

    async def echo(self) -> str:
        return (await self.environment.exec("echo hello")).stdout.strip()

    async def upload(self, file: Path) -> None:
        await self.environment.upload_file(file, f"/tmp/{file.name}")

    async def stop(self) -> None:
        await self.environment.stop(delete=True)


if __name__ == "__main__":
    main(Harbor)
