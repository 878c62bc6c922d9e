"""What the way through a sandbox's relay costs beside a direct connection to the same gateway, and what a command costs
through the helper beside the sandbox's own exec.

    python benchmarks/relay.py [--sandbox local] [--rounds 20] [--megabytes 50] [-o memory=1GiB ...]

The same client program runs on this machine, connected directly, and in a sandbox without network, connected through
the relay; a round has both, so that what else runs here falls on both alike. Prints medians over the rounds and their
ratio. A chunk carries the time at which it was written, so that its way is timed alone; a sandbox on another machine
has another clock, and its chunks are left out. Exits 1 when a command through the helper takes over 5 ms, or a request
through the relay over 3 ms more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from rl_harness.contracts import Sandbox, SandboxProvider, SandboxSpec
from rl_harness.gateway import Gateway, TokenPolicy
from rl_harness.gateway.renderers.template import TemplateOptions, TemplateRenderer
from rl_harness.plugins import load_registry
from rl_harness.records import SamplingParams
from rl_harness.sandboxes.resident import Resident, tcp
from rl_harness.testing.engine import ScriptedEngine, ScriptedOptions
from rl_harness.testing.tokenizer import write_tokenizer

EXEC_LIMIT_MS = 5.0
REQUEST_LIMIT_MS = 3.0
CHUNKS = 100
REQUESTS = 20
COMMANDS = 5

CLIENT = """
import http.client, json, socket, struct, sys, time
gateway, plain, key, megabytes, chunks, requests = json.loads(sys.argv[1])
clock = time.perf_counter
result = {"request": [], "first": [], "chunk": []}
connection = http.client.HTTPConnection("127.0.0.1", gateway)
headers = {"authorization": "Bearer " + key, "content-type": "application/json"}
def ask(stream):
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": stream}
    started = clock()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    assert response.status == 200, response.read()
    first = response.readline() if stream else b""
    at = clock() - started
    response.read()
    return at, clock() - started
ask(False), ask(True)
for _ in range(requests):
    result["request"].append(ask(False)[1])
    result["first"].append(ask(True)[0])
connection.close()

def call(word):
    s = socket.create_connection(("127.0.0.1", plain))
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    s.sendall(word)
    return s
s = call(b"chunks\\n").makefile("rb")
for _ in range(chunks):
    (written,) = struct.unpack("!d", s.read(8))
    result["chunk"].append(time.monotonic() - written)
size = megabytes << 20
s = call(b"down  \\n")
started, left = clock(), size
while left:
    left -= len(s.recv(1 << 18))
result["down"] = clock() - started
s = call(b"up    \\n")
block = b"x" * (1 << 18)
started = clock()
for _ in range(size // len(block)):
    s.sendall(block)
s.shutdown(socket.SHUT_WR)
s.recv(1)
result["up"] = clock() - started
print(json.dumps(result))
"""


def server(megabytes: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    """Answers one word: ``chunks`` with times 2 ms apart, ``down`` with much data, ``up`` when all has arrived."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        word = (await reader.readline()).strip()
        if word == b"chunks":
            for _ in range(CHUNKS):
                writer.write(struct.pack("!d", time.monotonic()))
                await asyncio.sleep(0.002)
        elif word == b"down":
            for _ in range(megabytes * 4):
                writer.write(b"x" * (1 << 18))
                await writer.drain()
        else:
            while await reader.read(1 << 18):
                pass
            writer.write(b"x")
        await writer.drain()
        writer.close()

    return serve


class Bench:
    def __init__(self, gateway: Gateway, key: str, plain: int, megabytes: int) -> None:
        self.gateway, self.key, self.plain, self.megabytes = gateway, key, plain, megabytes

    def arguments(self, gateway: int, plain: int) -> str:
        return json.dumps([gateway, plain, self.key, self.megabytes, CHUNKS, REQUESTS])

    async def direct(self) -> dict[str, list[float]]:
        port = int(self.gateway.base_url.split(":")[2].split("/")[0])
        command = [sys.executable, "-c", CLIENT, self.arguments(port, self.plain)]
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        out, _ = await process.communicate()
        return json.loads(out)

    async def relayed(self, sandbox: Sandbox, gateway: int, plain: int) -> dict[str, list[float]]:
        done = await sandbox.exec(["python3", "-c", CLIENT, self.arguments(gateway, plain)])
        if not done.ok:
            raise SystemExit(f"the client in the sandbox failed: {done.stderr.decode('utf-8', 'replace')}")
        return json.loads(done.stdout)


async def seconds(work: Callable[[], Awaitable[object]]) -> float:
    started = time.perf_counter()
    await work()
    return time.perf_counter() - started


async def measure(provider: SandboxProvider, rounds: int, megabytes: int) -> tuple[dict[str, float], dict[str, float]]:
    """Medians in ms (MB/s for down and up) of the direct way, and of the relay."""
    engine, renderer = ScriptedEngine(ScriptedOptions(replies=("word " * 30,))), TemplateRenderer(TemplateOptions())
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = write_tokenizer(Path(folder) / "tokenizer")
        await engine.start(str(tokenizer))
        renderer.load(tokenizer)
    plain = await asyncio.start_server(server(megabytes), "127.0.0.1", 0)
    plain_port = plain.sockets[0].getsockname()[1]
    ways: tuple[dict[str, list[float]], dict[str, list[float]]] = ({}, {})
    async with Gateway({"m": TokenPolicy("m", engine, renderer)}) as gateway:
        key = gateway.open_session("s", policy="m", sampling=SamplingParams()).api_key
        bench = Bench(gateway, key, plain_port, megabytes)
        spec = SandboxSpec(network=next(iter(sorted(provider.capabilities.network))))
        sandbox = await provider.create(spec)
        resident = await Resident.start(sandbox)
        ports = [
            (await resident.relay(each)).port for each in (gateway.inference_protocol, tcp("127.0.0.1", plain_port))
        ]
        for _ in range(rounds):
            for way, place in [*zip(ways, (sandbox, resident), strict=True)] * COMMANDS:
                way.setdefault("exec", []).append(await seconds(lambda place=place: place.exec(["true"])))
            for way, result in zip(ways, (await bench.direct(), await bench.relayed(sandbox, *ports)), strict=True):
                for name, value in result.items():
                    way.setdefault(name, []).append(statistics.median(value) if isinstance(value, list) else value)
        await resident.close()
        await sandbox.close()
    plain.close()

    def medians(way: dict[str, list[float]]) -> dict[str, float]:
        return {
            name: megabytes * 1.048576 / statistics.median(values)
            if name in ("up", "down")
            else statistics.median(values) * 1000
            for name, values in way.items()
        }

    return medians(ways[0]), medians(ways[1])


LINES = {
    "request": ("model call, ms", "direct"),
    "first": ("first chunk of a stream, ms", "direct"),
    "chunk": ("way of one chunk, ms", "direct"),
    "down": ("into the sandbox, MB/s", "direct"),
    "up": ("out of the sandbox, MB/s", "direct"),
    "exec": ("command, ms", "own exec"),
}


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sandbox", default="local")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--megabytes", type=int, default=50)
    parser.add_argument("-o", action="append", default=[], metavar="KEY=VALUE", help="option of the sandbox")
    asked = parser.parse_args()
    registry = load_registry()
    provider = registry.create("sandboxes", asked.sandbox, dict(option.split("=", 1) for option in asked.o))
    try:
        await provider.preflight()
        before, after = await measure(provider, asked.rounds, asked.megabytes)
    finally:
        await provider.close()
    print(f"sandbox {asked.sandbox}, medians of {asked.rounds} rounds")
    for name, (what, baseline) in LINES.items():
        ratio = after[name] / before[name]
        print(f"{what:<30}{baseline} {before[name]:8.2f}   helper {after[name]:8.2f}   ratio {ratio:.2f}")
    slow = after["exec"] > EXEC_LIMIT_MS or after["request"] - before["request"] > REQUEST_LIMIT_MS
    return int(slow)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
