"""A helper that lies: it costs its own episode only, in bounded memory and time, and what it says is a result or a
``SandboxError``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from rl_harness.contracts import Sandbox, SandboxSpec
from rl_harness.errors import SandboxError
from rl_harness.sandboxes.local import LocalProvider
from rl_harness.sandboxes.resident import HelperUnavailable, Resident, ResidentSandbox, link, relay, resident, tcp
from rl_harness.sandboxes.resident import helper as wire

pytestmark = pytest.mark.needs("userns")

#: What the agent puts in Python's place. ``frame`` writes one; ``hello`` is an honest greeting.
PROLOGUE = """#!/usr/bin/python3 -IS
import os, struct, sys, time
def frame(kind, stream, payload=b""):
    data = struct.pack("!BII", kind, stream, len(payload)) + payload
    while data:
        data = data[os.write(1, data):]
def hello():
    frame({HELLO}, 0, struct.pack("!10sBIB", b"rl-harness", {VERSION}, 0, 1))
HELLO, LISTEN, LISTENING, EXEC, OPEN, DATA, CREDIT, EOF, RESET, EXIT = range(10)
""".replace("{HELLO}", str(wire.HELLO)).replace("{VERSION}", str(wire.VERSION))

READ = """
def request():
    def read(size):
        data = b""
        while len(data) < size:
            data += os.read(0, size - len(data)) or sys.exit()
        return data
    global started
    if not started:
        started = True
        read(int(sys.argv[-2].split("SIZE = ")[-1].split("len(code) < ")[1].split(":")[0]))
    kind, stream, length = struct.unpack("!BII", read(9))
    return kind, stream, read(length)
started = False
"""


@pytest.fixture
async def sandbox(local: LocalProvider) -> AsyncIterator[Sandbox]:
    sandbox = await local.create(SandboxSpec())
    yield sandbox
    await sandbox.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "START_SECONDS", 1.0)
    monkeypatch.setattr(link, "END_SECONDS", 0.2)
    monkeypatch.setattr(resident, "KILL_SECONDS", 0.3)
    monkeypatch.setattr(resident, "LONGEST_PAUSE", 0.01)
    monkeypatch.setattr(relay, "MAX_CONNECTIONS", 100)


async def hostile(sandbox: Sandbox, body: str) -> ResidentSandbox:
    """The sandbox seen through a helper whose program is ``body``."""
    await sandbox.write_file("/usr/local/bin/python3", (PROLOGUE + READ + body).encode(), mode=0o755)
    return await ResidentSandbox.start(sandbox)


@pytest.mark.parametrize(
    "body",
    [
        "os.write(1, os.urandom(5000))",
        "frame(DATA, 1, b'x' * 100)",
        "os.write(1, struct.pack('!BII', HELLO, 0, 1 << 31)); time.sleep(60)",
        "frame(HELLO, 0, struct.pack('!10sBIB', b'rl-harness', 99, 0, 1)); time.sleep(60)",
        "time.sleep(60)",
        "sys.exit('I will not')",
    ],
)
async def test_a_false_greeting_is_no_helper(sandbox: Sandbox, body: str) -> None:
    with pytest.raises(HelperUnavailable):
        await hostile(sandbox, body)
    assert (await sandbox.exec("echo fine")).stdout == b"fine\n"


@pytest.mark.parametrize(
    "answer",
    [
        "frame(EXIT, stream, struct.pack('!iBB', 70000, 0, 0))",
        "frame(EXIT, stream, b'short')",
        "frame(DATA, stream, b'x' * 2000)",  # beyond the limit
        "frame(99, stream)",
        "frame(EOF, stream)",
        "frame(RESET, stream)",
        "frame(OPEN, stream, struct.pack('!I', 0))",
        "frame(OPEN, 1 << 31, b'')",
        "os.write(1, os.urandom(1 << 20))",
        "os._exit(3)",
    ],
)
async def test_a_false_answer_is_a_result_that_says_so(sandbox: Sandbox, answer: str) -> None:
    view = await hostile(sandbox, f"hello()\nwhile True:\n    kind, stream, _ = request()\n    {answer}\n")
    result = await view.exec("echo hello", output_limit=1_000, timeout=20)
    assert result.exit_code == 137
    assert b"not known" in result.stderr
    assert len(result.stdout) <= 1_000
    await view.close()


async def test_an_answer_that_lies_is_taken_for_the_agents_word_and_the_sandbox_tells_the_truth(
    sandbox: Sandbox,
) -> None:
    lie = (
        "hello()\nwhile True:\n    kind, stream, _ = request()\n    frame(EXIT, stream, struct.pack('!iBB', 0, 0, 0))\n"
    )
    view = await hostile(sandbox, lie)
    assert (await view.exec("exit 3")).ok
    assert (await view.inner.exec("exit 3")).exit_code == 3


async def test_one_that_never_answers_runs_into_the_hosts_own_timeout(sandbox: Sandbox) -> None:
    view = await hostile(sandbox, "hello()\ntime.sleep(600)\n")
    started = time.monotonic()
    result = await view.exec("echo hello", timeout=0.3)
    assert (result.timed_out, result.stdout) == (True, b"")
    assert time.monotonic() - started < 10
    running = asyncio.create_task(view.exec("echo hello"))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_one_that_reads_nothing_holds_up_nobody_for_ever(sandbox: Sandbox) -> None:
    view = await hostile(sandbox, "hello()\ntime.sleep(600)\n")
    result = await view.exec("cat", stdin=b"x" * 20_000_000, timeout=0.3)
    assert result.timed_out
    process = await view.spawn("cat")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await process.write(b"x" * 20_000_000)
    async with asyncio.timeout(10):
        await process.kill()
        await process.wait()
    await view.close()


FLOODS = {
    "of data for nobody": "frame(DATA, 7, b'x' * 65536)",
    "of connections": "frame(OPEN, (1 << 31) + (n % (1 << 31)), struct.pack('!I', 0))",
    "of data on one connection": "n == 1 and frame(OPEN, 1 << 31, bytes(4)); frame(DATA, 1 << 31, b'x' * 65536)",
    "of credit": "n == 1 and frame(OPEN, 1 << 31, bytes(4)); frame(CREDIT, 1 << 31, b'\\xff' * 4)",
    "of greetings": "hello()",
    "of empty frames": "frame(DATA, 1 << 31)",
    "of noise on stderr": "os.write(2, b'x' * 65536)",
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS.keys())
async def test_a_flood_is_bounded_and_leaves_the_event_loop_free(sandbox: Sandbox, flood: str) -> None:
    connections = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        try:
            while True:
                writer.write(b"x" * 65536)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            connections -= 1
            writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    listening = "kind, stream, _ = request()\nframe(LISTENING, stream, struct.pack('!HI', 4711, 0))\n"
    body = f"hello()\n{listening}n = 0\nwhile True:\n    n += 1\n    {flood}\n"
    await sandbox.write_file("/usr/local/bin/python3", (PROLOGUE + READ + body).encode(), mode=0o755)
    held = await Resident.start(sandbox)
    await held.relay(tcp("127.0.0.1", server.sockets[0].getsockname()[1]))
    await asyncio.to_thread(Path("/proc/self/clear_refs").write_text, "5")
    before, worst, started = memory("VmRSS"), 0.0, time.monotonic()
    while time.monotonic() - started < 0.3:
        turn = time.thread_time()  # a busy machine may take the core away for seconds
        await asyncio.sleep(0)
        worst = max(worst, time.thread_time() - turn)
    assert connections <= relay.MAX_CONNECTIONS
    assert memory("VmHWM") - before < 150_000, "more than 150 MB of memory"
    assert worst < 1.0, f"the event loop was busy with one thing for {worst:.1f} s"
    async with asyncio.timeout(20):
        await held.close()
    server.close()
    assert (await sandbox.exec("echo fine")).stdout == b"fine\n"


def memory(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1])


async def test_killing_everything_costs_the_helper_not_the_sandbox(local: LocalProvider) -> None:
    view = await ResidentSandbox.start(await local.create(SandboxSpec()))
    result = await view.exec("kill -9 -1; sleep 60", timeout=60)
    assert not result.ok
    for _ in range(5):
        try:
            assert (await view.exec("echo fine")).ok
        except AssertionError:
            continue
        break
    else:
        pytest.fail("no command works any more")


def links_tasks() -> list[str]:
    names = [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]
    return [name for name in names if name.startswith("Link.")]


@pytest.mark.parametrize("body", ["sys.exit('I will not')", "os.write(1, os.urandom(5000)); time.sleep(60)"])
async def test_a_helper_that_does_not_start_leaves_no_task(sandbox: Sandbox, body: str) -> None:
    with pytest.raises(HelperUnavailable):
        await hostile(sandbox, body)
    assert links_tasks() == []


async def test_a_helper_that_is_lost_for_good_leaves_no_task(local: LocalProvider) -> None:
    view = await ResidentSandbox.start(await local.create(SandboxSpec()))
    await view.inner.write_file("/usr/local/bin/python3", b"#!/bin/sh\nexit 3\n", mode=0o755)
    await view.exec("kill -9 -1; sleep 60", timeout=60)
    while view.resident.failed is None:  # noqa: ASYNC110 -- nothing is told when it is given up
        await asyncio.sleep(0.01)
    assert links_tasks() == []
    await view.close()


async def test_a_dead_sandbox_is_no_result(local: LocalProvider, crash: Callable[[Sandbox], None]) -> None:
    view = await ResidentSandbox.start(await local.create(SandboxSpec()))
    running = asyncio.create_task(view.exec("touch /tmp/runs; sleep 60"))
    assert (await view.inner.exec("until test -e /tmp/runs; do sleep 0.02; done", timeout=60)).ok
    crash(view.inner)
    with pytest.raises(SandboxError):
        await running


async def test_a_killed_worker_takes_its_command_along(local: LocalProvider) -> None:
    view = await ResidentSandbox.start(await local.create(SandboxSpec()))
    daemon = "setsid sh -c 'while :; do echo >> /tmp/alive; sleep 0.01; done' &"
    result = await view.exec(f"({daemon}); until test -s /tmp/alive; do sleep 0.01; done; kill -9 $PPID; sleep 60")
    assert result.signal == 9
    size = len(await view.read_file("/tmp/alive"))
    await asyncio.sleep(0.1)
    assert len(await view.read_file("/tmp/alive")) == size
    assert (await view.exec("echo fine")).stdout == b"fine\n"
