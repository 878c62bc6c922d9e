"""Checks of ``spawn``: live output, stdin, killing."""

from __future__ import annotations

import asyncio

from rl_harness.testing.sandbox.kit import Checks, Context, counter, equal, runs, until, within

checks = Checks()


@checks.check
async def output_arrives_while_the_command_runs(context: Context) -> None:
    sandbox = await context.sandbox()
    process = await sandbox.spawn("echo first; cat; echo last >&2")
    output = process.output()
    async with within("output, while the command runs"):
        equal(await anext(output), ("stdout", b"first\n"))
        await process.write(b"typed\n")
        equal(await anext(output), ("stdout", b"typed\n"))
        await process.close_stdin()
        equal([item async for item in output], [("stderr", b"last\n")])
        equal(await process.wait(), 0, "exit code")


@checks.check
async def output_arrives_whatever_it_ends_with(context: Context) -> None:
    """Each piece before the command goes on: line ends of networks, such as a request's head has, and bytes that might
    be taken for framing."""
    sandbox = await context.sandbox()
    pieces = [b"one\r\n", b"two\r\n\r\n", b"\r", b"\n", b"\0", b"\x01\0\0\0\0\0\0\x05", b"HTTP/1.1 200 OK\r\n\r\n"]
    printed = "; ".join(f"printf '{''.join(f'{chr(92)}{byte:03o}' for byte in piece)}'; read word" for piece in pieces)
    process = await sandbox.spawn(printed)
    output = process.output()
    for piece in pieces:
        arrived = b""
        async with within(f"the arrival of {piece!r}, while the command waits"):
            while len(arrived) < len(piece):
                stream, chunk = await anext(output)
                equal(stream, "stdout", "stream")
                arrived += chunk
        equal(arrived, piece, "output")
        await process.write(b"go on\n")
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
    await until(lambda: runs(sandbox, "daemon"), "the daemon runs")
    await process.kill()
    equal(await process.wait(), 137, "exit code")
    assert not await runs(sandbox, "daemon"), "a daemon outlived its command"


@checks.check
async def killing_what_has_ended_kills_what_it_left(context: Context) -> None:
    sandbox = await context.sandbox()
    process = await sandbox.spawn(f"({counter('left')}) & exit 3")
    equal(await process.wait(), 3, "exit code")
    await until(lambda: runs(sandbox, "left"), "the background child runs")
    await process.kill()
    assert not await runs(sandbox, "left"), "a background child outlived the kill"


@checks.check
async def a_slow_reader_slows_the_command(context: Context) -> None:
    sandbox = await context.sandbox()
    process = await sandbox.spawn("head -c 50000000 /dev/zero")
    await asyncio.sleep(0.05)
    total = 0
    async for _, chunk in process.output():
        total += len(chunk)
    equal((total, await process.wait()), (50_000_000, 0))


@checks.check
async def writing_waits_for_a_slow_reader_and_loses_nothing(context: Context) -> None:
    sandbox = await context.sandbox()
    process = await sandbox.spawn("sleep 0.2; wc -c")
    for _ in range(50):
        await process.write(b"x" * 100_000)
    await process.close_stdin()
    output = b"".join([chunk async for _, chunk in process.output()])
    equal((int(output), await process.wait()), (5_000_000, 0))


@checks.check
async def many_processes_keep_their_streams_apart(context: Context) -> None:
    sandbox = await context.sandbox()
    processes = [await sandbox.spawn(f"read line; echo {number} $line; exit {number}") for number in range(8)]
    for number, process in enumerate(processes):
        await process.write(b"to %d\n" % number)
    for number, process in enumerate(processes):
        output = b"".join([chunk async for _, chunk in process.output()])
        equal((output, await process.wait()), (b"%d to %d\n" % (number, number), number))
