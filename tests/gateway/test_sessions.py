"""Keys, limits, clients that hang up or come again, and sessions that end while something runs."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import openai
import pytest
from rl_harness.errors import EngineError, Unavailable, UsageError
from rl_harness.gateway import Gateway

ASK = {"messages": [{"role": "user", "content": "q"}]}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is waited for announces nothing
            await asyncio.sleep(0.002)


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/admin"), ("GET", "/")]
)
@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer wrong"}, {"authorization": "Basic x"}, {"x-api-key": "rlh-"}]
)
async def test_every_route_needs_a_key(bench: Any, method: str, path: str, headers: dict[str, str]) -> None:
    """Fault 18. Without a key nothing tells which routes there are."""
    url = bench.gateway.base_url.removesuffix("/v1") + path
    async with bench.http.request(method, url, headers=headers) as response:
        assert response.status == 401
        assert (await response.json())["error"]["code"] == "invalid_api_key"


async def test_health_says_nothing(bench: Any) -> None:
    async with bench.http.get(bench.gateway.base_url.removesuffix("/v1") + "/health") as response:
        assert (response.status, await response.read()) == (200, b"")


async def test_a_key_opens_its_session_only(bench: Any) -> None:
    other = bench.open("other")
    await bench.ask("q", session=other)
    assert (len(bench.session.turns), len(other.turns)) == (0, 1)
    async with bench.http.get(f"{bench.gateway.base_url}/nothing", headers={"x-api-key": other.api_key}) as response:
        assert response.status == 404


async def test_keys_are_not_kept(bench: Any) -> None:
    assert bench.session.api_key.encode() not in bench.gateway._sessions._by_key


@pytest.mark.parametrize("name", ["a:b", "a/b c", "é#?", "", "x" * 5000])
async def test_a_session_id_is_any_text(bench: Any, name: str) -> None:
    """Fault 22."""
    session = bench.open(name)
    await bench.ask("q", session=session)
    (turn,) = await bench.gateway.close_session(name)
    assert turn.session == name


async def test_ids_and_policies_are_checked(bench: Any) -> None:
    with pytest.raises(UsageError, match="already open"):
        bench.open("s")
    with pytest.raises(UsageError, match=r"no policy is named 'x'; there are m"):
        bench.gateway.open_session("t", policy="x")


async def test_the_turn_limit(bench: Any) -> None:
    session = bench.open("t", max_turns=2)
    await bench.ask("a", session=session)
    await bench.ask("b", session=session)
    client = bench.client(session)
    with pytest.raises(openai.APIStatusError) as caught:
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "c"}])
    assert caught.value.status_code == 403
    assert (caught.value.type, caught.value.code) == ("turn_limit", "turn_limit")
    assert len(session.turns) == 2
    await client.close()


async def test_the_turn_limit_counts_what_runs(bench: Any) -> None:
    session = bench.open("t", max_turns=1)
    bench.engine.reply = lambda request, prompt: "a long reply"
    bench.engine.gate.clear()
    first = asyncio.create_task(bench.ask("a", session=session))
    await until(lambda: bench.engine.running == 1)
    async with bench.post({"messages": [{"role": "user", "content": "b"}]}, session=session) as response:
        assert response.status == 403
    bench.engine.gate.set()
    await first


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_cancels(bench: Any, stream: bool) -> None:
    """Faults 7 and 11: the generation stops, and no turn is left of it."""
    bench.engine.reply = lambda request, prompt: "a long reply"
    bench.engine.gate.clear()
    asking = asyncio.create_task(_read(bench, ASK | {"stream": stream}))
    await until(lambda: bench.engine.running == 1)
    asking.cancel()
    await until(lambda: bench.engine.running == 0)
    await until(lambda: not bench.session.running)
    assert bench.session.turns == []
    bench.engine.gate.set()
    await bench.ask("q")
    assert len(bench.session.turns) == 1


async def test_a_retry_after_a_cut_is_one_turn(bench: Any) -> None:
    """Fault 7: the client gave up on its request and sends it again while the first may still run."""
    bench.engine.reply = lambda request, prompt: "a long reply"
    bench.engine.gate.clear()
    first = asyncio.create_task(_read(bench, ASK))
    await until(lambda: bench.engine.running == 1)
    second = asyncio.create_task(_read(bench, ASK, {"x-stainless-retry-count": "1"}))
    await until(lambda: len(bench.engine.requests) == 2 and bench.engine.running == 1)
    bench.engine.gate.set()
    assert b"a long reply" in await second
    assert b'"replaced"' in await first
    assert len(bench.session.turns) == 1


async def test_a_retry_of_an_answer_that_got_lost_is_answered_alike(bench: Any) -> None:
    """The turn exists, its reply never arrived: the same turn is given again, not sampled beside it."""
    before = [ASK["messages"][0], {"role": "assistant", "content": "x"}, {"role": "user", "content": "r"}]
    reply = await bench.ask(*before)
    again: Any = {"messages": before}
    for stream in (False, True):
        data = await _read(bench, again | {"stream": stream}, {"x-stainless-retry-count": "2"})
        assert reply["content"].encode() in data
        assert b'"finish_reason":"stop"' in data
    assert len(bench.session.turns) == 1
    assert len(bench.engine.requests) == 1
    # Asked again without saying that it is a retry, the client wants another answer.
    await _read(bench, again)
    assert len(bench.session.turns) == 2


async def test_the_real_clients_retry(bench: Any) -> None:
    """The OpenAI client's connection is cut, it retries by itself, and there is one turn in the end."""
    bench.engine.reply = lambda request, prompt: "a long reply"
    bench.engine.gate.clear()
    client = bench.client().with_options(max_retries=1)
    asking = asyncio.create_task(client.chat.completions.create(model="m", messages=[{"role": "user", "content": "q"}]))
    await until(lambda: bench.engine.running == 1)
    for connection in list(bench.gateway._server.connections):
        connection._transport.abort()
    await until(lambda: len(bench.engine.requests) == 2)
    bench.engine.gate.set()
    assert (await asking).choices[0].message.content == "a long reply"
    assert len(bench.session.turns) == 1
    await client.close()


async def test_closing_a_session_stops_what_runs(bench: Any) -> None:
    """Fault 16: a straggler is cut off, and can never bring its session back."""
    bench.engine.reply = lambda request, prompt: "a long reply"
    await bench.ask("q")
    bench.engine.gate.clear()
    whole = asyncio.create_task(_status(bench, ASK))
    streamed = asyncio.create_task(_read(bench, ASK | {"stream": True}))
    await until(lambda: bench.engine.running == 2)
    turns = await bench.gateway.close_session("s")
    assert len(turns) == 1
    assert bench.engine.running == 0
    assert await whole == (401, "session_closed")
    assert b"session_closed" in await streamed
    assert await _status(bench, ASK) == (401, "invalid_api_key")
    assert await bench.gateway.close_session("s") == []
    assert len(bench.open("s").turns) == 0


async def test_closing_does_not_wait_for_a_client_that_stopped_reading(bench: Any) -> None:
    bench.engine.reply = lambda request, prompt: "x" * 20_000
    listening = bench.gateway._server.listening.sockets[0]
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    ours = socket.socket()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    ours.setblocking(False)
    await asyncio.get_running_loop().sock_connect(ours, ("127.0.0.1", bench.gateway._port))
    body = b'{"stream": true, "messages": [{"role": "user", "content": "q"}]}'
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
        f"authorization: Bearer {bench.session.api_key}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    await asyncio.get_running_loop().sock_sendall(ours, head.encode() + body)
    await until(lambda: any(c.congested for c in bench.gateway._server.connections))
    async with asyncio.timeout(5):
        await bench.gateway.close_session("s")
    assert bench.engine.running == 0
    ours.close()


async def test_closing_the_gateway_ends_everything(bench: Any) -> None:
    bench.engine.reply = lambda request, prompt: "a long reply"
    bench.engine.gate.clear()
    asking = asyncio.create_task(_status(bench, ASK))
    await until(lambda: bench.engine.running == 1)
    await bench.gateway.close()
    assert await asking == (401, "session_closed")
    assert bench.engine.running == 0
    await bench.gateway.close()


async def test_silence_is_filled_with_comments(bench: Any) -> None:
    """One agent gives up after 90 seconds of silence; comments are accepted by all."""
    bench.gateway.limits = replace(bench.gateway.limits, keep_alive=0.02)
    bench.engine.gate.clear()
    bench.engine.reply = lambda request, prompt: "a long reply"
    lines: list[bytes] = []
    async with bench.post(ASK | {"stream": True}) as response:
        async for line in response.content:
            lines.append(line)
            if lines.count(b": keep-alive\n") == 2:
                bench.engine.gate.set()
    assert lines.count(b": keep-alive\n") >= 2
    assert lines[-2] == b"data: [DONE]\n"


async def test_sessions_leave_nothing_behind(bench: Any) -> None:
    """Fault 16, the other half: memory is flat over many sessions."""
    sessions = []
    for number in range(300):
        session = bench.open(f"n{number}")
        sessions.append(weakref.ref(session))
        if number % 50 == 0:
            await bench.ask("q", session=session)
        await bench.gateway.close_session(session.id)
    assert len(bench.gateway._sessions) == 1
    assert len(bench.gateway._sessions._by_key) == 1
    del session
    gc.collect()
    assert [one for one in sessions if one() is not None] == []


async def test_a_port_in_use_is_named(bench: Any) -> None:
    port = bench.gateway._port
    with pytest.raises(Unavailable, match=f"port {port} on 127.0.0.1 is in use") as caught:
        await Gateway({}, port=port).start()
    assert "another port" in str(caught.value.remedy)


async def test_an_address_that_is_not_ours() -> None:
    with pytest.raises(Unavailable, match=r"cannot listen on 192\.0\.2\.1 port 0"):
        await Gateway({}, host="192.0.2.1").start()


async def test_it_listens_on_loopback_only(bench: Any) -> None:
    listening = bench.gateway._server.listening.sockets[0]
    assert listening.getsockname()[0] == "127.0.0.1"
    assert bench.gateway.base_url == f"http://127.0.0.1:{bench.gateway._port}/v1"


async def test_another_host_only_when_asked() -> None:
    gateway = Gateway({}, host="::1") if socket.has_ipv6 else Gateway({}, host="127.0.0.2")
    try:
        await gateway.start()
    except Unavailable:
        pytest.skip("no IPv6 loopback on this machine")
    assert gateway.base_url.startswith("http://[::1]:")
    await gateway.close()


async def test_signals_stay_the_callers() -> None:
    before = signal.getsignal(signal.SIGINT)
    async with Gateway({}):
        assert signal.getsignal(signal.SIGINT) is before


async def _read(bench: Any, body: Any, headers: dict[str, str] | None = None) -> bytes:
    async with bench.post(body, headers=headers) as response:
        data: bytes = await response.read()
        return data


async def _status(bench: Any, body: Any) -> tuple[int, str]:
    async with bench.post(body) as response:
        return response.status, (await response.json()).get("error", {}).get("code")


async def test_a_session_knows_how_its_last_call_ended(bench: Any) -> None:
    """For an agent that says nothing of it: what became of its model, and whether it wanted more turns than it has."""
    session = bench.open("short", max_turns=1)
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    bench.engine.reply = lambda request, prompt: "a long reply"
    bench.engine.faults = [EngineError("it broke")]
    async with bench.post(body, session=session) as response:
        assert response.status == 502
    assert session.engine_error == "it broke"
    async with bench.post(body, session=session) as response:
        assert response.status == 200
    assert (session.engine_error, session.exhausted) == (None, False)
    async with bench.post({**body, "messages": [{"role": "user", "content": "more"}]}, session=session) as response:
        assert response.status == 403
    assert session.exhausted
