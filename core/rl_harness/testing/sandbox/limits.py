"""Checks of resource limits, lifetime and network, for the providers that claim them."""

from __future__ import annotations

from rl_harness.contracts.sandbox import Limits, NetworkPolicy
from rl_harness.testing.sandbox.kit import Checks, Context, equal, succeeded, until, without_limit

checks = Checks()

MIB = 1 << 20


@checks.check_if(without_limit("pids"))
async def a_fork_bomb_is_contained(context: Context) -> None:
    sandbox = await context.sandbox(limits=Limits(pids=60))
    bomb = "bomb() { bomb | bomb & }; bomb; sleep 600"
    result = await sandbox.exec(bomb, timeout=0.5)
    equal(result.timed_out, True, "timed_out")
    await sandbox.kill_processes()
    equal(succeeded(await sandbox.exec("echo fine")), b"fine\n")


@checks.check_if(without_limit("memory"))
async def memory_is_limited(context: Context) -> None:
    sandbox = await context.sandbox(limits=Limits(memory=100 * MIB))
    # dd needs a buffer of bs bytes: below the limit it works, above it does not.
    succeeded(await sandbox.exec("dd if=/dev/zero of=/dev/null bs=20M count=1"))
    result = await sandbox.exec("dd if=/dev/zero of=/dev/null bs=300M count=1", timeout=60)
    assert not result.ok, "300 MiB were had under a limit of 100"


@checks.check_if(without_limit("disk"))
async def disk_is_limited(context: Context) -> None:
    sandbox = await context.sandbox(limits=Limits(disk=20 * MIB))
    succeeded(await sandbox.exec("head -c 5M /dev/zero > file"))
    result = await sandbox.exec("for n in 1 2 3 4 5; do head -c 10M /dev/zero > file$n || exit 3; done")
    equal(result.exit_code, 3, "exit code")


@checks.check_if(without_limit("cpus"))
async def cpus_are_accepted(context: Context) -> None:
    sandbox = await context.sandbox(limits=Limits(cpus=0.5))
    equal(succeeded(await sandbox.exec("echo fine")), b"fine\n")


@checks.check_if(lambda capabilities: None if capabilities.isolated else "not isolated")
async def a_lifetime_ends(context: Context) -> None:
    sandbox = await context.sandbox(lifetime=0.5)

    async def dead() -> bool:
        return not await sandbox.alive()

    await until(dead, "the sandbox is dead", seconds=60)


@checks.check_if(lambda c: None if NetworkPolicy.NONE in c.network else "cannot do without a network")
async def without_network_there_is_only_loopback(context: Context) -> None:
    sandbox = await context.sandbox(network=NetworkPolicy.NONE)
    interfaces = succeeded(await sandbox.exec("cat /proc/net/dev | tail -n +3 | cut -d: -f1"))
    equal(interfaces.split(), [b"lo"], "interfaces")
    routes = succeeded(await sandbox.exec("tail -n +2 /proc/net/route"))
    equal(routes, b"", "routes")
