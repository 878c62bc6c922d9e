"""What a sandbox reaches of the gateway: its model, with a key, and nothing else; streams arrive as they are made."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import pytest
from rl_harness.contracts import SandboxSpec
from rl_harness.sandboxes.local import LocalProvider
from rl_harness.sandboxes.resident import agents_view

BODY = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}


async def connected(bench) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    await asyncio.get_running_loop().connect_accepted_socket(bench.gateway.inference_protocol, theirs)
    return await asyncio.open_connection(sock=ours)


async def ask(bench, method: str, path: str, body: bytes = b"", key: str | None = None) -> tuple[int, bytes]:
    """One request over a connection of its own; status and body."""
    reader, writer = await connected(bench)
    authorization = f"authorization: Bearer {key}\r\n" if key else ""
    head = f"{method} {path} HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n{authorization}"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    answer = await reader.read()
    writer.close()
    return int(answer.split()[1]), answer.partition(b"\r\n\r\n")[2]


async def test_a_model_call_is_answered(bench) -> None:
    status, body = await ask(bench, "POST", "/v1/chat/completions", json.dumps(BODY).encode(), bench.session.api_key)
    assert status == 200
    assert json.loads(body)["choices"][0]["message"]["role"] == "assistant"
    assert (await ask(bench, "GET", "/v1/models", key=bench.session.api_key))[0] == 200
    assert len(bench.session.turns) == 1


async def test_nothing_is_answered_without_a_key(bench) -> None:
    for key in (None, "wrong"):
        assert (await ask(bench, "POST", "/v1/chat/completions", json.dumps(BODY).encode(), key))[0] == 401
        assert (await ask(bench, "GET", "/v1/models", key=key))[0] == 401


@pytest.mark.parametrize("path", ["/health", "/", "/v1/rewards", "/v1/sessions", "/admin", "/metrics", "/v1/../health"])
async def test_there_is_nothing_but_inference(bench, path: str) -> None:
    for method in ("GET", "POST", "PUT", "DELETE"):
        assert (await ask(bench, method, path, key=bench.session.api_key))[0] == 404


async def test_closing_the_gateway_closes_its_connections(bench) -> None:
    reader, writer = await connected(bench)
    await bench.gateway.close()
    async with asyncio.timeout(20):
        assert await reader.read() == b""
    writer.close()
    with pytest.raises(ConnectionRefusedError):
        bench.gateway.inference_protocol()


STREAM = """
import json, os, urllib.request
body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "stream": True}
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["KEY"]}
request = urllib.request.Request(os.environ["URL"] + "/v1/chat/completions", json.dumps(body).encode(), headers)
with urllib.request.urlopen(request) as response:
    for line in response:
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                if choice["delta"].get("content"):
                    print(choice["delta"]["content"], end="|", flush=True)
"""


@pytest.mark.needs("userns")
async def test_a_stream_reaches_the_inside_chunk_by_chunk(bench, tmp_path: Path) -> None:
    bench.engine.reply = lambda request, text: "one two three four five six seven eight nine ten"
    bench.engine.gate.clear()
    provider = LocalProvider(LocalProvider.Options(state_dir=tmp_path / "state"))
    try:
        sandbox = await provider.create(SandboxSpec())
        async with agents_view(sandbox, commands=False, target=bench.gateway.inference_protocol) as view:
            process = await view.sandbox.spawn(
                ["python3", "-c", STREAM], env={"KEY": bench.session.api_key, "URL": view.url or ""}
            )
            pieces = []
            async with asyncio.timeout(60):
                async for name, chunk in process.output():
                    assert name == "stdout", chunk
                    pieces.append(chunk)
                    # Only now may the engine go on: had anything on the way waited for more, nothing would come.
                    if b"ten" in chunk:
                        bench.engine.gate.set()
                        continue
                    while not bench.engine.waiting:  # noqa: ASYNC110 -- the engine sets no event
                        await asyncio.sleep(0.001)
                    bench.engine.waiting = False
                    bench.engine.gate.set()
                    await asyncio.sleep(0)
                    bench.engine.gate.clear()
                assert await process.wait() == 0
    finally:
        bench.engine.gate.set()
        await provider.close()
    assert b"".join(pieces).replace(b"|", b"") == b"one two three four five six seven eight nine ten"
    assert len(pieces) > 2


@pytest.mark.needs("userns")
async def test_an_agent_that_hangs_up_inside_stops_its_model_call(bench, tmp_path: Path) -> None:
    bench.engine.reply = lambda request, text: "one two three four five six seven eight nine ten"
    bench.engine.gate.clear()
    provider = LocalProvider(LocalProvider.Options(state_dir=tmp_path / "state"))
    try:
        sandbox = await provider.create(SandboxSpec())
        async with agents_view(sandbox, commands=False, target=bench.gateway.inference_protocol) as view:
            hang_up = STREAM.replace("print(", "os._exit(print(").replace("flush=True)", "flush=True) or 0)")
            environment = {"KEY": bench.session.api_key, "URL": view.url or ""}
            done = await view.sandbox.exec(["python3", "-c", hang_up], env=environment, timeout=60)
            assert (done.exit_code, done.stderr) == (0, b"")
            async with asyncio.timeout(20):
                while bench.engine.running or bench.session.running:  # noqa: ASYNC110 -- neither sets an event
                    await asyncio.sleep(0.01)
    finally:
        bench.engine.gate.set()
        await provider.close()
