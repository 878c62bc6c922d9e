"""Checks of creating, closing, cancelling, listing, reaping."""

from __future__ import annotations

import asyncio
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path

from rl_harness.contracts.sandbox import (
    EnvironmentSpec,
    ExecResult,
    HostMount,
    Limits,
    NetworkPolicy,
    Sandbox,
    SandboxSpec,
)
from rl_harness.errors import SandboxError, Unsupported
from rl_harness.testing.sandbox.kit import (
    WORKDIR,
    Checks,
    Context,
    cancelled_midway,
    equal,
    not_given,
    not_isolated,
    refused,
    size,
    succeeded,
    until,
    within,
    without,
)

#: A death is to be noticed within a second. That is wall time, of which everything else on the machine takes its part:
#: a machine that is busy is given five.
NOTICE_SECONDS = 5.0
KILLS = 3

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
    if context.provider.capabilities.changes:
        await refused(sandbox.changes(), SandboxError, "changes after close")
    await refused(sandbox.download(WORKDIR, context.folder / "x"), SandboxError, "download after close")
    await refused(sandbox.upload(context.folder, WORKDIR), SandboxError, "upload after close")


@checks.check
async def closing_at_once_from_many_sides_is_closing(context: Context) -> None:
    sandbox = await context.sandbox()
    async with within("many calls of close end"):
        await asyncio.gather(*(sandbox.close() for _ in range(5)))
    equal(await context.provider.list(context.labels), [], "sandboxes left")


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
    process = await sandbox.spawn("sleep 600")
    await sandbox.close()
    async with within("commands end when their sandbox is closed"):
        await refused_or_failed(running)
        await refused_or_failed(process.wait())


async def refused_or_failed(command: Awaitable[ExecResult | int]) -> None:
    """What a command may come to whose sandbox is closed under it."""
    try:
        result = await command
    except SandboxError:
        return
    assert not (result == 0 if isinstance(result, int) else result.ok), "a command claims to have succeeded"


@checks.check
async def the_living_are_alive_and_have_not_died(context: Context) -> None:
    sandbox = await context.sandbox()
    dying = asyncio.create_task(sandbox.died())
    try:
        succeeded(await sandbox.exec("sh -c 'kill -KILL $$'; sleep 1"))
        await sandbox.kill_processes()
        assert await sandbox.alive()
        assert not dying.done(), f"told to be dead: {dying}"
    finally:
        dying.cancel()
        await asyncio.wait([dying])


async def noticed(sandbox: Sandbox, dying: asyncio.Task[str], since: float) -> None:
    """Whoever waits for the death of a sandbox is told; and nothing works any more, or hangs."""
    async with within("a command of a dead sandbox ends"):
        await refused(sandbox.exec("true"), SandboxError, "exec in a dead sandbox")
    async with within("the death is noticed"):
        reason = await dying
    assert reason, "no reason was given"
    seconds = time.monotonic() - since
    assert seconds < NOTICE_SECONDS, f"noticed after {seconds:.1f} s"
    equal(await sandbox.alive(), False, "alive")
    async with within("waiting for the death of a dead sandbox"):
        assert await sandbox.died()
    async with within("files of a dead sandbox"):
        await refused(sandbox.read_file(f"{WORKDIR}/x"), SandboxError, "read_file in a dead sandbox")
        await refused(sandbox.write_file(f"{WORKDIR}/x", b""), SandboxError, "write_file in a dead sandbox")
    async with within("a dead sandbox is closed"):
        await sandbox.close()


@checks.check_if(not_given("crash"))
async def a_crash_is_noticed(context: Context) -> None:
    assert context.rig.crash is not None
    sandbox = await context.sandbox()
    dying = asyncio.create_task(sandbox.died())
    running = asyncio.create_task(sandbox.exec("sleep 600", timeout=900))
    await asyncio.sleep(0.1)
    await context.rig.crash(sandbox)
    since = time.monotonic()
    await noticed(sandbox, dying, since)
    async with within("a command that was running ends"):
        try:
            result = await running
        except SandboxError:
            pass
        else:
            raise AssertionError(f"a command that died with its sandbox has a result: {result}")
    equal(await context.provider.list(context.labels), [], "sandboxes left after close")


@checks.check_if(not_given("crash"))
async def others_survive_a_crash(context: Context) -> None:
    assert context.rig.crash is not None
    first, second = await context.sandbox(), await context.sandbox()
    await context.rig.crash(first)
    async with within("the death is noticed"):
        await first.died()
    equal(succeeded(await second.exec("echo fine")), b"fine\n")
    assert await second.alive()
    third = await context.sandbox()
    equal(succeeded(await third.exec("echo fine")), b"fine\n")


@checks.check_if(not_isolated)
async def a_lifetime_ends_and_is_told(context: Context) -> None:
    sandbox = await context.sandbox(lifetime=1.0)
    async with within("the lifetime ends", seconds=120):
        reason = await sandbox.died()
    assert reason, "no reason was given"
    equal(await sandbox.alive(), False, "alive")
    await refused(sandbox.exec("true"), SandboxError, "exec after the lifetime")


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
    started = time.monotonic()
    await (await context.sandbox()).close()
    usual = time.monotonic() - started
    for part in (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7):
        late = await cancelled_midway(lambda: context.provider.create(context.spec()), part * usual)
        if isinstance(late, Sandbox):
            await late.close()
    await until(context.none_left, "no sandbox is left")


@checks.check_if(not_given("options"))
async def closing_a_provider_closes_its_sandboxes(context: Context) -> None:
    provider = await context.another_provider()
    first, second = await provider.create(context.spec()), await provider.create(context.spec())
    running = asyncio.create_task(first.exec("sleep 600", timeout=900))
    await asyncio.sleep(0.1)
    async with within("a provider with running commands is closed"):
        await provider.close()
        await provider.close()
        await refused_or_failed(running)
    for sandbox in (first, second):
        await refused(sandbox.exec("true"), SandboxError, "exec after the provider was closed")
    await until(context.none_left, "no sandbox is left")
    await refused(provider.create(context.spec()), SandboxError, "create after close")


@checks.check_if(not_given("options"))
async def what_a_killed_client_leaves_is_reaped(context: Context) -> None:
    """A process with this provider dies by SIGKILL, at moments that are chosen at random."""
    seed = random.randrange(1 << 32)
    moments = random.Random(seed)

    async def reaped_all() -> bool:
        await context.provider.reap(context.labels)
        return not await context.provider.list(context.labels)

    for number in range(KILLS):
        # What a service makes for one client after its death is not taken for the next one's.
        labels = {**context.labels, "client": str(number)}
        client = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rl_harness.testing.sandbox.client"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write(pickle.dumps((type(context.provider), context.rig.options, context.spec(labels=labels))))
        client.stdin.close()
        try:
            async with within("a client has made its first sandbox", seconds=120):
                seconds = float(await client.stdout.readline())
            reaped = await context.provider.reap(labels)
            equal(reaped, 0, "sandboxes of a living client reaped")
            await asyncio.sleep(moments.random() * 5 * seconds)
        finally:
            client.send_signal(signal.SIGKILL)
            await client.wait()

        await until(reaped_all, f"no sandbox of a killed client is left after reaping (seed {seed})")
        for snapshot in await context.provider.snapshots(context.labels):  # finished ones may stay, and are whole
            sandbox = await context.sandbox(snapshot=snapshot.id)
            equal(await size(sandbox, "file"), 1_000_000, f"size of a file in a snapshot (seed {seed})")
            await sandbox.close()
            await context.provider.delete_snapshot(snapshot.id)
    await until(reaped_all, f"no sandbox is left (seed {seed})")
    await until(context.none_left, "nothing is left")


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
    """By ``check`` too: before a run starts, and not in each of its episodes."""
    for what, spec in _beyond(context):
        await refused(context.provider.check(spec), Unsupported, f"{what}, by check")
        await refused(context.provider.create(spec), Unsupported, what)


@checks.check
async def what_is_honoured_passes_the_check(context: Context) -> None:
    await context.provider.check(context.spec())
    for policy in context.provider.capabilities.network:
        await context.provider.check(context.spec(network=policy))
    for name in context.provider.capabilities.limits:
        await context.provider.check(context.spec(limits=Limits(**{name: 1 if name == "cpus" else 1 << 30})))
    equal(await context.provider.list(context.labels), [], "sandboxes that a check made")


def _beyond(context: Context) -> Iterator[tuple[str, SandboxSpec]]:
    """What this provider's capabilities say that it cannot do."""
    capabilities = context.provider.capabilities
    if not capabilities.dockerfile:
        yield "a Dockerfile", context.spec(environment=EnvironmentSpec(dockerfile=Path("Dockerfile")))
    if not capabilities.image:
        yield "an image", context.spec(environment=EnvironmentSpec(image="python:3.12"))
    if not capabilities.compose:
        yield "a compose file", context.spec(environment=EnvironmentSpec(compose=Path("compose.yaml")))
    for policy in NetworkPolicy:
        if policy not in capabilities.network:
            yield f"network {policy}", context.spec(network=policy)
    for name in ("memory", "pids", "cpus", "disk"):
        if name not in capabilities.limits:
            yield f"a limit on {name}", context.spec(limits=Limits(**{name: 1 << 30}))
    if not capabilities.mounts:
        yield "a directory to show", context.spec(mounts=(HostMount(source=context.folder, target="/shown"),))


@checks.check_if(without("builds"), without("dockerfile"), not_given("base"))
async def what_was_built_is_on_record_and_stays_while_it_is_used(context: Context) -> None:
    provider = context.provider
    before = {info.id for info in await provider.builds()}
    dockerfile = context.folder / "environment/Dockerfile"
    dockerfile.parent.mkdir()
    dockerfile.write_text(f"FROM {context.rig.base}\nRUN echo {context.labels['run']} > /built\n")
    environment = EnvironmentSpec(workdir=WORKDIR, directory=dockerfile.parent, dockerfile=dockerfile)
    now = time.time()
    sandbox = await context.sandbox(environment=environment)
    mine = str(dockerfile.parent)  # others may build meanwhile
    (build,) = [info for info in await provider.builds() if info.id not in before and info.source == mine]
    equal(build.used_by, (sandbox.id,), "what uses a build")
    assert abs(build.last_used - now) < 3600, f"last_used is {build.last_used}, now is {now}"
    assert build.created_at <= build.last_used, f"{build} was used before it was made"
    equal(await provider.delete_build(build.id), False, "whether a build in use is gone")
    equal(succeeded(await sandbox.exec("cat /built")).decode().strip(), context.labels["run"], "what was built")
    await sandbox.close()
    equal([info.used_by for info in await provider.builds() if info.id == build.id], [()], "what uses it then")
    for _ in range(2):
        equal(await provider.delete_build(build.id), True, "whether an unused build is gone")
    assert build.id not in {info.id for info in await provider.builds()}, "a deleted build is still on record"
    again = await context.sandbox(environment=environment)
    equal(succeeded(await again.exec("cat /built")).decode().strip(), context.labels["run"], "what was built again")
    await again.close()
    await provider.delete_build(build.id)


@checks.check_if(without("pause"))
async def pausing_keeps_files_and_resuming_works(context: Context) -> None:
    sandbox = await context.sandbox()
    await sandbox.write_file(f"{WORKDIR}/file", b"kept")
    for _ in range(2):
        await sandbox.pause()
        await sandbox.resume()
        equal(succeeded(await sandbox.exec("cat file")), b"kept")
    assert await sandbox.alive()


@checks.check_if(without("pause"))
async def a_paused_sandbox_is_listed_and_closed(context: Context) -> None:
    sandbox = await context.sandbox()
    await sandbox.pause()
    equal([info.id for info in await context.provider.list(context.labels)], [sandbox.id], "sandboxes on record")
    await sandbox.close()
    await until(context.none_left, "no sandbox is left")


@checks.check_if(lambda capabilities, _: "can pause" if capabilities.pause else None)
async def without_pause_it_is_refused(context: Context) -> None:
    sandbox = await context.sandbox()
    await refused(sandbox.pause(), Unsupported, "pause")
    await refused(sandbox.resume(), Unsupported, "resume")


@checks.check_if(without("reconnect"))
async def a_running_sandbox_is_found_again(context: Context) -> None:
    sandbox = await context.sandbox()
    await sandbox.write_file(f"{WORKDIR}/file", b"mine")
    provider = await context.another_provider() if context.rig.options is not None else context.provider
    again = await provider.connect(sandbox.id)
    equal(again.id, sandbox.id, "id")
    equal(succeeded(await again.exec("cat file; echo more > other", cwd=WORKDIR)), b"mine")
    equal(await sandbox.read_file(f"{WORKDIR}/other"), b"more\n")
    await again.close()
    await until(context.none_left, "no sandbox is left")


@checks.check
async def an_unknown_sandbox_is_not_found_again(context: Context) -> None:
    error = SandboxError if context.provider.capabilities.reconnect else Unsupported
    await refused(context.provider.connect("no-such-sandbox"), error, "an unknown sandbox")
