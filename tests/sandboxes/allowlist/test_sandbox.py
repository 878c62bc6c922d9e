"""Sandboxes of a provider without an allow-list, given one: what programs inside reach, and what outlives what."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import msgspec
import pytest
from rl_harness.contracts.sandbox import (
    EnvironmentSpec,
    NetworkPolicy,
    Sandbox,
    SandboxCapabilities,
    SandboxProvider,
    SandboxSpec,
    SetupStep,
)
from rl_harness.errors import Unsupported
from rl_harness.sandboxes.allowlist import AllowListProvider, with_allow_lists
from rl_harness.sandboxes.allowlist.hosts import Address
from rl_harness.sandboxes.allowlist.proxy import MAX_CONNECTIONS, Streams
from rl_harness.sandboxes.allowlist.sandbox import PORT, AllowListSandbox, proxy_variables
from rl_harness.sandboxes.local import LocalProvider
from rl_harness.sandboxes.process import ProcessProvider
from rl_harness.sandboxes.resident import HelperUnavailable, agents_view, tcp
from rl_harness.sandboxes.snapshots import Snapshots
from rl_harness.testing.sandbox.relay import KILL_HELPERS

pytestmark = pytest.mark.needs("userns")

WEB = EnvironmentSpec(workdir="/app")
#: Status and body, or how it failed.
FETCH = """
import sys, urllib.error, urllib.request, ssl
context = ssl.create_default_context(cafile=sys.argv[2]) if len(sys.argv) > 2 else None
try: print(urllib.request.urlopen(sys.argv[1], timeout=60, context=context).read().decode())
except urllib.error.HTTPError as error: print(error.code, error.read().decode())
except OSError as error: print(error)
"""


@pytest.fixture
async def provider(tmp_path: Path) -> AsyncIterator[AllowListProvider]:
    provider = with_allow_lists(LocalProvider(LocalProvider.Options(state_dir=tmp_path / "state")))
    assert isinstance(provider, AllowListProvider)
    yield provider
    await provider.close()


class Web:
    """Servers of this machine at 127.0.0.2 and 127.0.0.3 that say which one was asked for what; ``/away`` leads from
    the first to the second."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bytes]] = []
        self.port = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(EOFError, OSError):
            head = await reader.readuntil(b"\r\n\r\n")
            host = writer.get_extra_info("sockname")[0]
            path = head.split()[1]
            self.asked.append((host, path))
            body = b"from " + host.encode()
            line = b"200 OK"
            if path == b"/away":
                line = b"302 Found\r\nLocation: http://127.0.0.3:%d/secret" % self.port
            writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (line, len(body), body))
            await writer.drain()
        writer.close()

    def url(self, host: str, path: str = "/") -> str:
        return f"http://{host}:{self.port}{path}"


@pytest.fixture
async def web() -> AsyncIterator[Web]:
    web = Web()
    server = await asyncio.start_server(web.answer, "0.0.0.0", 0)
    async with server:
        web.port = server.sockets[0].getsockname()[1]
        yield web


async def fetch(sandbox: Sandbox, url: str, *more: str) -> str:
    result = await sandbox.exec(["python3", "-c", FETCH, url, *more], timeout=90)
    assert result.ok, result
    return result.stdout.decode().strip()


async def comes_back(sandbox: Sandbox, web: Web) -> None:
    async with asyncio.timeout(60):
        while await fetch(sandbox, web.url("127.0.0.2")) != "from 127.0.0.2":  # noqa: ASYNC110 -- nothing tells
            await asyncio.sleep(0.05)


async def listed(provider: AllowListProvider, *hosts: str, environment: EnvironmentSpec = WEB, **more: str) -> Sandbox:
    return await provider.create(
        SandboxSpec(network=NetworkPolicy.ALLOW_LIST, network_allow=hosts, environment=environment, **more)
    )


async def test_programs_reach_the_listed_host_and_no_other_not_even_by_its_redirect(
    provider: AllowListProvider, web: Web
) -> None:
    sandbox = await listed(provider, "127.0.0.2")
    assert await fetch(sandbox, web.url("127.0.0.2")) == "from 127.0.0.2"
    for url in (web.url("127.0.0.3"), web.url("127.0.0.2", "/away"), "http://169.254.169.254/latest/meta-data"):
        answer = await fetch(sandbox, url)
        assert answer.startswith("403 rl-harness: ")
        assert "is not in allowed_hosts" in answer
    assert web.asked == [("127.0.0.2", b"/"), ("127.0.0.2", b"/away")]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
async def test_tls_is_between_the_program_and_the_host(provider: AllowListProvider, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    names = ("-addext", "subjectAltName=IP:127.0.0.2,IP:127.0.0.3", "-subj", "/CN=test")
    kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    subprocess.run(
        ["openssl", "req", "-x509", *kind, *names, "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    web = Web()
    server = await asyncio.start_server(web.answer, "0.0.0.0", 0, ssl=context)
    async with server:
        port = server.sockets[0].getsockname()[1]
        sandbox = await listed(provider, "127.0.0.2")
        await sandbox.upload(certificate, "/app/ca.pem")
        assert await fetch(sandbox, f"https://127.0.0.2:{port}/", "/app/ca.pem") == "from 127.0.0.2"
        refused = await fetch(sandbox, f"https://127.0.0.3:{port}/", "/app/ca.pem")
        assert "403 127.0.0.3 is not in allowed_hosts" in refused
        assert web.asked == [("127.0.0.2", b"/")]


async def test_what_ignores_the_proxy_reaches_nothing_and_loopback_is_its_own(
    provider: AllowListProvider, web: Web
) -> None:
    sandbox = await listed(provider, "127.0.0.2")
    direct = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)"
    for host in ("127.0.0.2", "127.0.0.1"):
        assert not (await sandbox.exec(["python3", "-c", direct, host, str(web.port)], timeout=30)).ok
    serve = (
        "python3 -m http.server 8123 --bind 127.0.0.1 >/dev/null 2>&1 &\n"
        "try='import socket; socket.create_connection((\"127.0.0.1\", 8123))'\n"
        'for _ in $(seq 200); do python3 -c "$try" 2>/dev/null && exit; sleep 0.05; done; exit 1'
    )
    assert (await sandbox.exec(serve, timeout=60)).ok
    assert "Directory listing" in await fetch(sandbox, "http://localhost:8123/")
    assert web.asked == []


async def test_it_comes_back_after_kills_of_every_kind_and_nothing_runs_between(
    provider: AllowListProvider, web: Web
) -> None:
    sandbox = await listed(provider, "127.0.0.2")
    assert isinstance(sandbox, AllowListSandbox)
    await sandbox.exec(KILL_HELPERS)
    await comes_back(sandbox, web)
    for _ in range(2):
        await sandbox.kill_processes()
        running = (await sandbox.inner.exec("cat /proc/[0-9]*/cmdline")).stdout
        assert b"/proc/" in running  # its own
        assert b"rl-harness helper" not in running.replace(b"\0", b" ")  # which is started when it is needed
        assert await fetch(sandbox, web.url("127.0.0.2")) == "from 127.0.0.2"


async def test_forks_and_what_starts_from_a_snapshot_have_a_way_of_their_own(
    provider: AllowListProvider, web: Web
) -> None:
    sandbox = await listed(provider, "127.0.0.2")
    forks = await sandbox.fork(2)
    snapshot = await sandbox.snapshot()
    await sandbox.close()
    again = await provider.create(
        SandboxSpec(network=NetworkPolicy.ALLOW_LIST, network_allow=("127.0.0.3",), environment=WEB, snapshot=snapshot)
    )
    closed = await provider.create(SandboxSpec(environment=WEB, snapshot=snapshot))
    for fork in forks:
        assert await fetch(fork, web.url("127.0.0.2")) == "from 127.0.0.2"
    assert await fetch(again, web.url("127.0.0.3")) == "from 127.0.0.3"
    assert "403" in await fetch(again, web.url("127.0.0.2"))
    assert (await closed.exec("env | grep -i proxy; true")).stdout == b""


async def test_commands_through_another_helper_have_it_and_the_way_to_the_model_goes_around_it(
    provider: AllowListProvider, web: Web
) -> None:
    """As for an agent inside, in a sandbox whose own commands are slow."""
    sandbox = await listed(provider, "127.0.0.2")
    async with agents_view(sandbox, commands=True, target=tcp("127.0.0.3", web.port)) as view:
        assert view.url is not None
        assert await fetch(view.sandbox, web.url("127.0.0.2")) == "from 127.0.0.2"
        assert await fetch(view.sandbox, view.url) == "from 127.0.0.3"


async def test_an_agent_that_takes_its_python_away_has_taken_its_own_network_only(provider: AllowListProvider) -> None:
    sandbox = await listed(provider, "127.0.0.2")
    removed = "for each in $(ls /usr/bin/python* /usr/local/bin/python* 2>/dev/null); do rm -f $each; done"
    assert (await sandbox.exec(removed)).ok
    await sandbox.kill_processes()
    assert (await sandbox.exec("echo graded")).stdout == b"graded\n"
    snapshot = await sandbox.snapshot()
    with pytest.raises(HelperUnavailable, match=r"allowlist.*Python.*no python3") as refused:
        await listed(provider, "127.0.0.2", snapshot=snapshot)
    assert "put Python" in (refused.value.remedy or "")
    assert len(await provider.list()) == 1


async def test_thousands_of_connections_cost_nobody_else_anything(provider: AllowListProvider, web: Web) -> None:
    sandbox, neighbour = await listed(provider, "127.0.0.2"), await listed(provider, "127.0.0.2")
    assert isinstance(sandbox, AllowListSandbox)
    flood = (
        "import resource, socket\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)\n"
        "kept = []\n"
        "for number in range(3000):\n"
        "    try:\n"
        f"        kept.append(socket.create_connection(('127.0.0.1', {PORT}), 5))\n"
        "        kept[-1].sendall(b'CONNECT 127.0.0.2:1 HTTP/1.1')\n"
        "    except OSError: kept = kept[-200:]\n"
        "print('opened', flush=True)\n"
        "input()\n"
    )
    process = await sandbox.spawn(["python3", "-c", flood])
    async for _, chunk in process.output():
        assert chunk == b"opened\n", chunk
        break
    assert sandbox._proxy.connections <= MAX_CONNECTIONS
    assert await fetch(neighbour, web.url("127.0.0.2")) == "from 127.0.0.2"
    await process.kill()
    await comes_back(sandbox, web)


async def test_nothing_is_left_of_a_sandbox_that_is_closed_while_it_waits_for_a_host(
    provider: AllowListProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as stack:
        deaf = stack.enter_context(socket.create_server(("127.0.0.2", 0), backlog=0))
        for _ in range(4):  # nobody accepts, and no further one is answered
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(deaf.getsockname())
        sandbox = await listed(provider, "127.0.0.2")
        assert isinstance(sandbox, AllowListSandbox)
        hold = (
            f"import socket; s = socket.create_connection(('127.0.0.1', {PORT}))\n"
            f"s.sendall(b'CONNECT 127.0.0.2:{deaf.getsockname()[1]} HTTP/1.1\\r\\n\\r\\n'); s.recv(1)"
        )
        dialing, connect = asyncio.Event(), provider._dialer.connect

        async def told(addresses: Iterable[Address], port: int) -> Streams:
            dialing.set()
            return await connect(addresses, port)

        monkeypatch.setattr(provider._dialer, "connect", told)
        await sandbox.spawn(["python3", "-c", hold])
        await asyncio.wait_for(dialing.wait(), 60)
        await sandbox.close()
        assert sandbox._proxy.connections == 0
        assert await provider.list() == []


async def test_set_up_reaches_every_public_host_whatever_the_task_allows(
    provider: AllowListProvider, web: Web, tmp_path: Path
) -> None:
    """It is the author's code, and what it makes is shared by tasks of other lists. Nothing of this network, though."""
    script = (
        f"cat > /tmp/fetch.py <<'E'\n{FETCH}E\n"
        f"python3 /tmp/fetch.py {web.url('127.0.0.2')} > /app/private\n"
        "python3 /tmp/fetch.py http://nobody.invalid/ > /app/public\n"
    )
    environment = EnvironmentSpec(workdir="/app", setup=(SetupStep(name="setup.sh", script=script),))
    snapshots = Snapshots(provider, identity="test", state=tmp_path / "prepared")
    sandbox = await snapshots.create(SandboxSpec(environment=environment))
    assert (await sandbox.read_file("/app/private")).startswith(b"403 rl-harness: 127.0.0.2 is not in allowed_hosts")
    assert (await sandbox.read_file("/app/public")).startswith(b"502 rl-harness: nobody.invalid is not reached")
    assert (await sandbox.exec("env | grep -i proxy; true")).stdout == b""
    await snapshots.close()


@pytest.mark.parametrize("entry", ["example.com:443", "https://example.com", "169.254.169.254"])
async def test_an_entry_that_is_no_host_is_refused_before_anything_starts(
    provider: AllowListProvider, entry: str
) -> None:
    spec = SandboxSpec(network=NetworkPolicy.ALLOW_LIST, network_allow=(entry,))
    for asked in (provider.check, provider.create):
        with pytest.raises(Unsupported, match=f"allowed_hosts: '{entry}'"):
            await asked(spec)
    assert await provider.list() == []


class Native(LocalProvider):
    @property
    def capabilities(self) -> SandboxCapabilities:
        return msgspec.structs.replace(super().capabilities, network=frozenset(NetworkPolicy))


def test_only_isolating_providers_without_one_of_their_own_get_it(tmp_path: Path) -> None:
    local = LocalProvider(LocalProvider.Options(state_dir=tmp_path))
    assert NetworkPolicy.ALLOW_LIST not in local.capabilities.network
    wrapped = with_allow_lists(local).capabilities
    assert wrapped.network == {NetworkPolicy.NONE, NetworkPolicy.ALLOW_LIST}
    assert msgspec.structs.replace(wrapped, network=local.capabilities.network) == local.capabilities
    process = ProcessProvider(ProcessProvider.Options(state_dir=tmp_path))
    native = Native(Native.Options(state_dir=tmp_path))
    for other in (process, native):
        assert with_allow_lists(other).capabilities == other.capabilities


def test_a_tasks_own_exceptions_are_kept() -> None:
    variables = proxy_variables({"NO_PROXY": "db,cache", "https_proxy": "http://its.own"})
    assert variables["NO_PROXY"] == variables["no_proxy"] == "localhost,127.0.0.1,::1,db,cache"
    assert variables["https_proxy"] == "http://its.own"
    assert variables["HTTPS_PROXY"] == f"http://127.0.0.1:{PORT}"


def test_whatever_a_provider_can_be_asked_is_passed_on() -> None:
    """A method that the contract got later would else answer with its default, for every provider of every run."""
    asked = {name for name in vars(SandboxProvider) if not name.startswith("_")}
    assert asked <= vars(AllowListProvider).keys()
