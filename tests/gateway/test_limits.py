"""Under load: what is more than may run waits its turn, what was lost comes again once, and nothing is left over."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import struct
import tracemalloc
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from rl_harness.contracts import (
    EngineCapabilities,
    GenerateRequest,
    Renderer,
    TokenChunk,
    WeightManifest,
    WeightSource,
)
from rl_harness.errors import EngineError
from rl_harness.gateway import Gateway, Limits, TokenPolicy
from rl_harness.gateway.limits import Budget
from rl_harness.inference import Replicas
from rl_harness.testing.engine import ScriptedEngine, ScriptedOptions

ASK = {"messages": [{"role": "user", "content": "q"}]}
LONG = "a long reply of many words, so that it comes in more than one chunk"


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):  # only what never happens is to end here, not what a busy machine does late
        while not condition():  # noqa: ASYNC110 - what is waited for announces nothing
            await asyncio.sleep(0.002)


async def answer(bench: Any, body: Any = ASK, **how: Any) -> tuple[int, bytes]:
    async with bench.post(body, **how) as response:
        return response.status, await response.read()


def limit(bench: Any, **limits: Any) -> Any:
    """A session under other limits."""
    bench.gateway.limits = bench.gateway._sessions.limits = replace(bench.gateway.limits, **limits)
    bench.session = bench.open("limited")
    return bench


async def hold(bench: Any) -> None:
    bench.engine.reply = lambda request, prompt: LONG
    bench.engine.gate.clear()


# The queue itself


async def test_a_budget_is_given_in_order() -> None:
    """A large demand is not overtaken for ever by small ones, and one beyond the limit is met when it is alone."""
    budget = Budget(10)
    got: list[int] = []

    async def take(amount: int) -> None:
        await budget.take(amount)
        got.append(amount)

    assert budget.take_now(8)
    tasks = [asyncio.create_task(take(amount)) for amount in (5, 1, 30, 2)]
    await asyncio.sleep(0)
    assert (got, budget.waiting, budget.take_now(1)) == ([], 4, False)
    budget.give(8)
    await asyncio.sleep(0)
    assert (got, budget.used) == ([5, 1], 6)
    budget.give(6)
    await asyncio.sleep(0)
    assert (got, budget.used) == ([5, 1, 30], 30)
    budget.give(30)
    await asyncio.gather(*tasks)
    assert (got, budget.used, budget.waiting) == ([5, 1, 30, 2], 2, 0)


async def test_who_gives_up_waiting_leaves_nothing_taken() -> None:
    budget = Budget(1)
    await budget.take(1)
    first, second, third = (asyncio.create_task(budget.take(1)) for _ in range(3))
    await asyncio.sleep(0)
    first.cancel()
    budget.give(1)  # granted to the second, which is cancelled before it knows
    second.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    await third
    assert (budget.used, budget.waiting) == (1, 0)
    budget.give(1)
    assert budget.take_now(1)


# Calls of one session


async def test_calls_beyond_the_limit_wait(bench: Any) -> None:
    """Fault: 429 makes some agents give up. Streams get comments while they wait; others just take longer."""
    limit(bench, calls=2, keep_alive=0.02)
    await hold(bench)
    asked = [asyncio.create_task(answer(bench, ASK | {"stream": number > 2})) for number in range(6)]
    await until(lambda: bench.session.calls.waiting == 4)
    assert len(bench.engine.requests) == 2
    other = bench.open("other")
    bench.engine.reply = lambda request, prompt: "ok"
    assert (await answer(bench, session=other))[0] == 200
    await asyncio.sleep(0.05)
    bench.engine.gate.set()
    answers = await asyncio.gather(*asked)
    assert [status for status, _ in answers] == [200] * 6
    assert all(body.startswith(b": keep-alive\n\n") for _, body in answers[3:])
    assert all(body.endswith(b"data: [DONE]\n\n") for _, body in answers[3:])
    assert (len(bench.session.turns), bench.session.calls.used) == (6, 0)


async def test_429_when_asked_for(bench: Any) -> None:
    limit(bench, calls=1, refuse=True)
    await hold(bench)
    first = asyncio.create_task(answer(bench))
    await until(lambda: bench.engine.running == 1)
    status, body = await answer(bench)
    assert (status, json.loads(body)["error"]["code"]) == (429, "busy")
    bench.engine.gate.set()
    assert (await first)[0] == 200


async def test_a_waiting_call_can_be_given_up(bench: Any) -> None:
    """By its client or with its session, and its place goes to the next."""
    limit(bench, calls=1)
    await hold(bench)
    first, second, third = (asyncio.create_task(answer(bench)) for _ in range(3))
    await until(lambda: bench.session.calls.waiting == 2)
    second.cancel()
    await until(lambda: bench.session.calls.waiting == 1)
    await bench.gateway.close_session("limited")
    assert [(await task)[0] for task in (first, third)] == [401, 401]
    assert (bench.session.calls.used, bench.session.calls.waiting, bench.session.bodies.used) == (0, 0, 0)


# Bodies


async def test_bodies_beyond_the_limit_are_not_read(bench: Any) -> None:
    """Many large requests of one session at once are held up by TCP, not kept in memory; other sessions go on."""
    limit(bench, session_bodies=3 << 20)
    await hold(bench)
    large = ASK | {"padding": "x" * (1 << 20)}
    asked = [asyncio.create_task(answer(bench, large)) for _ in range(8)]
    await until(lambda: bench.session.bodies.waiting == 6)
    await asyncio.sleep(0.05)
    held = sum(exchange._size for exchange in exchanges(bench) if exchange._pieces)
    assert held < 6 * (64 << 10) + 6 * (256 << 10)
    assert bench.session.bodies.used <= 3 << 20
    other = bench.open("other")
    bench.engine.reply = lambda request, prompt: "ok"
    assert (await answer(bench, session=other))[0] == 200
    bench.engine.gate.set()
    assert [status for status, _ in await asyncio.gather(*asked)] == [200] * 8
    assert bench.session.bodies.used == bench.gateway._bodies.used == 0


def exchanges(bench: Any) -> list[Any]:
    return [one._current for one in bench.gateway._server.connections if one._current is not None]


async def test_a_chunked_body_gives_back_what_it_does_not_need(bench: Any) -> None:
    await hold(bench)

    async def pieces() -> AsyncIterator[bytes]:
        yield json.dumps(ASK).encode()

    key = {"authorization": f"Bearer {bench.session.api_key}"}
    url = f"{bench.gateway.base_url}/chat/completions"
    asking = asyncio.create_task(status_of(bench.http.post(url, data=pieces(), headers=key)))
    await until(lambda: bench.engine.running == 1)
    assert bench.session.bodies.used == bench.gateway._bodies.used == len(json.dumps(ASK))
    bench.engine.gate.set()
    assert await asking == 200


async def status_of(request: Any) -> int:
    async with request as response:
        await response.read()
        status: int = response.status
        return status


# Clients that are cut off


async def send_raw(bench: Any, body: dict[str, Any]) -> socket.socket:
    ours = socket.socket()
    ours.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(ours, ("127.0.0.1", bench.gateway._port))
    data = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
        f"authorization: Bearer {bench.session.api_key}\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    await loop.sock_sendall(ours, head.encode() + data)
    return ours


def cut(connection: socket.socket) -> None:
    """As when its process is killed or the network goes: a reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_the_same_again_while_the_first_runs(bench: Any, stream: bool) -> None:
    """Fault 7, without any header that says so: the cut one is cancelled, the other is the only turn."""
    await hold(bench)
    first = await send_raw(bench, ASK | {"stream": stream})
    await until(lambda: bench.engine.running == 1)
    cut(first)
    second = asyncio.create_task(answer(bench, ASK | {"stream": stream}))
    await until(lambda: len(bench.engine.requests) == 2 and bench.engine.running == 1)
    bench.engine.gate.set()
    assert (await second)[0] == 200
    assert len(await bench.gateway.close_session("s")) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_the_same_again_after_an_answer_that_got_lost(bench: Any, stream: bool) -> None:
    """Fault 7: it was completed, but its client was gone before it read it. The same turn answers the retry."""
    first = await send_raw(bench, ASK | {"stream": stream})
    await until(lambda: len(bench.session.turns) == 1)
    cut(first)
    await until(lambda: bench.session.doubtful == {"s/0"})
    status, body = await answer(bench, ASK | {"stream": stream})
    assert (status, b"ok" in body) == (200, True)
    assert (len(bench.session.turns), len(bench.engine.requests)) == (1, 1)
    assert bench.session.doubtful == set()
    # Now that it arrived, the same again is another question.
    assert (await answer(bench))[0] == 200
    assert len(await bench.gateway.close_session("s")) == 2


async def test_an_agent_that_is_killed_loses_no_turn(bench: Any) -> None:
    """Its connection breaks, and nobody knows whether it read its last answer: what it did is kept."""
    first = await send_raw(bench, ASK)
    await until(lambda: len(bench.session.turns) == 1)
    cut(first)
    await until(lambda: len(bench.session.doubtful) == 1)
    assert len(await bench.gateway.close_session("s")) == 1


async def test_an_answer_that_was_not_even_sent_is_not_stored(bench: Any) -> None:
    before = await bench.ask("p")
    listening = bench.gateway._server.listening.sockets[0]
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    bench.engine.reply = lambda request, prompt: "x" * 200_000
    first = await send_raw(bench, {"messages": [{"role": "user", "content": "p"}, before, *ASK["messages"]]})
    await until(lambda: any(one.congested for one in bench.gateway._server.connections))
    cut(first)
    await until(lambda: len(bench.session.undelivered) == 1)
    bench.engine.reply = lambda request, prompt: "ok"
    await bench.ask("p", before, "another way")
    turns = await bench.gateway.close_session("s")
    assert [turn.id for turn in turns] == ["s/0", "s/2"]
    assert turns[1].parent == "s/0"


async def test_an_ordinary_goodbye_loses_nothing(bench: Any) -> None:
    """A client that has its answer and closes, and one that keeps its connection and asks again."""
    for _ in range(2):
        async with aiohttp.ClientSession() as http:
            key = {"authorization": f"Bearer {bench.session.api_key}"}
            for _ in range(2):
                async with http.post(f"{bench.gateway.base_url}/chat/completions", json=ASK, headers=key) as response:
                    await response.read()
    await until(lambda: not bench.gateway._server.connections)
    assert bench.session.undelivered == bench.session.doubtful == set()
    assert len(await bench.gateway.close_session("s")) == 4


async def test_several_replies_of_which_not_all_are_done_leave_nothing(bench: Any) -> None:
    said = ["x", LONG]
    bench.engine.reply = lambda request, prompt: said.pop(0)
    bench.engine.gate.clear()
    first = await send_raw(bench, ASK | {"n": 2})
    await until(lambda: len(bench.session.turns) == 1 and bench.engine.running == 1)
    cut(first)
    await until(lambda: not bench.session.running)
    assert bench.engine.running == 0
    assert await bench.gateway.close_session("s") == []


# Engines


class Down(ScriptedEngine):
    """Another process, that refuses as many attempts as ``refuses``; ``faults`` break off after the first tokens."""

    refuses = 0

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(trainable=True, context_length=1 << 20, top_logprobs=20, patience=self.patience)

    patience = 30.0

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk]:
        if self.refuses:
            self.refuses -= 1
            raise EngineError("refused")
        async with aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                yield chunk


class Source(WeightSource):
    transport = "file"

    def __init__(self, version: int) -> None:
        self.manifest = WeightManifest(version=version, kind="full", tensors=(), digest="")

    async def buckets(self) -> Any:
        for bucket in ():
            yield bucket


@pytest.fixture
async def down(folder: Path, renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """A gateway before replicas of an engine that says the rest of TEXT from where a prompt leaves it."""
    monkeypatch.setattr("rl_harness.inference.replicas._FIRST_PAUSE", 0.03)
    engine = Down(ScriptedOptions(chunk=2))
    await engine.start(str(folder))
    engine.reply = lambda request, prompt: TEXT[len(prompt.partition("assistant\n")[2]) :]
    replicas = Replicas([engine])
    limits = Limits(keep_alive=0.01)
    async with (
        Gateway({"m": TokenPolicy("m", replicas, renderer)}, limits=limits) as gateway,
        aiohttp.ClientSession() as http,
    ):
        yield Served(engine, replicas, gateway, http)


TEXT = "0123456789"


class Served:
    def __init__(self, engine: Down, replicas: Replicas, gateway: Gateway, http: aiohttp.ClientSession) -> None:
        self.engine = engine
        self.replicas = replicas
        self.gateway = gateway
        self.http = http
        self.session = gateway.open_session("s", policy="m")

    def post(self, body: Any, path: str = "/chat/completions") -> Any:
        key = {"authorization": f"Bearer {self.session.api_key}"}
        return self.http.post(self.gateway.base_url + path, json=body, headers=key)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_comes_back(down: Any, stream: bool) -> None:
    """Before its first token, and in the middle of a reply, which goes on from where it broke off: one turn."""
    down.engine.refuses = 2
    down.engine.faults = [EngineError("gone"), EngineError("gone again")]
    async with down.post(ASK | {"stream": stream}) as response:
        body = await response.read()
        assert response.status == 200, body
    if stream:
        assert b": keep-alive\n\n" in body
        events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith(b"data: {")]
        said = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    else:
        said = json.loads(body)["choices"][0]["message"]["content"]
    (turn,) = down.session.turns
    assert said == turn.message.content == TEXT
    assert (len(turn.completion), down.session.engine_error) == (len(TEXT) + 1, None)


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/chat/completions", b'"engine_error"'), ("/messages", b'"api_error"'), ("/responses", b'_error"')],
)
async def test_an_engine_that_stays_down(down: Any, path: str, kind: bytes) -> None:
    """After a bounded time its protocol's own 5xx, or the error of a stream that comments opened."""
    down.engine.patience = 0.05
    messages = {"input" if path == "/responses" else "messages": ASK["messages"], "max_tokens": 9, "model": "m"}
    for stream in (False, True):
        down.engine.refuses = 1000
        async with down.post(messages | {"stream": stream}, path) as response:
            body = await response.read()
            assert response.status == (200 if body.startswith(b": keep-alive") else 502)
            assert kind in body, body
            assert b"refused" in body
    assert down.session.turns == []
    assert "refused" in down.session.engine_error


async def test_weights_change_in_mid_stream(down: Any) -> None:
    """No error, no gap: the versions are those that sampled each token."""
    said = ""
    async with down.post(ASK | {"stream": True}) as response:
        assert response.status == 200
        version = 0
        async for line in response.content:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    said += choice["delta"].get("content") or ""
                if version < 2:
                    version += 1
                    await down.replicas.update(Source(version), version)
    (turn,) = down.session.turns
    assert said == turn.message.content == TEXT
    assert turn.versions[0] == 0


async def test_an_interrupted_engine_goes_on_with_the_new_weights(down: Any) -> None:
    down.engine.faults = ["interrupted"]
    async with down.post(ASK) as response:
        assert response.status == 200
    assert down.session.turns[0].message.content == TEXT
    assert len(down.engine.requests) == 2


async def test_an_engine_that_gives_no_token_any_more(bench: Any) -> None:
    """Fault 20, the other way: no total timeout, but an engine that hangs is not waited for forever. A call may wait in
    its queue as long as tokens of any other show that the engine is alive."""
    gateway = bench.gateway
    await hold(bench)
    waiting = asyncio.create_task(answer(bench))
    await until(lambda: bench.engine.waiting)
    (call,) = gateway._calls
    call.since -= 10_000
    gateway._progress["m"] -= 10_000
    other = bench.open("other")
    bench.engine.reply = lambda request, prompt: "x"
    assert (await answer(bench, session=other))[0] == 200
    gateway._watch()
    assert bench.engine.running == 1
    gateway._progress["m"] -= 10_000
    gateway._watch()
    status, body = await waiting
    assert (status, json.loads(body)["error"]["code"]) == (504, "engine_timeout")
    assert bench.engine.running == 0
    assert "no token" in (bench.session.engine_error or "")


# The end


async def test_draining(bench: Any) -> None:
    """No new calls, and those that run end as if nothing were."""
    await hold(bench)
    running = asyncio.create_task(answer(bench, ASK | {"stream": True}))
    await until(lambda: bench.engine.running == 1)
    assert await bench.gateway.drain(0.01) is False
    status, body = await answer(bench)
    assert (status, json.loads(body)["error"]["code"]) == (503, "draining")
    draining = asyncio.create_task(bench.gateway.drain(10))
    await asyncio.sleep(0)
    bench.engine.gate.set()
    assert await draining is True
    status, body = await running
    assert (status, body.endswith(b"data: [DONE]\n\n")) == (200, True)
    assert len(bench.session.turns) == 1


async def test_memory_is_flat_over_many_sessions(bench: Any) -> None:
    """Fault 16: a session that was closed leaves nothing, whatever happened in it."""

    async def life(number: int) -> None:
        session = bench.open(f"n{number}")
        await bench.ask("q", session=session)
        async with bench.post(ASK | {"stream": True}, session=session) as response:
            await response.read()
        await bench.gateway.close_session(session.id)

    async def lives(start: int, count: int) -> int:
        for at in range(start, start + count, 20):
            await asyncio.gather(*(life(number) for number in range(at, at + 20)))
        bench.engine.requests.clear()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    await lives(0, 20)
    tracemalloc.start()
    try:
        before = await lives(1000, 20)
        after = await lives(2000, 60)
    finally:
        tracemalloc.stop()
    assert after - before < 30_000  # 500 bytes a session would be too many
    assert len(bench.gateway._sessions) == 1


async def test_a_burst_goes_out_together(bench: Any) -> None:
    """The first token at once, the rest in few pieces: a system call costs more than all else done for a token."""
    bench.engine.reply = lambda request, prompt: " ".join(f"word{number}" for number in range(200))
    async with bench.post(ASK | {"stream": True}) as response:
        pieces = [data async for data in response.content.iter_chunks()]
    events = b"".join(data for data, _ in pieces)
    assert events.count(b"\n\n") > 60
    chunks = sum(end for _, end in pieces)
    assert chunks < events.count(b"\n\n") / 2
    assert events.endswith(b"data: [DONE]\n\n")


async def test_many_streams_at_once(bench: Any) -> None:
    """Hundreds of sessions with an open stream each; every one gets its own reply."""
    await hold(bench)
    bench.engine.reply = lambda request, prompt: "for " + prompt.rpartition("I am ")[2].split("<")[0] + "!"
    sessions = [bench.open(f"n{number}") for number in range(150)]
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        bench.http = http

        async def ask(number: int) -> bytes:
            body = {"messages": [{"role": "user", "content": f"I am {number}"}], "stream": True}
            return (await answer(bench, body, session=sessions[number]))[1]

        asked = [asyncio.create_task(ask(number)) for number in range(len(sessions))]
        await until(lambda: bench.engine.running == len(sessions))
        bench.engine.gate.set()
        answers = await asyncio.gather(*asked)
    for number, session in enumerate(sessions):
        (turn,) = session.turns
        assert turn.message.content == f"for {number}!"
        assert answers[number].endswith(b"data: [DONE]\n\n")
