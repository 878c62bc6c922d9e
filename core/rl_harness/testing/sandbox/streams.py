"""Checks of ``spawn``: live output, stdin, killing."""

from __future__ import annotations

import asyncio

from rl_harness.testing.sandbox.kit import Checks, Context, counter, counts_up, equal, until

checks = Checks()


@checks.check
async def output_arrives_while_the_command_runs(context: Context) -> None:
    sandbox = await context.sandbox()
    process = await sandbox.spawn("echo first; cat; echo last >&2")
    output = process.output()
    async with asyncio.timeout(60):
        equal(await anext(output), ("stdout", b"first\n"))
        await process.write(b"typed\n")
        equal(await anext(output), ("stdout", b"typed\n"))
        await process.close_stdin()
        equal([item async for item in output], [("stderr", b"last\n")])
        equal(await process.wait(), 0, "exit code")


@checks.check
async def waiting_gives_the_exit_code(context: Context) -> None:
    sandbox = await context.sandbox()
    equal(await (await sandbox.spawn("exit 9")).wait(), 9, "exit code")
    equal(await (await sandbox.spawn(["sh", "-c", "kill -KILL $$"])).wait(), 137, "exit code")


@checks.check
async def a_killed_process_takes_its_descendants_along(context: Context) -> None:
    sandbox = await context.sandbox()
    process = await sandbox.spawn(f"(setsid sh -c '({counter('daemon')}) &' &); sleep 600")
    await until(lambda: counts_up(sandbox, "daemon"), "the daemon runs")
    await process.kill()
    equal(await process.wait(), 137, "exit code")
    assert not await counts_up(sandbox, "daemon"), "a daemon outlived its command"


@checks.check
async def killing_what_has_ended_kills_what_it_left(context: Context) -> None:
    sandbox = await context.sandbox()
    process = await sandbox.spawn(f"({counter('left')}) & exit 3")
    equal(await process.wait(), 3, "exit code")
    await until(lambda: counts_up(sandbox, "left"), "the background child runs")
    await process.kill()
    assert not await counts_up(sandbox, "left"), "a background child outlived the kill"


@checks.check
async def a_slow_reader_slows_the_command(context: Context) -> None:
    sandbox = await context.sandbox()
    process = await sandbox.spawn("head -c 50000000 /dev/zero")
    await asyncio.sleep(0.05)
    total = 0
    async for _, chunk in process.output():
        total += len(chunk)
    equal((total, await process.wait()), (50_000_000, 0))
