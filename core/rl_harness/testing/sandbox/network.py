"""Checks of network policies: what a sandbox reaches and what not, by trying.

Commands inside connect with bash's ``/dev/tcp``, python3 or nc, whichever there is.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

from rl_harness.contracts.sandbox import NetworkPolicy, Sandbox
from rl_harness.errors import SandboxError
from rl_harness.sandboxes.allowlist import with_allow_lists
from rl_harness.testing.sandbox.kit import (
    Checks,
    Context,
    equal,
    has_network,
    not_given,
    not_isolated,
    refused,
    succeeded,
    without_network,
)

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


@checks.check_if(not_isolated, without_network(NetworkPolicy.NONE), has_network(NetworkPolicy.ALLOW_LIST))
async def an_allow_list_by_proxy_lets_nothing_else_through(context: Context) -> None:
    """What core gives a provider that has no allow-list, over this one's streams: a client that takes the proxy from
    the environment reaches the listed host, and nobody else; one that does not reaches nothing."""
    async with _web_server() as port:
        listed, unlisted, named = (f"http://{host}:{port}" for host in ("127.0.0.1", "[::1]", "localhost"))
        provider = with_allow_lists(context.provider)
        spec = context.spec(network=NetworkPolicy.ALLOW_LIST, network_allow=("127.0.0.1",))
        if not (await (await context.sandbox()).exec("command -v python3")).ok:
            await refused(provider.create(spec), SandboxError, "an allow-list in a sandbox without a Python")
            return
        sandbox = context.keep(await provider.create(spec))
        wanted = [b"200", b"403", b"403", b"403"]
        urls = [listed, unlisted, named, "http://169.254.169.254"]
        for _ in range(2):
            equal(await asyncio.gather(*(_fetched(sandbox, url) for url in urls)), wanted, f"what {urls} answered")
            equal(await connecting(sandbox, (("127.0.0.1", port), *PUBLIC)), [], "what was reached without the proxy")
            await sandbox.kill_processes()  # it comes back for the next command


@contextlib.asynccontextmanager
async def _web_server() -> AsyncIterator[int]:
    """One of this machine that answers whatever it is asked."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield int(server.sockets[0].getsockname()[1])


async def _fetched(sandbox: Sandbox, url: str) -> bytes:
    """The status that Python's own client gets, which takes its proxy from the environment. Its exceptions to that are
    taken away: the host's loopback is meant, not the sandbox's."""
    code = (
        "import sys, urllib.error, urllib.request\n"
        "try: print(urllib.request.urlopen(sys.argv[1], timeout=60).status)\n"
        "except urllib.error.HTTPError as error: print(error.code)\n"
    )
    env = {"NO_PROXY": "", "no_proxy": ""}
    return succeeded(await sandbox.exec(["python3", "-c", code, url], env=env, timeout=90)).strip()


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
