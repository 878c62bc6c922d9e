"""Checks of creating, closing, cancelling, listing, reaping."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rl_harness.contracts.sandbox import NetworkPolicy
from rl_harness.errors import SandboxError, Unsupported
from rl_harness.testing.sandbox.files import refused
from rl_harness.testing.sandbox.kit import WORKDIR, Checks, Context, equal, succeeded, until

checks = Checks()


@checks.check
async def preflight_passes(context: Context) -> None:
    await context.provider.preflight()


@checks.check
async def sandboxes_do_not_share_files(context: Context) -> None:
    first, second = await context.sandbox(), await context.sandbox()
    assert first.id != second.id
    await first.write_file(f"{WORKDIR}/mine", b"1")
    await refused(second.read_file(f"{WORKDIR}/mine"), FileNotFoundError, "another sandbox's file")


@checks.check
async def a_closed_sandbox_says_so(context: Context) -> None:
    sandbox = await context.sandbox()
    assert await sandbox.alive()
    await sandbox.close()
    await sandbox.close()
    assert not await sandbox.alive()
    await refused(sandbox.exec("true"), SandboxError, "exec after close")
    await refused(sandbox.spawn("true"), SandboxError, "spawn after close")
    await refused(sandbox.read_file(f"{WORKDIR}/x"), SandboxError, "read_file after close")
    await refused(sandbox.write_file(f"{WORKDIR}/x", b""), SandboxError, "write_file after close")
    await refused(sandbox.kill_processes(), SandboxError, "kill_processes after close")
    await refused(sandbox.download(WORKDIR, context.folder / "x"), SandboxError, "download after close")
    await refused(sandbox.upload(context.folder, WORKDIR), SandboxError, "upload after close")


@checks.check
async def closing_ends_running_commands(context: Context) -> None:
    sandbox = await context.sandbox()
    running = asyncio.create_task(sandbox.exec("echo started > file; sleep 600"))

    async def started() -> bool:
        try:
            return await sandbox.read_file(f"{WORKDIR}/file") == b"started\n"
        except FileNotFoundError:
            return False

    await until(started, "the command runs")
    await sandbox.close()
    async with asyncio.timeout(30):
        try:
            result = await running
        except SandboxError:
            return
    assert not result.ok, "the command claims to have succeeded"


@checks.check
async def list_finds_by_labels(context: Context) -> None:
    sandbox = await context.sandbox(labels={**context.labels, "episode": "e1"})
    other = await context.sandbox(labels={**context.labels, "episode": "e2"})
    found = {info.id: info for info in await context.provider.list(context.labels)}
    equal(set(found), {sandbox.id, other.id}, "sandboxes of the run")
    equal(dict(found[sandbox.id].labels), {**context.labels, "episode": "e1"}, "labels")
    assert found[sandbox.id].owner_alive
    assert found[sandbox.id].created_at > 0
    equal([info.id for info in await context.provider.list({"episode": "e2", **context.labels})], [other.id])
    await sandbox.close()
    equal([info.id for info in await context.provider.list(context.labels)], [other.id], "after close")


@checks.check
async def reaping_spares_the_living_unless_forced(context: Context) -> None:
    sandbox = await context.sandbox()
    equal(await context.provider.reap(context.labels), 0, "reaped")
    equal(succeeded(await sandbox.exec("echo fine")), b"fine\n")
    equal(await context.provider.reap(context.labels, force=True), 1, "reaped by force")
    equal(await context.provider.list(context.labels), [], "left")


@checks.check
async def cancelling_create_leaves_nothing(context: Context) -> None:
    for delay in (0, 0.001, 0.004, 0.008, 0.016):
        creating = asyncio.create_task(context.provider.create(context.spec()))
        await asyncio.sleep(delay)
        creating.cancel()
        await asyncio.wait([creating])
        if not creating.cancelled():
            await creating.result().close()

    async def gone() -> bool:
        return not await context.provider.list(context.labels)

    await until(gone, "no sandbox is left")


@checks.check
async def cancelling_close_still_closes(context: Context) -> None:
    sandbox = await context.sandbox()
    closing = asyncio.create_task(sandbox.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])

    async def gone() -> bool:
        return not await context.provider.list(context.labels)

    await until(gone, "the sandbox is gone")
    await sandbox.close()


@checks.check
async def what_cannot_be_honoured_is_refused(context: Context) -> None:
    capabilities = context.provider.capabilities
    environment = type(context.spec().environment)
    if not capabilities.dockerfile:
        spec = context.spec(environment=environment(dockerfile=Path("Dockerfile")))
        await refused(context.provider.create(spec), Unsupported, "a Dockerfile")
    if not capabilities.image:
        spec = context.spec(environment=environment(image="python:3.12"))
        await refused(context.provider.create(spec), Unsupported, "an image")
    for policy in NetworkPolicy:
        if policy not in capabilities.network:
            await refused(context.provider.create(context.spec(network=policy)), Unsupported, f"network {policy}")
    for name in ("memory", "pids", "cpus", "disk"):
        if name not in capabilities.limits:
            limits = type(context.spec().limits)(**{name: 1 << 30})
            await refused(context.provider.create(context.spec(limits=limits)), Unsupported, f"a limit on {name}")
