"""Our own sandbox, as an agent has it: the first command takes the engine's way, and the helper inside has the others
once it runs."""

from __future__ import annotations

import os
from pathlib import Path

from measure import Client, main
from rl_harness.contracts import Sandbox, SandboxSpec
from rl_harness.sandboxes.resident import ResidentSandbox
from rl_harness_docker.options import DockerOptions
from rl_harness_docker.provider import DockerProvider


class RlHarness(Client):
    provider = DockerProvider(DockerOptions(image=os.environ["IMAGE"]))

    async def start(self) -> None:
        self.sandbox: Sandbox = await self.provider.create(SandboxSpec())

    async def ready(self) -> None:
        self.sandbox = await ResidentSandbox.start(self.sandbox)

    async def echo(self) -> str:
        return (await self.sandbox.exec(["echo", "hello"])).stdout.decode().strip()

    async def upload(self, file: Path) -> None:
        await self.sandbox.upload(file, f"/app/{file.name}")

    async def stop(self) -> None:
        await self.sandbox.close()

    @classmethod
    async def finish(cls) -> None:
        await cls.provider.close()


if __name__ == "__main__":
    main(RlHarness)
