"""A session in the path: with its own key, or by its secret; and that nothing of either gets anywhere else."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from typing import Any
from urllib.parse import quote

import aiohttp
import openai
import pytest
from rl_harness.errors import UsageError
from rl_harness.gateway import Gateway
from rl_harness.gateway.errors import ApiError
from rl_harness.gateway.exchange import Exchange
from rl_harness.gateway.sessions import KeyDigests, digest
from rl_harness.redaction import RedactingFormatter

ASK = {"messages": [{"role": "user", "content": "q"}]}


def root(bench: Any) -> str:
    url: str = bench.gateway.root_url
    return url


async def post(bench: Any, path: str, key: str | None = None, **headers: str) -> tuple[int, Any]:
    sent = dict(headers) | ({"authorization": f"Bearer {key}"} if key else {})
    async with bench.http.post(root(bench) + path + "/chat/completions", json=ASK, headers=sent) as response:
        return response.status, await response.json()


async def test_a_session_by_its_path_and_its_key(bench: Any) -> None:
    status, _ = await post(bench, bench.session.path, bench.session.api_key)
    assert (status, len(bench.session.turns)) == (200, 1)


async def test_a_session_by_its_secret_alone(bench: Any) -> None:
    """128 bits at least, and another one for each session."""
    secret = bench.session.secret_path.split("/")[2]
    assert len(secret.removeprefix("rlp-")) * 6 >= 128
    assert bench.open("t").secret_path != bench.session.secret_path
    for key in (None, "anything", bench.session.api_key):
        assert (await post(bench, bench.session.secret_path, key))[0] == 200
    client = openai.AsyncOpenAI(base_url=root(bench) + bench.session.secret_path, api_key="none", max_retries=0)
    await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "q"}])
    await client.close()
    assert len(bench.session.turns) == 4


async def test_a_foreign_key_opens_no_path(bench: Any) -> None:
    """Whether the session that a path names exists makes no difference."""
    other = bench.open("other")
    for path in (bench.session.path, "/s/nobody/v1", bench.session.secret_path):
        status, answer = await post(bench, path, other.api_key)
        assert (status, answer["error"]["code"]) == (403, "foreign_key")
    for path in (bench.session.path, "/s/nobody/v1", "/s//v1", "/s/rlp-guess/v1"):
        for key in (None, "wrong"):
            status, answer = await post(bench, path, key)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    assert bench.session.turns == other.turns == []


async def test_prefixes_cannot_be_guessed_from_beginnings(bench: Any) -> None:
    secret = bench.session.secret
    for guess in (secret[:-1], secret + "x", secret.swapcase(), "rlp-", secret[4:], quote(secret) + "%00"):
        assert (await post(bench, f"/s/{guess}/v1"))[0] == 401
    assert bench.session.secret.encode() not in bench.gateway._sessions._by_secret


@pytest.mark.parametrize("name", ["a:b", "a/b c", "é#?%", "..", "x" * 500])
async def test_any_id_has_a_path(bench: Any, name: str) -> None:
    session = bench.open(name)
    key = {"authorization": f"Bearer {session.api_key}"}
    reader, writer = await asyncio.open_connection("127.0.0.1", bench.gateway._port)
    body = json.dumps(ASK).encode()
    head = f"POST {session.path}/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    writer.write((head + f"authorization: {key['authorization']}\r\nconnection: close\r\n\r\n").encode() + body)
    assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    writer.close()
    assert len(session.turns) == 1


async def test_a_closed_session_has_no_path(bench: Any) -> None:
    session = bench.open("t")
    await bench.gateway.close_session("t")
    assert (await post(bench, session.secret_path))[0] == 401
    assert (await post(bench, session.path, session.api_key))[0] == 401
    again = bench.open("t")
    assert (await post(bench, session.secret_path))[0] == 401
    assert (await post(bench, again.path, session.api_key))[0] == 401


async def test_whoever_asks_whether_anybody_is_there_learns_nothing(bench: Any) -> None:
    for path in ("/", "/s/x/", bench.session.path.removesuffix("/v1") + "/", "/s/rlp-x/"):
        async with bench.http.head(root(bench) + path) as response:
            assert (response.status, response.headers["content-length"]) == (200, "0")


async def test_other_routes_by_a_path(bench: Any) -> None:
    async with bench.http.get(root(bench) + bench.session.secret_path + "/models") as response:
        assert (await response.json())["data"][0]["id"] == "m"
    async with bench.http.get(root(bench) + f"/s/{bench.session.secret}/health") as response:
        assert response.status == 404
        assert bench.session.secret not in await response.text()


async def test_no_web_page_may_call(bench: Any) -> None:
    """CORS is closed, and a host name that was pointed here is not ours."""
    asked = {"origin": "https://example.org", "access-control-request-method": "POST"}
    for path in ("/v1/chat/completions", "/health", "/", "/s/x/v1/messages"):
        async with bench.http.options(root(bench) + path, headers=asked) as response:
            assert response.status == 405
            assert not [name for name in response.headers if name.lower().startswith("access-control")]
    key = {"authorization": f"Bearer {bench.session.api_key}"}
    async with bench.http.post(f"{root(bench)}/v1/chat/completions", json=ASK, headers=key | asked) as response:
        assert response.status == 200
        assert not [name for name in response.headers if name.lower().startswith("access-control")]
    for host, status in [
        ("evil.example", 421),
        ("evil.example:80", 421),
        ("localhost.evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:9", 200),
        ("agent.localhost", 200),
    ]:
        async with bench.http.get(f"{root(bench)}/v1/models", headers=key | {"host": host}) as response:
            assert response.status == status, host


async def test_further_host_names_when_told() -> None:
    async with Gateway({}, hosts=["gateway.internal"]) as gateway, aiohttp.ClientSession() as http:
        for host, status in (("gateway.internal:80", 200), ("other.internal", 421)):
            async with http.get(gateway.root_url + "/health", headers={"host": host}) as response:
                assert response.status == status


async def test_mounted_routes_are_on_the_listening_socket_only(bench: Any) -> None:
    """They ask for their own key; no relay into a sandbox reaches them."""
    seen = []

    async def handler(exchange: Exchange) -> None:
        if exchange.headers.get(b"authorization") != b"Bearer admin":
            raise ApiError(401, "no", type="authentication_error")
        seen.append((exchange.path, await exchange.body(100)))
        await exchange.respond(200, b"{}")

    bench.gateway.mount("/rl", handler)
    for path in ("/rl", "/rl/sessions"):
        async with bench.http.post(root(bench) + path, data=b"x", headers={"authorization": "Bearer admin"}) as got:
            assert got.status == 200
    async with bench.http.post(f"{root(bench)}/rl", headers={"authorization": "Bearer x"}) as got:
        assert got.status == 401
    async with bench.http.post(f"{root(bench)}/rlx", headers={"authorization": "Bearer admin"}) as got:
        assert got.status == 401
    assert seen == [("/rl", b"x"), ("/rl/sessions", b"x")]
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    await asyncio.get_running_loop().connect_accepted_socket(bench.gateway.inference_protocol, theirs)
    reader, writer = await asyncio.open_connection(sock=ours)
    for target in (b"/rl/sessions", b"http://127.0.0.1/rl/sessions", b"//rl/sessions", b"/v1/../rl/sessions"):
        writer.write(b"POST " + target + b" HTTP/1.1\r\nhost: x\r\nauthorization: Bearer admin\r\n\r\n")
        assert (await reader.readuntil(b"\r\n")) == b"HTTP/1.1 401 Unauthorized\r\n"
        await reader.readuntil(b'invalid_api_key"}}')
    writer.close()
    assert len(seen) == 2
    for path in ("/", "/v1", "/v1/x", "/s", "/s/x", "rl"):
        with pytest.raises(ValueError, match="cannot be mounted"):
            bench.gateway.mount(path, handler)


async def test_keys_and_secret_paths_are_in_no_log(bench: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    def fail(request: Any, prompt: str) -> str:
        raise RuntimeError(f"{bench.session.secret_path} and {bench.session.api_key}")

    bench.engine.reply = fail
    assert (await post(bench, bench.session.secret_path))[0] == 500
    assert (await post(bench, bench.session.path, bench.session.api_key))[0] == 500
    said = caplog.text + "".join(record.exc_text or "" for record in caplog.records)
    assert "RuntimeError" in said
    assert bench.session.secret not in said
    assert bench.session.api_key not in said
    for text in (repr(bench.session), repr(bench.gateway)):
        assert bench.session.secret not in text
        assert bench.session.api_key not in text
    line = RedactingFormatter("%(message)s").format(
        logging.makeLogRecord({"msg": "POST %s/messages %s", "args": (bench.session.path, bench.session.api_key)})
    )
    assert line == "POST /s/[redacted]/v1/messages [redacted: session key]"


async def test_a_key_given_out_before(bench: Any) -> None:
    """Known by its digest only; so is the secret of the path."""
    session = bench.open("online", digests=KeyDigests(digest("rlh-before"), digest("rlp-before")))
    assert (await post(bench, "/v1", "rlh-before"))[0] == 200
    assert (await post(bench, session.path, "rlh-before"))[0] == 200
    assert (await post(bench, "/s/rlp-before/v1"))[0] == 200
    assert len(session.turns) == 3
    for path in ("/s//v1", session.secret_path):
        assert (await post(bench, path))[0] == 401
    assert (await post(bench, "/v1", ""))[0] == 401
    with pytest.raises(UsageError, match="another session's key"):
        bench.open("other", digests=session.digests)


@pytest.mark.parametrize("secret", [False, True])
@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/v1/v1/messages", "give it the address without /v1"),
        ("/v1/v1/messages/count_tokens", "give it the address without /v1"),
        ("/chat/completions", "give this client the address that ends in /v1"),
        ("/messages", "give this client the address that ends in /v1"),
        ("/v1/embeddings", "there is no POST /v1/embeddings here"),
    ],
)
async def test_a_client_with_the_address_of_another_is_told_its_own(
    bench: Any, path: str, says: str, secret: bool
) -> None:
    before = bench.session.secret_path.removesuffix("/v1") if secret else ""
    headers = {} if secret else {"x-api-key": bench.session.api_key}
    async with bench.http.post(root(bench) + before + path, json=ASK, headers=headers) as response:
        assert response.status == 404
        assert (await response.json())["error"]["message"].endswith(says)
