"""Connections from an isolated sandbox to the host: the kit's checks, then large ones, failing ends, a lost helper."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_harness.contracts import NetworkPolicy, Sandbox, SandboxSpec
from rl_harness.errors import SandboxError
from rl_harness.sandboxes.local import LocalProvider
from rl_harness.sandboxes.process import ProcessProvider
from rl_harness.sandboxes.resident import HelperUnavailable, Resident, agents_view, tcp
from rl_harness.testing.sandbox import RELAY_CHECKS, Check
from rl_harness.testing.sandbox.relay import echo, place

pytestmark = pytest.mark.needs("userns")


@pytest.fixture
async def sandbox(local: LocalProvider) -> Sandbox:
    return await local.create(SandboxSpec())


@pytest.mark.parametrize("check", RELAY_CHECKS, ids=str)
async def test_conformance(check: Check, local: LocalProvider, tmp_path: Path) -> None:
    """What every provider's streams must carry; what follows is the relay's own business."""
    await check.run(local, tmp_path)


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


@pytest.mark.parametrize("read", [1, 100], ids=["unread", "read"])
async def test_who_answers_without_end_is_told_when_nobody_is_there(sandbox: Sandbox, read: int) -> None:
    lost = asyncio.Event()

    async def endless(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                writer.write(b"x" * 100)
                await writer.drain()
                await asyncio.sleep(0.01)
        except ConnectionResetError:
            lost.set()

    async with place(sandbox, endless) as here:
        code = f"""
s = socket.create_connection(("127.0.0.1", PORT))
print(len(s.recv({read})))
"""
        assert await here.python(code) == f"{read}\n".encode()
        async with asyncio.timeout(20):
            await lost.wait()


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
