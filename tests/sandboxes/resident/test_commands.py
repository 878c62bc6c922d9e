"""What the kit does not say of commands through a helper: sandboxes without a root, other users, no traces."""

from __future__ import annotations

import asyncio

import pytest
from rl_harness.contracts import NetworkPolicy, Sandbox, SandboxSpec
from rl_harness.sandboxes.local import LocalProvider
from rl_harness.sandboxes.process import ProcessProvider
from rl_harness.sandboxes.resident import ResidentSandbox


async def test_a_sandbox_without_a_root_of_its_own(process: ProcessProvider) -> None:
    view = await ResidentSandbox.start(await process.create(SandboxSpec(network=NetworkPolicy.FULL)))
    await view.exec("mkdir sub && echo here > sub/file")
    assert (await view.exec("cat file", cwd="/app/sub")).stdout == b"here\n"
    assert (await view.exec("true", cwd="/no/such")).exit_code == 126
    result = await view.exec("echo kept; (setsid sleep 600 &); sleep 600", timeout=0.3)
    assert (result.timed_out, result.stdout) == (True, b"kept\n")
    await view.close()


@pytest.mark.needs("userns")
async def test_commands_see_what_the_sandbox_gives_and_nothing_of_the_helper(local: LocalProvider) -> None:
    sandbox = await local.create(SandboxSpec())
    before = await sandbox.changes()
    view = await ResidentSandbox.start(sandbox)
    own, through = [sorted((await each.exec(["env"])).stdout.splitlines()) for each in (sandbox, view)]
    assert through == own
    own, through = [(await each.exec("ls -l /proc/self/fd | wc -l")).stdout for each in (sandbox, view)]
    assert through == own, "descriptors leak into commands"
    own, through = [await signals(each) for each in (sandbox, view)]
    assert through == own, "signals are ignored or blocked"
    assert await sandbox.changes() == before, "the helper leaves files"


async def signals(sandbox: Sandbox) -> list[int]:
    """Those that a command finds blocked and ignored, without the two that the C library keeps to itself."""
    done = await sandbox.exec(["sh", "-c", "grep -E '^Sig(Blk|Ign)' /proc/self/status"])
    return [int(line.split()[1], 16) & 0x7FFFFFFF for line in done.stdout.splitlines()]


@pytest.mark.needs("userns")
async def test_what_a_finished_command_left_survives_the_helper(local: LocalProvider) -> None:
    """A server that the agent started goes on through a cut; what still runs is not known to anybody and dies."""
    sandbox = await local.create(SandboxSpec())
    view = await ResidentSandbox.start(sandbox)
    await view.exec("nohup sleep 601 > /dev/null 2>&1 &")
    running = asyncio.create_task(view.exec("sleep 602"))
    assert (await sandbox.exec("until pgrep -f 'sleep 602'; do sleep 0.01; done", timeout=30)).ok
    assert view.resident._link is not None
    await view.resident._link.close("a test cut it")
    assert (await running).exit_code == 137
    assert (await sandbox.exec("while pgrep -fx 'sleep 602'; do sleep 0.01; done", timeout=30)).ok
    assert (await sandbox.exec("pgrep -fx 'sleep 601'")).ok


@pytest.mark.needs("userns")
async def test_hundreds_of_commands_leave_no_process_and_no_descriptor(local: LocalProvider) -> None:
    sandbox = await local.create(SandboxSpec())
    view = await ResidentSandbox.start(sandbox)
    helpers = "pgrep -f 'rl-harness helpe[r]'"
    count = f"for p in $({helpers}); do ls /proc/$p/fd; done | wc -l; {helpers} | wc -l"

    async def several(number: int) -> None:
        await asyncio.gather(*(view.exec("echo x; cat", stdin=b"y" * 10) for _ in range(number)))

    await several(8)
    before = (await sandbox.exec(count)).stdout
    for _ in range(20):
        await several(8)
    for _ in range(10):
        process = await view.spawn("head -c 100000 /dev/zero")
        await process.kill()
    for _ in range(100):
        if (await sandbox.exec(count)).stdout == before:
            break
        await asyncio.sleep(0.05)  # what was killed last is still being cleared away
    else:
        pytest.fail(f"left: {(await sandbox.exec(count)).stdout!r}, at first {before!r}")
    assert view.resident._link is not None
    assert (view.resident._link.held, view.resident._link.streams) == (0, {})
