"""The gateway under many sessions: streams at once, and what sessions that came and went leave in memory.

    python benchmarks/gateway_load.py [--streams 1000] [--sessions 10000] [--tokens 64] [--interval 0.02]

A scripted engine stands for the model: it gives each stream a token every ``interval`` seconds. Clients are another
process. Printed: tokens a second through the gateway and CPU of each, how late tokens arrive, and the process's memory
after every tenth of the sessions, each of which has a conversation of two calls before it is closed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path

from rl_harness.contracts import GenerateRequest, TokenChunk
from rl_harness.gateway import Gateway, Limits, TokenPolicy
from rl_harness.gateway.renderers.template import TemplateOptions, TemplateRenderer
from rl_harness.testing.engine import ScriptedEngine, ScriptedOptions
from rl_harness.testing.tokenizer import write_tokenizer

CLIENT = """
import asyncio, json, sys, time, aiohttp
url, keys, stream, calls = json.loads(sys.stdin.read())
late = []
async def converse(http, key):
    messages = [{"role": "system", "content": "You are a shell agent. " * 5}]
    for turn in range(calls):
        messages.append({"role": "user", "content": f"Output {turn}: 12 34"})
        body = {"model": "m", "messages": messages, "stream": stream}
        async with http.post(url + "/chat/completions", json=body, headers={"x-api-key": key}) as response:
            assert response.status == 200, await response.text()
            began = time.perf_counter()
            if stream:
                done = 0
                async for line in response.content:
                    done += line.startswith(b"data: [DONE]")
                assert done == 1
            else:
                messages.append((await response.json())["choices"][0]["message"])
            late.append(time.perf_counter() - began)
async def main():
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as http:
        await asyncio.gather(*(converse(http, key) for key in keys))
    late.sort()
    print(json.dumps([late[len(late) // 2], late[-1]]))
asyncio.run(main())
"""


class PacedEngine(ScriptedEngine):
    """One token every ``interval`` seconds to each request."""

    interval = 0.0

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk]:
        clock = asyncio.get_running_loop().time
        due = clock()
        async with aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                self.requests.clear()  # which it remembers for tests
                due += self.interval
                await asyncio.sleep(max(0.0, due - clock()))
                yield chunk


async def clients(url: str, keys: Sequence[str], *, stream: bool, calls: int) -> list[float]:
    """Median and longest time from a reply's head to its end, in seconds."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate(json.dumps([url, list(keys), stream, calls]).encode())
    if process.returncode:
        raise SystemExit("the clients failed")
    times: list[float] = json.loads(said)
    return times


async def streams(gateway: Gateway, engine: PacedEngine, count: int, tokens: int, interval: float) -> None:
    engine.interval = interval
    engine.reply = lambda request, prompt: [1] * tokens
    keys = [gateway.open_session(f"s{number}", policy="m").api_key for number in range(count)]
    cpu, wall = time.process_time(), time.perf_counter()
    median, longest = await clients(gateway.base_url, keys, stream=True, calls=1)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    for number in range(count):
        (turn,) = await gateway.close_session(f"s{number}")
        assert turn.completion_tokens == tokens
    total = count * tokens
    print(
        f"{count} streams at once, {tokens} tokens each, one every {interval * 1e3:.0f} ms:\n"
        f"  {total / wall:.0f} tokens/s, {cpu / total * 1e6:.0f} us of CPU a token, the engine's included\n"
        f"  a reply takes {median:.2f} s in the median, {longest:.2f} s at most; engine {tokens * interval:.2f} s"
    )


async def sessions(gateway: Gateway, engine: PacedEngine, count: int) -> None:
    engine.interval = 0.0
    engine.reply = lambda request, prompt: "```bash\ncat input.txt\n```"
    batch = max(count // 10, 1)
    for start in range(0, count, batch):
        names = [f"n{number}" for number in range(start, min(start + batch, count))]
        keys = [gateway.open_session(name, policy="m").api_key for name in names]
        await clients(gateway.base_url, keys, stream=False, calls=2)
        for name in names:
            assert len(await gateway.close_session(name)) == 2
        gc.collect()
        print(f"  after {start + len(names):6d} sessions: {memory():.0f} MiB")


def memory() -> float:
    """Resident, in MiB."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # the most there was
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--interval", type=float, default=0.02, help="seconds from one token to the next")
    how = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4 * how.streams), hard), hard))
    with tempfile.TemporaryDirectory() as folder:
        path = write_tokenizer(Path(folder))
        renderer = TemplateRenderer(TemplateOptions())
        renderer.load(path)
        engine = PacedEngine(ScriptedOptions(chunk=1))
        await engine.start(str(path))
        async with Gateway({"m": TokenPolicy("m", engine, renderer)}, limits=Limits()) as gateway:
            await streams(gateway, engine, how.streams, how.tokens, how.interval)
            print(f"{how.sessions} sessions of two calls, opened and closed, at most a tenth of them at once")
            await sessions(gateway, engine, how.sessions)


if __name__ == "__main__":
    asyncio.run(main())
