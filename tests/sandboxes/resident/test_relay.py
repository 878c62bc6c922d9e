"""Connections from an isolated sandbox to the host: many, large, slow, half-closed, cut, and made again."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_harness.contracts import NetworkPolicy, Sandbox, SandboxSpec
from rl_harness.errors import SandboxError
from rl_harness.sandboxes.local import LocalProvider
from rl_harness.sandboxes.process import ProcessProvider
from rl_harness.sandboxes.resident import HelperUnavailable, Relay, Resident, agents_view, tcp
from rl_harness.sandboxes.resident import helper as wire

pytestmark = pytest.mark.needs("userns")

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Place:
    """A sandbox without network, a helper in it, and a server on the host behind its relay."""

    def __init__(self, sandbox: Sandbox, resident: Resident, relay: Relay) -> None:
        self.sandbox = sandbox
        self.resident = resident
        self.relay = relay

    async def python(self, code: str, timeout: float = 60) -> bytes:
        """Standard output of a Python program inside that must succeed; ``PORT`` is the relay's."""
        prefix = f"import socket, time, sys, hashlib, threading\nPORT = {self.relay.port}\n"
        done = await self.sandbox.exec(["python3", "-c", prefix + code], timeout=timeout)
        assert done.ok, done
        return done.stdout


@contextlib.asynccontextmanager
async def place(sandbox: Sandbox, serve: Serve) -> AsyncIterator[Place]:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    resident = await Resident.start(sandbox, commands=False)
    try:
        relay = await resident.relay(tcp("127.0.0.1", server.sockets[0].getsockname()[1]))
        yield Place(sandbox, resident, relay)
    finally:
        await resident.close()
        server.close()


@pytest.fixture
async def sandbox(local: LocalProvider) -> Sandbox:
    return await local.create(SandboxSpec())


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    writer.close()


async def test_a_connection_reaches_the_host_where_there_is_no_network(sandbox: Sandbox) -> None:
    async with place(sandbox, echo) as here:
        assert here.relay.url == f"http://127.0.0.1:{here.relay.port}"
        code = "s = socket.create_connection(('127.0.0.1', PORT)); s.sendall(b'hello'); print(s.recv(9))"
        assert await here.python(code) == b"b'hello'\n"


async def test_two_hundred_connections_at_once(sandbox: Sandbox) -> None:
    peak = 0
    everybody = asyncio.Event()

    async def wait_for_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal peak
        line = await reader.readline()
        peak += 1
        if peak == 200:
            everybody.set()
        await everybody.wait()
        writer.write(line)
        writer.close()

    async with place(sandbox, wait_for_all) as here:
        code = """
sockets = [socket.create_connection(("127.0.0.1", PORT)) for _ in range(200)]
for number, each in enumerate(sockets):
    each.sendall(b"%d\\n" % number)
print(all(each.makefile("rb").read() == b"%d\\n" % number for number, each in enumerate(sockets)))
"""
        assert await here.python(code) == b"True\n"
        await until(lambda: here.relay.connections == 0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 -- what is waited for sets no event
            await asyncio.sleep(0.01)


async def test_a_hundred_megabytes_each_way_in_bounded_memory(sandbox: Sandbox) -> None:
    async with place(sandbox, echo) as here:
        code = """
size, block = 100_000_000, bytes(range(256)) * 390
sent, received = hashlib.sha256(), hashlib.sha256()
s = socket.create_connection(("127.0.0.1", PORT))
def send():
    left = size
    while left:
        piece = block[:left]
        s.sendall(piece)
        sent.update(piece)
        left -= len(piece)
    s.shutdown(socket.SHUT_WR)
thread = threading.Thread(target=send)
thread.start()
while data := s.recv(1 << 18):
    received.update(data)
thread.join()
print(sent.hexdigest() == received.hexdigest())
"""
        await asyncio.to_thread(Path("/proc/self/clear_refs").write_text, "5")
        before = status("VmRSS")
        assert await here.python(code) == b"True\n"
        assert status("VmHWM") - before < 48_000, "more than 48 MB of memory for 100 MB"


def status(name: str) -> int:
    """A number of ``/proc/self/status``, in kB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1])


async def test_what_nobody_reads_holds_up_its_own_connection_only(sandbox: Sandbox) -> None:
    taken = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal taken
        if await reader.readline() == b"flood\n":
            with contextlib.suppress(ConnectionError):
                while True:
                    writer.write(b"x" * wire.CHUNK)
                    await writer.drain()
                    taken += wire.CHUNK
        writer.write(b"quick\n")
        writer.close()

    async with place(sandbox, flood) as here:
        code = """
slow = socket.create_connection(("127.0.0.1", PORT))
slow.sendall(b"flood\\n")
time.sleep(0.3)
for _ in range(20):
    s = socket.create_connection(("127.0.0.1", PORT))
    s.sendall(b"hello\\n")
    assert s.makefile("rb").read() == b"quick\\n"
print("ok")
"""
        assert await here.python(code) == b"ok\n"
        assert 0 < taken < 32 << 20, "the flood was not held back"


async def test_a_server_that_does_not_read_holds_the_client_back(sandbox: Sandbox) -> None:
    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(600)

    async with place(sandbox, deaf) as here:
        code = """
s = socket.create_connection(("127.0.0.1", PORT))
s.settimeout(0.5)
sent = 0
try:
    while sent < 100_000_000:
        sent += s.send(b"x" * 65536)
except TimeoutError:
    pass
print(sent < 32_000_000)
"""
        assert await here.python(code) == b"True\n"


async def test_each_direction_closes_for_itself(sandbox: Sandbox) -> None:
    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.read()  # until the client has closed its side
        writer.write(b"%d bytes" % len(data))
        writer.close()

    async with place(sandbox, count) as here:
        code = """
s = socket.create_connection(("127.0.0.1", PORT))
s.sendall(b"x" * 1_000_000)
s.shutdown(socket.SHUT_WR)
print(s.makefile("rb").read())
"""
        assert await here.python(code) == b"b'1000000 bytes'\n"


async def test_connections_spend_no_descriptor_of_the_host(sandbox: Sandbox) -> None:
    """An agent that opens hundreds must not take them from other episodes."""

    class Silent(asyncio.Protocol):
        pass

    resident = await Resident.start(sandbox, commands=False)
    relay = await resident.relay(Silent)
    before = len(list(Path("/proc/self/fd").iterdir()))
    code = f"import socket; s = [socket.create_connection(('127.0.0.1', {relay.port})) for _ in range(300)]; input()"
    process = await sandbox.spawn(["python3", "-c", code])
    await until(lambda: relay.connections == 300)
    assert len(list(Path("/proc/self/fd").iterdir())) < before + 20
    await process.close_stdin()
    await until(lambda: relay.connections == 0)
    await process.kill()
    await resident.close()


async def test_a_target_that_raises_costs_its_own_connection(sandbox: Sandbox) -> None:
    class Broken(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            raise RuntimeError("a fault of the host's own")

    resident = await Resident.start(sandbox, commands=False)
    relay = await resident.relay(Broken)
    code = f"""
import socket
for _ in range(3):
    s = socket.create_connection(("127.0.0.1", {relay.port}))
    s.sendall(b"x")
    try:
        assert s.recv(1) == b""
    except ConnectionResetError:
        pass
print("ok")
"""
    assert (await sandbox.exec(["python3", "-c", code], timeout=60)).stdout == b"ok\n"
    assert resident.restarts == 0
    await resident.close()


async def test_a_target_that_refuses_closes_the_connection(local: LocalProvider) -> None:
    resident = await Resident.start(await local.create(SandboxSpec()), commands=False)
    relay = await resident.relay(tcp("127.0.0.1", 1))
    code = f"""
import socket
s = socket.create_connection(("127.0.0.1", {relay.port}))
try:
    print(s.recv(1))
except ConnectionResetError:
    print(b"")
"""
    assert (await resident.sandbox.exec(["python3", "-c", code], timeout=60)).stdout == b"b''\n"
    await resident.close()


KILL_HELPERS = r"""
for stat in /proc/[0-9]*/cmdline; do
    if tr '\0' ' ' < $stat | grep -q 'rl-harness[ ]helper'; then kill -9 "$(echo $stat | cut -d/ -f3)"; fi
done 2>/dev/null
true
"""


async def test_a_killed_helper_comes_back_on_the_same_port(sandbox: Sandbox) -> None:
    async with place(sandbox, echo) as here:
        url = here.relay.url
        waiting = """
s = socket.create_connection(("127.0.0.1", PORT))
s.sendall(b"x"); s.recv(1)
open("/tmp/connected", "w").close()
try:
    print(s.recv(1))
except ConnectionResetError:
    print(b"")
"""
        in_flight = asyncio.create_task(here.python(waiting))
        assert (await sandbox.exec("until test -e /tmp/connected; do sleep 0.02; done", timeout=60)).ok
        assert (await sandbox.exec(KILL_HELPERS)).ok
        assert await in_flight == b"b''\n", "a connection in flight breaks"
        again = """
for _ in range(200):
    try:
        s = socket.create_connection(("127.0.0.1", PORT))
        s.sendall(b"again")
        if s.recv(5) == b"again":
            break
    except OSError:
        pass
    time.sleep(0.05)
else:
    sys.exit("never came back")
"""
        await here.python(again)
        assert (here.relay.url, here.resident.restarts, here.resident.failed) == (url, 1, None)


async def test_a_cut_stream_is_made_anew(sandbox: Sandbox) -> None:
    async with place(sandbox, echo) as here:
        for number in range(1, 4):
            assert here.resident._link is not None
            await here.resident._link._process.kill()
            await until(lambda number=number: here.resident.restarts == number)  # type: ignore[misc]
            code = "s = socket.create_connection(('127.0.0.1', PORT)); s.sendall(b'hello'); print(s.recv(9))"
            assert await here.python(code) == b"b'hello'\n"


async def test_a_helper_that_is_killed_over_and_over_is_given_up(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_harness.sandboxes.resident.resident.LONGEST_PAUSE", 0.01)
    async with place(sandbox, echo) as here:
        while here.resident.failed is None:
            if (link := here.resident._running()) is not None:
                await link._process.kill()
            await asyncio.sleep(0.01)
        assert "lost for good" in here.resident.failed
        with pytest.raises(HelperUnavailable):
            await here.resident.relay(tcp("127.0.0.1", 1))
        assert (await here.resident.exec("echo the slow way")).stdout == b"the slow way\n"


async def test_a_dead_sandbox_is_an_error(sandbox: Sandbox, crash: Callable[[Sandbox], None]) -> None:
    async def use() -> None:
        async with agents_view(sandbox, commands=True, target=tcp("127.0.0.1", 1)) as view:
            crash(sandbox)
            await sandbox.died()
            await until(lambda: view.lost is not None)
            with pytest.raises(SandboxError):
                await view.sandbox.exec("true")

    with pytest.raises(SandboxError, match=sandbox.id):
        await use()


NO_PYTHON = "rm -f /usr/bin/python* /usr/local/bin/python*"


async def test_a_sandbox_without_python_is_refused_with_the_remedy(sandbox: Sandbox) -> None:
    await sandbox.exec(NO_PYTHON)
    if (await sandbox.exec("command -v python3")).ok:
        pytest.skip("this user cannot remove Python")
    with pytest.raises(HelperUnavailable, match="no python3") as refused:
        async with agents_view(sandbox, commands=False, target=tcp("127.0.0.1", 1)):
            pass
    assert "Python 3.6" in (refused.value.remedy or "")
    # Commands alone can do without.
    async with agents_view(sandbox, commands=True, target=None) as view:
        assert (await view.sandbox.exec("echo fine")).stdout == b"fine\n"


@settings(max_examples=8)
@given(
    sizes=st.lists(st.integers(0, 600_000), min_size=1, max_size=6),
    blocks=st.lists(st.integers(1, 100_000), min_size=1, max_size=4),
    pauses=st.lists(st.booleans(), min_size=1, max_size=4),
)
def test_every_byte_arrives_in_order_whatever_the_sizes(
    sizes: list[int], blocks: list[int], pauses: list[bool], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Several connections at once, the host reading in fits and starts, through a helper in a plain process."""
    state = tmp_path_factory.mktemp("state")

    async def digest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen, turn = hashlib.sha256(), 0
        while data := await reader.read(blocks[turn % len(blocks)]):
            seen.update(data)
            turn += 1
            if pauses[turn % len(pauses)]:
                await asyncio.sleep(0)
        writer.write(seen.hexdigest().encode())
        writer.close()

    async def run() -> None:
        provider = ProcessProvider(ProcessProvider.Options(state_dir=state))
        sandbox = await provider.create(SandboxSpec(network=NetworkPolicy.FULL))
        try:
            async with place(sandbox, digest) as here:

                async def one(number: int, size: int) -> None:
                    data = bytes([number, 1, 2, 3, 4]) * (size // 5)
                    reader, writer = await asyncio.open_connection("127.0.0.1", here.relay.port)
                    writer.write(data)
                    writer.write_eof()
                    assert (await reader.read()).decode() == hashlib.sha256(data).hexdigest()
                    writer.close()

                await asyncio.gather(*(one(number, size) for number, size in enumerate(sizes)))
                await until(lambda: here.relay.connections == 0)
                assert here.resident._link is not None
                assert here.resident._link.held == 0
        finally:
            await provider.close()

    asyncio.run(run())
