"""SWE-ReX: a server inside the container, reached through a published port."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from measure import Client, main
from swerex.deployment.docker import DockerDeployment
from swerex.runtime.abstract import Command, UploadRequest


class SweRex(Client):
    async def start(self) -> None:
        logging.disable(logging.CRITICAL)
        self.deployment = DockerDeployment(image=os.environ["IMAGE"], pull="never")
        await self.deployment.start()

    async def ready(self) -> None:
        pass

    async def echo(self) -> str:
        response = await self.deployment.runtime.execute(Command(command=["echo", "hello"]))
        return response.stdout.strip()

    async def upload(self, file: Path) -> None:
        await self.deployment.runtime.upload(UploadRequest(source_path=str(file), target_path=f"/tmp/{file.name}"))

    async def stop(self) -> None:
        await self.deployment.stop()


if __name__ == "__main__":
    main(SweRex)
