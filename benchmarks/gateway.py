"""CPU time of one model call through the gateway, as a multiple of what the HTTP server alone costs.

    python benchmarks/gateway.py [--sessions 50] [--turns 10]

Both servers run in this process and are asked by another one, with the same growing conversations; a scripted
engine stands for the model. The baseline is aiohttp's server, which reads the body and answers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web
from rl_harness.gateway import Gateway, TokenPolicy
from rl_harness.gateway.listening import listen
from rl_harness.gateway.renderers.template import TemplateOptions, TemplateRenderer
from rl_harness.testing.engine import ScriptedEngine, ScriptedOptions
from rl_harness.testing.tokenizer import write_tokenizer

REPLY = "```bash\ncat input.txt\n```"

CLIENT = """
import asyncio, json, sys, aiohttp
url, keys, turns, stream, reply = json.loads(sys.argv[1])
async def converse(http, key):
    messages = [{"role": "system", "content": "You are a shell agent. " * 5}]
    for turn in range(turns):
        messages.append({"role": "user", "content": f"Output {turn}: 12 34"})
        body = {"model": "m", "messages": messages, "stream": stream}
        headers = {"authorization": f"Bearer {key}"}
        async with http.post(url + "/chat/completions", json=body, headers=headers) as response:
            text = await response.text()
            assert response.status == 200, text
        messages.append({"role": "assistant", "content": reply})
async def main():
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await asyncio.gather(*(converse(http, key) for key in keys))
asyncio.run(main())
"""


async def bare(request: web.BaseRequest) -> web.Response:
    await request.read()
    return web.Response(body=b" " * 400, content_type="application/json")


async def ask(url: str, keys: Sequence[str], turns: int, *, stream: bool = False) -> float:
    """CPU seconds of this process for each request of a client process."""
    asked = json.dumps([url, list(keys), turns, stream, REPLY])
    before = time.process_time()
    client = await asyncio.create_subprocess_exec(sys.executable, "-c", CLIENT, asked)
    if await client.wait():
        raise SystemExit("the client failed")
    return (time.process_time() - before) / (len(keys) * turns)


async def measure_bare(sessions: int, turns: int) -> float:
    runner = web.ServerRunner(web.Server(bare, access_log=None))
    await runner.setup()
    listening = listen("127.0.0.1", 0)
    await web.SockSite(runner, listening).start()
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
    seconds = await ask(url, [str(number) for number in range(sessions)], turns)
    await runner.cleanup()
    return seconds


async def measure_gateway(folder: Path, sessions: int, turns: int, *, stream: bool) -> float:
    """Without the engine's own share, which is measured by asking it the same again."""
    renderer = TemplateRenderer(TemplateOptions())
    renderer.load(folder)
    engine = ScriptedEngine(ScriptedOptions(replies=(REPLY,), chunk=1 if stream else 1000))
    await engine.start(str(folder))
    async with Gateway({"m": TokenPolicy("m", engine, renderer)}) as gateway:
        keys = [gateway.open_session(str(number), policy="m").api_key for number in range(sessions)]
        seconds = await ask(gateway.base_url, keys, turns, stream=stream)
    requests = list(engine.requests)
    before = time.process_time()
    for request in requests:
        async for _ in engine.generate(request):
            pass
    return seconds - (time.process_time() - before) / len(requests)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=50)
    parser.add_argument("--turns", type=int, default=10)
    how = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = write_tokenizer(Path(folder))
        baseline = await measure_bare(how.sessions, how.turns)
        print(f"aiohttp alone        {baseline * 1e3:.3f} ms of CPU a request")
        for name, stream in (("gateway", False), ("gateway, streamed", True)):
            seconds = await measure_gateway(path, how.sessions, how.turns, stream=stream)
            print(f"{name:20} {seconds * 1e3:.3f} ms, {seconds / baseline:.1f} x")


if __name__ == "__main__":
    asyncio.run(main())
