"""Our gateway, recording everything, beside rLLM's and a bare aiohttp pass-through, before one scripted HTTP engine.

    python benchmarks/gateway_peers.py [--rounds 5] [--scale 1.0] [--without-peer]

Every request asks 256 prompt tokens and 64 of completion: plain, streamed in a burst, and streamed 20 ms apart, at
concurrency 1 and 200. Prints, as medians over rounds in which all take their turns, the processor time of the gateway's
process for each request (storing what was recorded included), what it adds to the median time of an answer and of the
first token beside the engine alone, and requests a second. Exits 1 when ours takes over 0.5 ms of processor time plain,
or over 1.5 times the pass-through streamed, adds over 0.5 ms plain or 1 ms streamed at concurrency 1, or answers fewer
than 5 times the peer's requests a second. The peer gets an environment of its own at the first run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rl_harness.inference.wire import Client

HERE = Path(__file__).resolve().parent / "peers"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "rl-harness/benchmarks"
PEER = "rllm-model-gateway==0.1.0"
TEXT = "Read the file input.txt and write the sum of its two numbers. " * 4
KINDS = ("plain", "burst", "apart")
#: Requests of one round: at concurrency 1, and at 200.
REQUESTS = {"plain": (150, 2000), "burst": (150, 2000), "apart": (4, 400)}
MANY = 200
#: Milliseconds that may pass before a stream's first token goes on, far less than until the next one comes.
FIRST = 2.0


class Target:
    """One server process. ``path(number)`` and ``headers(number)`` lead to the session of one of the clients."""

    def __init__(self, name: str, process: subprocess.Popen[str], port: int) -> None:
        self.name = name
        self.process = process
        self.port = port
        self.keys: list[str] = []

    @property
    def processor(self) -> float:
        """Seconds of all its threads, to the nanosecond; their ticks would be a hundredth each."""
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def command(self, line: str) -> list[str]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return list(json.loads(self.process.stdout.readline()))

    def client(self, number: int) -> Client:
        path = f"/sessions/s{time.time_ns()}-{number}/v1" if self.name == "rllm" else "/v1"
        headers = {"authorization": f"Bearer {self.keys[number]}"} if self.keys else {}
        address = f"http://127.0.0.1:{self.port}{path}"
        return Client(address, headers=headers, connect_timeout=30, idle_timeout=120)


def start(name: str, command: list[str | Path]) -> Target:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return Target(name, process, int(process.stdout.readline()))


def start_peer(engine: int, folder: Path) -> Target:
    python = peer_environment() / "bin/rllm-model-gateway"
    port = free_port()
    command = [python, "--port", str(port), "--worker", f"http://127.0.0.1:{engine}/v1"]
    command += ["--host", "127.0.0.1", "--db-path", folder / "traces.db", "--log-level", "error"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, text=True)
    wait_for(port)
    return Target("rllm", process, port)


def peer_environment() -> Path:
    folder = CACHE / "rllm-model-gateway"
    if not (folder / "installed").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([folder / "bin/python", "-m", "pip", "install", "-q", PEER], check=True)
        (folder / "installed").touch()
    return folder


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def wait_for(port: int) -> None:
    for _ in range(300):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the peer did not start")


class Sample:
    """One round of one target: processor milliseconds a request, medians in milliseconds, requests a second."""

    def __init__(self, processor: float, answer: float, first: float, rate: float) -> None:
        self.processor = processor
        self.answer = answer
        self.first = first
        self.rate = rate


async def ask(client: Client, body: bytes) -> tuple[float, float]:
    started = time.perf_counter()
    async with await client.request("POST", "/chat/completions", body) as response:
        data = await response.chunk()
        first = time.perf_counter() - started
        size = len(data)
        while piece := await response.chunk():
            size += len(piece)
        if response.status != 200 or size < 300:
            raise SystemExit(f"{response.status}: {data[:300]!r}")
    return time.perf_counter() - started, first


async def load(target: Target, kind: str, clients: int, requests: int) -> Sample:
    if target.name == "ours":
        target.keys = target.command(f"open {clients}")
    before, started = target.processor, time.perf_counter()
    times: list[tuple[float, float]] = []

    async def one(number: int) -> None:
        client = target.client(number)
        for turn in range(requests // clients):
            content = f"{number} {turn} {TEXT}"[:244]  # 256 ids with those of the template
            body = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 64}
            if kind != "plain":
                body |= {"stream": True, "seed": int(kind == "apart")}
            times.append(await ask(client, json.dumps(body).encode()))
        client.close()

    await asyncio.gather(*(one(number) for number in range(clients)))
    seconds = time.perf_counter() - started
    if target.name == "ours":
        target.command("store")
    if target.name == "rllm":
        await asyncio.sleep(1.0)  # its traces are stored behind the answers
    used = target.processor - before
    answers, firsts = zip(*times, strict=True)
    return Sample(
        used / len(times) * 1e3, statistics.median(answers) * 1e3, statistics.median(firsts) * 1e3, len(times) / seconds
    )


async def measure(targets: list[Target], rounds: int, scale: float) -> dict[tuple[str, int, str], list[Sample]]:
    samples: dict[tuple[str, int, str], list[Sample]] = {}
    for number in range(rounds + 1):
        for kind in KINDS:
            for clients, requests in zip((1, MANY), REQUESTS[kind], strict=True):
                for target in targets:
                    sample = await load(target, kind, clients, max(int(requests * scale), clients))
                    if number:  # the first round warms everything up
                        samples.setdefault((kind, clients, target.name), []).append(sample)
    return samples


def report(samples: dict[tuple[str, int, str], list[Sample]], names: list[str]) -> list[str]:
    def median(kind: str, clients: int, name: str, what: Callable[[Sample], float]) -> float:
        return statistics.median(what(sample) for sample in samples[kind, clients, name])

    missed = []
    print(f"{'':16}{'gateway':14}{'CPU ms':>8}{'x bare':>8}{'+ answer ms':>13}{'+ first ms':>12}{'requests/s':>12}")
    for kind in KINDS:
        for clients in (1, MANY):
            base = {name: median(kind, clients, name, lambda s: s.processor) for name in names}
            alone = [median(kind, clients, "engine", what) for what in (lambda s: s.answer, lambda s: s.first)]
            rates = {name: median(kind, clients, name, lambda s: s.rate) for name in names}
            for name in names[1:]:
                answer = median(kind, clients, name, lambda s: s.answer) - alone[0]
                first = median(kind, clients, name, lambda s: s.first) - alone[1]
                ratio = base[name] / base["bare"]
                row = f"{kind} {clients}" if name == "bare" else ""
                print(f"{row:16}{name:14}{base[name]:8.2f}{ratio:8.2f}{answer:13.2f}{first:12.2f}{rates[name]:12.0f}")
                if name == "ours":
                    if kind == "plain" and base[name] > 0.5:
                        missed.append(f"{kind} {clients}: {base[name]:.2f} ms of CPU (at most 0.5)")
                    if kind != "plain" and ratio > 1.5:
                        missed.append(f"{kind} {clients}: {ratio:.2f} x the pass-through (at most 1.5)")
                    if clients == 1 and answer > (0.5 if kind == "plain" else 1.0):
                        missed.append(f"{kind} {clients}: adds {answer:.2f} ms")
                    if clients == 1 and kind != "plain" and first > FIRST:
                        missed.append(f"{kind} {clients}: the first token comes {first:.2f} ms later (at most {FIRST})")
            if "rllm" in names and kind != "apart" and rates["ours"] < 5 * rates["rllm"]:
                missed.append(
                    f"{kind} {clients}: {rates['ours'] / rates['rllm']:.1f} x the peer's requests (at least 5)"
                )
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of requests in each round")
    parser.add_argument("--without-peer", action="store_true", help="neither install nor measure rLLM's")
    arguments = parser.parse_args()
    targets: list[Target] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            engine = start("engine", [sys.executable, HERE / "http_engine.py"])
            targets.append(engine)
            address = f"http://127.0.0.1:{engine.port}"
            targets.append(start("bare", [sys.executable, HERE / "passthrough.py", address]))
            targets.append(start("ours", [sys.executable, HERE / "our_gateway.py", address]))
            if not arguments.without_peer:
                targets.append(start_peer(engine.port, Path(folder)))
            samples = asyncio.run(measure(targets, arguments.rounds, arguments.scale))
        finally:
            for target in targets:
                target.process.kill()
                target.process.wait()
    missed = report(samples, [target.name for target in targets])
    print("missed:\n  " + "\n  ".join(missed) if missed else "every figure is reached")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
