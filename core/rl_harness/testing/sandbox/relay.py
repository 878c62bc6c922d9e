"""Checks of the way to the model through the helper inside, for providers whose sandboxes have a python3."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from rl_harness.contracts.sandbox import Sandbox
from rl_harness.sandboxes.resident import Relay, Resident, tcp
from rl_harness.testing.sandbox.kit import Checks, Context, equal, succeeded, until

checks = Checks()

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

MANY = 200
#: Far beyond what the pipes, windows and buffers on the way hold.
FLOOD = 32 << 20


class Place:
    """A sandbox with a helper in it, and a server of the host behind its relay."""

    def __init__(self, sandbox: Sandbox, resident: Resident, relay: Relay) -> None:
        self.sandbox = sandbox
        self.resident = resident
        self.relay = relay

    async def python(self, code: str) -> bytes:
        """Standard output of a Python program inside that must succeed; ``PORT`` is the relay's."""
        prefix = f"import hashlib, socket, sys, threading, time\nPORT = {self.relay.port}\n"
        return succeeded(await self.sandbox.exec(["python3", "-c", prefix + code], timeout=120))


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


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    writer.close()


@checks.check
async def a_relay_streams_chunk_by_chunk(context: Context) -> None:
    """Each chunk gets there before the next is sent: the server waits for the word of the client."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(b"data: " + line)
            await writer.drain()
        writer.close()

    async with place(await context.sandbox(), serve) as here:
        code = """
s = socket.create_connection(("127.0.0.1", PORT))
f = s.makefile("rb")
for number in range(20):
    s.sendall(b"%d\\n" % number)
    assert f.readline() == b"data: %d\\n" % number
print("streamed")
"""
        equal(await here.python(code), b"streamed\n")
        equal(here.relay.url, f"http://127.0.0.1:{here.relay.port}")


@checks.check
async def a_relay_carries_many_connections_and_every_byte(context: Context) -> None:
    """All are open at once before any is answered."""
    arrived = 0
    everybody = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal arrived
        data = await reader.read()
        arrived += 1
        if arrived == MANY:
            everybody.set()
        await everybody.wait()
        writer.write(data)
        writer.close()

    async with place(await context.sandbox(), serve) as here:
        code = f"""
sockets = [socket.create_connection(("127.0.0.1", PORT)) for _ in range({MANY})]
texts = [bytes([number]) * (1 + 300 * number) for number in range({MANY})]
for each, text in zip(sockets, texts):
    each.sendall(text)
    each.shutdown(socket.SHUT_WR)
print(all(each.makefile("rb").read() == text for each, text in zip(sockets, texts)))
"""
        equal(await here.python(code), b"True\n")

        async def none() -> bool:
            return here.relay.connections == 0

        await until(none, "every connection is forgotten")


@checks.check
async def a_relay_holds_back_whoever_sends_to_one_that_does_not_read(context: Context) -> None:
    """In both directions; and nobody else is held up."""
    sent = 0
    let_go = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        match await reader.readline():
            case b"flood\n":
                with contextlib.suppress(ConnectionError):
                    while sent < FLOOD:
                        writer.write(b"x" * (1 << 16))
                        await writer.drain()
                        sent += 1 << 16
            case b"deaf\n":
                await let_go.wait()
            case line:
                writer.write(line)
        writer.close()

    async with place(await context.sandbox(), serve) as here:
        code = f"""
slow = socket.create_connection(("127.0.0.1", PORT))
slow.sendall(b"flood\\n")
deaf = socket.create_connection(("127.0.0.1", PORT))
deaf.sendall(b"deaf\\n")
deaf.settimeout(1.0)
sent = 0
try:
    while sent < {FLOOD}:
        sent += deaf.send(b"x" * 65536)
except OSError:
    pass
for number in range(10):
    s = socket.create_connection(("127.0.0.1", PORT))
    s.sendall(b"%d\\n" % number)
    assert s.makefile("rb").read() == b"%d\\n" % number
print(sent < {FLOOD})
"""
        equal(await here.python(code), b"True\n", "whether the client was held back")
        let_go.set()
        assert 0 < sent < FLOOD, "the server was not held back"


IN_FLIGHT = """
s = socket.create_connection(("127.0.0.1", PORT))
s.sendall(b"x"); s.recv(1)
open("/tmp/connected", "w").close()
try:
    print(s.recv(1))
except ConnectionResetError:
    print(b"")
"""
AGAIN = """
for _ in range(600):
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
KILL_HELPERS = r"""
for line in /proc/[0-9]*/cmdline; do
  if tr '\0' ' ' < $line | grep -q 'rl-harness[ ]helper'; then kill -9 "$(echo $line | cut -d/ -f3)"; fi
done 2>/dev/null
true
"""


@checks.check
async def a_relay_comes_back_after_its_helper_was_killed(context: Context) -> None:
    """On the same port; a connection in flight breaks."""
    async with place(await context.sandbox(), echo) as here:
        url = here.relay.url
        in_flight = asyncio.create_task(here.python(IN_FLIGHT))
        succeeded(await here.sandbox.exec("until test -e /tmp/connected; do sleep 0.02; done", timeout=120))
        succeeded(await here.sandbox.exec(KILL_HELPERS))
        equal(await in_flight, b"b''\n", "what a connection in flight reads")
        await here.python(AGAIN)
        equal((here.relay.url, here.resident.failed), (url, None), "address and failure")
        assert here.resident.restarts >= 1, "its helper was not killed"


@checks.check
async def a_relay_comes_back_after_its_stream_was_cut(context: Context) -> None:
    """From outside: the provider's own kill of the command that carries it."""
    async with place(await context.sandbox(), echo) as here:
        for number in (1, 2):
            link = here.resident._link
            assert link is not None
            await link._process.kill()

            async def restarted(number: int = number) -> bool:
                return here.resident.restarts >= number

            await until(restarted, "the helper is started again")
            await here.python(AGAIN)
        equal(here.resident.failed, None, "failure")
