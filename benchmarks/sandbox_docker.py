"""What our Docker sandbox costs beside the bare docker SDK, both in one run on one engine.

    python benchmarks/sandbox_docker.py [--image rl-harness-test-base] [--rounds 20]

Prints, for each operation, the median wall time and the processor time of this process, ours and the SDK's, taking
turns so that what else the machine does falls on both alike. Exits 1 when ours takes more than 1.1 times the SDK's
wall time (for a command: more than 5 ms on top), when a command through the helper inside takes more than 5 ms, when
starting from a snapshot takes more than 1.1 times a plain start, or when the first process of a container does not
react to SIGTERM. Skipped (exit 0) where no engine answers.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import resource
import shutil
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import docker
from docker.utils import kwargs_from_env
from rl_harness.contracts.sandbox import SandboxSpec
from rl_harness.sandboxes.resident import ResidentSandbox
from rl_harness_docker.options import DockerOptions
from rl_harness_docker.provider import DockerProvider
from rl_harness_docker.testing import BASE_IMAGE, make_base_image, unreachable

MOST = 1.1
MOST_ON_TOP = 5.0
MOST_HELPER = 5.0
HELPER = "command through the helper"
LARGE = 100 << 20
SMALL = 1 << 20
_IDLE = ["/bin/sh", "-c", "exec cat"]

Samples = dict[str, dict[str, list[tuple[float, float]]]]


def processor() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Clock:
    """Collects (wall, processor) milliseconds by operation and by who did it."""

    def __init__(self) -> None:
        self.samples: Samples = {}

    def add(self, operation: str, who: str, wall: float, used: float) -> None:
        self.samples.setdefault(operation, {}).setdefault(who, []).append((wall * 1e3, used * 1e3))

    def sdk(self, operation: str, work: Callable[[], Any]) -> Any:
        started, before = time.perf_counter(), processor()
        result = work()
        self.add(operation, "sdk", time.perf_counter() - started, processor() - before)
        return result

    async def ours(self, operation: str, work: Awaitable[Any], who: str = "ours") -> Any:
        started, before = time.perf_counter(), processor()
        result = await work
        self.add(operation, who, time.perf_counter() - started, processor() - before)
        return result

    def median(self, operation: str, who: str = "ours") -> tuple[float, float]:
        samples = self.samples[operation][who]
        return statistics.median(wall for wall, _ in samples), statistics.median(used for _, used in samples)


class Bare:
    """The same operations by the SDK alone, with the same security and no network."""

    def __init__(self, client: Any, image: str) -> None:
        self._client = client
        self._image = image

    def start(self, image: str | None = None) -> str:
        host = self._client.create_host_config(
            network_mode="none", init=True, cap_drop=["ALL"], security_opt=["no-new-privileges"], pids_limit=1024
        )
        made = self._client.create_container(
            image or self._image, _IDLE, stdin_open=True, host_config=host, working_dir="/app"
        )
        self._client.start(made["Id"])
        return str(made["Id"])

    def command(self, container: str) -> None:
        made = self._client.exec_create(container, ["echo", "hello"])
        output = self._client.exec_start(made["Id"], demux=True)
        assert output[0] == b"hello\n"
        assert self._client.exec_inspect(made["Id"])["ExitCode"] == 0

    def upload(self, container: str, file: Path) -> None:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            tar.add(file, file.name)
        assert self._client.put_archive(container, "/app", buffer.getvalue())

    def download(self, container: str, source: str, target: Path) -> None:
        parts, _ = self._client.get_archive(container, source)
        with tempfile.TemporaryFile() as file:
            file.writelines(parts)
            file.seek(0)
            with tarfile.open(fileobj=file) as tar:
                member = tar.extractfile(Path(source).name)
                assert member is not None
                with target.open("wb") as out:
                    shutil.copyfileobj(member, out)

    def commit(self, container: str) -> str:
        return str(self._client.commit(container)["Id"])

    def fork(self, container: str) -> tuple[str, str]:
        image = self.commit(container)
        return self.start(image), image

    def remove_image(self, image: str) -> None:
        self._client.remove_image(image, force=True)

    def remove(self, container: str) -> None:
        self._client.remove_container(container, force=True, v=True)


async def measure(provider: DockerProvider, bare: Bare, folder: Path, rounds: int) -> Clock:
    clock = Clock()
    small, large = folder / "small", folder / "large"
    small.write_bytes(os.urandom(SMALL))
    large.write_bytes(os.urandom(LARGE))
    spec = SandboxSpec(labels={"run": "benchmark"})

    async def cold() -> Any:
        sandbox = await provider.create(spec)
        assert (await sandbox.exec(["echo", "hello"])).stdout == b"hello\n"
        return sandbox

    def bare_cold() -> str:
        container = bare.start()
        bare.command(container)
        return container

    for number in range(rounds + 1):
        if number == 1:
            clock.samples.clear()  # the first round warms both up

        async def turn(operation: str, mine: Callable[[], Awaitable[Any]], other: Callable[[], Any], first: int) -> Any:
            theirs = clock.sdk(operation, other) if first % 2 else None
            result = await clock.ours(operation, mine())
            return result, theirs if first % 2 else clock.sdk(operation, other)

        sandbox, container = await turn("cold start to first command", cold, bare_cold, number)
        box, other = sandbox, container
        await turn("command", lambda b=box: b.exec(["echo", "hello"]), lambda c=other: bare.command(c), number)
        await turn(
            "upload of 1 MiB",
            lambda b=box: b.upload(small, "/app/small"),
            lambda c=other: bare.upload(c, small),
            number,
        )
        await turn(
            "upload of 100 MiB",
            lambda b=box: b.upload(large, "/app/large"),
            lambda c=other: bare.upload(c, large),
            number,
        )
        for size in ("small", "large"):
            (folder / "back").unlink(missing_ok=True)
            await turn(
                f"download of {'1' if size == 'small' else '100'} MiB",
                lambda b=box, n=size: b.download(f"/app/{n}", folder / "back"),
                lambda c=other, n=size: bare.download(c, f"/app/{n}", folder / "back"),
                number,
            )
        snapshot, image = await turn("snapshot", box.snapshot, lambda c=other: bare.commit(c), number)
        await provider.delete_snapshot(snapshot)
        bare.remove_image(image)
        (fork,), (copy, image) = await turn("fork", lambda b=box: b.fork(1), lambda c=other: bare.fork(c), number)
        await fork.close()
        bare.remove(copy)
        bare.remove_image(image)
        await turn("teardown", box.close, lambda c=other: bare.remove(c), number)
    return clock


async def measure_resident(provider: DockerProvider, clock: Clock, rounds: int) -> None:
    """The agent's commands, which go through the helper inside."""
    sandbox = await provider.create(SandboxSpec(labels={"run": "benchmark"}))
    try:
        resident = await clock.ours("start of the helper", ResidentSandbox.start(sandbox))
        for _ in range(rounds):
            await clock.ours(HELPER, resident.exec(["echo", "hello"]))
        await resident.resident.close()
    finally:
        await sandbox.close()


async def measure_snapshot(provider: DockerProvider, clock: Clock, rounds: int) -> None:
    parent = await provider.create(SandboxSpec(labels={"run": "benchmark"}))
    await parent.exec("head -c 20000000 /dev/urandom > data")
    snapshot = await parent.snapshot()
    await parent.close()
    try:
        for _ in range(rounds):
            for who, spec in (("ours", SandboxSpec(snapshot=snapshot)), ("plain", SandboxSpec())):
                sandbox = await clock.ours("start from a snapshot", provider.create(spec), who)
                await sandbox.close()
    finally:
        await provider.delete_snapshot(snapshot)


async def reacts(provider: DockerProvider, client: Any) -> bool:
    """Whether the first process of a container ends at SIGTERM, within a second."""
    sandbox = await provider.create(SandboxSpec())
    try:
        ended = asyncio.create_task(sandbox.died())
        await asyncio.sleep(0)
        client.kill(sandbox.container, "SIGTERM")  # type: ignore[attr-defined]  # a DockerSandbox
        await asyncio.wait_for(ended, 1.0)
    except TimeoutError:
        return False
    finally:
        await sandbox.close()
    return True


def report(clock: Clock) -> bool:
    fine = True
    print(f"{'milliseconds, wall/processor':32} {'ours':>16} {'docker SDK':>16} {'ratio':>7}")
    for operation, by in clock.samples.items():
        wall, used = clock.median(operation)
        other = next((who for who in by if who != "ours"), None)
        line = f"{operation:32} {wall:9.1f}/{used:6.2f}"
        if other is not None:
            bare_wall, bare_used = clock.median(operation, other)
            ratio = wall / bare_wall
            within = ratio <= MOST or (operation == "command" and wall - bare_wall <= MOST_ON_TOP)
            fine = fine and within
            label = "" if other == "sdk" else f"  beside a {other} start"
            line += f" {bare_wall:9.1f}/{bare_used:6.2f} {ratio:7.2f}{label}{'' if within else '  TOO SLOW'}"
        print(line)
    helper = clock.median(HELPER)[0]
    if helper > MOST_HELPER:
        print(f"{HELPER}: more than {MOST_HELPER:g} ms, TOO SLOW")
    return fine and helper <= MOST_HELPER


async def run(image: str, rounds: int) -> int:
    client = docker.APIClient(**kwargs_from_env(), timeout=60)
    provider = DockerProvider(DockerOptions(image=image))
    try:
        await provider.preflight()
        with tempfile.TemporaryDirectory() as folder:
            clock = await measure(provider, Bare(client, image), Path(folder), rounds)
        await measure_resident(provider, clock, rounds)
        await measure_snapshot(provider, clock, rounds)
        fine = report(clock)
        first = await reacts(provider, client)
        print(f"the first process of a container {'ends' if first else 'DOES NOT END'} at SIGTERM")
    finally:
        await provider.close()
        client.close()
    return 0 if fine and first else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--image", default=BASE_IMAGE)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    if reason := unreachable():
        print(f"skipped: {reason}")
        return 0
    if arguments.image == BASE_IMAGE:
        make_base_image()
    return asyncio.run(run(arguments.image, arguments.rounds))


if __name__ == "__main__":
    sys.exit(main())
