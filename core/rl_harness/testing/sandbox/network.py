"""Checks of network policies: what a sandbox reaches and what not, by trying.

Commands inside connect with bash's ``/dev/tcp``, python3 or nc, whichever there is.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

from rl_harness.contracts.sandbox import NetworkPolicy, Sandbox
from rl_harness.testing.sandbox.kit import Checks, Context, equal, not_given, not_isolated, succeeded, without_network

checks = Checks()

Address = tuple[str, int]

METADATA = (("169.254.169.254", 80), ("100.100.100.200", 80))
PUBLIC = (("1.1.1.1", 53), ("8.8.8.8", 53), ("9.9.9.9", 443))
_NO_PROBE = 99
_PYTHON = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)"
_PROBE = f"""
if command -v bash >/dev/null; then exec bash -c 'exec 3<>"/dev/tcp/$0/$1"' "$0" "$1"; fi
if command -v python3 >/dev/null; then exec python3 -c '{_PYTHON}' "$0" "$1"; fi
if command -v nc >/dev/null; then exec nc -w 5 "$0" "$1"; fi
exit {_NO_PROBE}
"""


async def connects(sandbox: Sandbox, address: Address) -> bool:
    """Whether a command inside can connect to ``address``."""
    host, port = address
    result = await sandbox.exec(["sh", "-c", _PROBE, host, str(port)], timeout=5)
    assert result.exit_code != _NO_PROBE, "the sandbox has no bash, python3 or nc to try its network with"
    return result.ok


async def connecting(sandbox: Sandbox, addresses: tuple[Address, ...]) -> list[Address]:
    found = await asyncio.gather(*(connects(sandbox, address) for address in addresses))
    return [address for address, reached in zip(addresses, found, strict=True) if reached]


@contextlib.asynccontextmanager
async def server_of_the_host() -> AsyncIterator[tuple[Address, ...]]:
    """A server on every address of this machine: its loopback first, then how others reach it."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "0.0.0.0", 0)
    port = server.sockets[0].getsockname()[1]
    hosts = ["127.0.0.1"]
    with contextlib.suppress(OSError):
        hosts += {str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outward:
        outward.connect((PUBLIC[0][0], 9))  # sends nothing: it only chooses a way out
        hosts.append(outward.getsockname()[0])
    async with server:
        yield tuple((host, port) for host in dict.fromkeys(hosts))


@checks.check_if(not_isolated, without_network(NetworkPolicy.NONE))
async def without_network_nothing_is_reached(context: Context) -> None:
    sandbox = await context.sandbox(network=NetworkPolicy.NONE)
    given = tuple(address for address in (context.rig.reachable, context.rig.unlisted) if address)
    async with server_of_the_host() as own:
        equal(await connecting(sandbox, (*own, *given, *METADATA, *PUBLIC)), [], "what was reached")


@checks.check_if(not_isolated, without_network(NetworkPolicy.NONE))
async def without_network_names_are_not_resolved(context: Context) -> None:
    sandbox = await context.sandbox(network=NetworkPolicy.NONE)
    equal(await connecting(sandbox, (("pypi.org", 443), ("host.docker.internal", 80))), [], "what was reached")


@checks.check_if(not_isolated)
async def the_loopback_of_a_sandbox_is_its_own(context: Context) -> None:
    first, second = await context.sandbox(), await context.sandbox()
    async with server_of_the_host() as own:
        equal(await connecting(first, own[:1]), [], "what was reached on the host's loopback")
    listen = (
        "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True);"
        "time.sleep(600)"
    )
    if not (await first.exec("command -v python3")).ok:
        return
    process = await first.spawn(["python3", "-c", listen])
    try:
        async for _, chunk in process.output():
            address = ("127.0.0.1", int(chunk))
            break
        equal(await connecting(first, (address,)), [address], "what was reached on its own loopback")
        equal(await connecting(second, (address,)), [], "what was reached on the loopback of another sandbox")
    finally:
        await process.kill()


@checks.check_if(not_isolated)
async def metadata_addresses_are_reached_under_no_policy(context: Context) -> None:
    rig = context.rig
    for policy in context.provider.capabilities.network:
        fields: dict[str, object] = {"network": policy}
        if policy is NetworkPolicy.ALLOW_LIST:
            fields["network_allow"] = (rig.allow or (rig.reachable[0] if rig.reachable else "pypi.org"),)
        sandbox = await context.sandbox(**fields)
        equal(await connecting(sandbox, METADATA), [], f"what was reached with the policy {policy.value}")


@checks.check_if(without_network(NetworkPolicy.ALLOW_LIST), not_given("reachable", "unlisted"))
async def an_allow_list_lets_nothing_else_through(context: Context) -> None:
    rig = context.rig
    assert rig.reachable is not None
    assert rig.unlisted is not None
    allowed = rig.allow or rig.reachable[0]
    sandbox = await context.sandbox(network=NetworkPolicy.ALLOW_LIST, network_allow=(allowed,))
    equal(await connecting(sandbox, (rig.reachable, rig.unlisted)), [rig.reachable], "what was reached")


@checks.check_if(without_network(NetworkPolicy.FULL), not_given("reachable", "unlisted"))
async def a_full_network_reaches_every_host(context: Context) -> None:
    rig = context.rig
    assert rig.reachable is not None
    assert rig.unlisted is not None
    sandbox = await context.sandbox(network=NetworkPolicy.FULL)
    equal(await connecting(sandbox, (rig.reachable, rig.unlisted)), [rig.reachable, rig.unlisted], "what was reached")


@checks.check
async def loopback_works_whatever_the_policy(context: Context) -> None:
    """A server and its client in one sandbox, as many tasks have."""
    sandbox = await context.sandbox()
    if not (await sandbox.exec("command -v python3")).ok:
        return
    script = (
        "import socket, threading\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "thread = threading.Thread(target=lambda: server.accept()[0].sendall(b'hello'))\n"
        "thread.start()\n"
        "print(socket.create_connection(server.getsockname()).recv(9).decode())\n"
        "thread.join()\n"
    )
    equal(succeeded(await sandbox.exec(["python3", "-c", script])), b"hello\n")
