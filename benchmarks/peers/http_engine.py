"""A scripted engine behind HTTP, in the form of vLLM's answers: 64 tokens, whole, in a burst or 20 ms apart.

    python http_engine.py            prints its port

Answers chat completions (for gateways that forward them) and completions of token ids, with the ids and log-probs of
every token. ``seed`` chooses: 1 waits 20 ms before each token of a stream, 0 does not.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httptools

TOKENS = 64
PROMPT = 256
APART = 0.020
LETTERS = [65 + number % 26 for number in range(TOKENS)]


def logprobs(token: int) -> dict[str, Any]:
    name = f"token_id:{token}"
    return {"text_offset": [0], "token_logprobs": [-0.5], "tokens": [name], "top_logprobs": [{name: -0.5}]}


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def completion_events() -> list[bytes]:
    events = []
    for number, token in enumerate(LETTERS):
        finish = "length" if number == TOKENS - 1 else None
        choice = {"index": 0, "text": chr(token), "logprobs": logprobs(token), "token_ids": [token]}
        choice |= {"finish_reason": finish, "stop_reason": None}
        events.append(
            event({"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]})
        )
    return events


def chat_events() -> list[bytes]:
    events = []
    for number, token in enumerate(LETTERS):
        finish = "length" if number == TOKENS - 1 else None
        shown = {"token": chr(token), "logprob": -0.5, "bytes": [token], "top_logprobs": []}
        choice = {"index": 0, "delta": {"content": chr(token)}, "logprobs": {"content": [shown]}, "token_ids": [token]}
        body = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        body["choices"] = [choice | {"finish_reason": finish}]
        if number == 0:
            body["prompt_token_ids"] = list(range(PROMPT))
        events.append(event(body))
    return events


def chat_whole() -> bytes:
    shown = [{"token": chr(token), "logprob": -0.5, "bytes": [token], "top_logprobs": []} for token in LETTERS]
    message = {"role": "assistant", "content": "".join(map(chr, LETTERS))}
    choice = {"index": 0, "message": message, "logprobs": {"content": shown}, "finish_reason": "length"}
    choice["token_ids"] = LETTERS
    usage = {"prompt_tokens": PROMPT, "completion_tokens": TOKENS, "total_tokens": PROMPT + TOKENS}
    body = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    return json.dumps(body | {"usage": usage, "prompt_token_ids": list(range(PROMPT))}).encode()


DONE = b"data: [DONE]\n\n"
EVENTS = {b"/v1/completions": completion_events(), b"/v1/chat/completions": chat_events()}
WHOLE = chat_whole()
TRIED = json.dumps(
    {"choices": [{"token_ids": [65], "logprobs": {"token_logprobs": [0.0]}, "finish_reason": "length"}]}
).encode()
MODELS = json.dumps({"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 32768}]}).encode()
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def whole(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


BURST = {path: b"".join(map(chunk, events)) + chunk(DONE) + b"0\r\n\r\n" for path, events in EVENTS.items()}


class Engine(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.parser = httptools.HttpRequestParser(self)
        self.body = b""
        self.url = b""

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.url = url

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        body, self.body = self.body, b""
        if self.url not in EVENTS:
            self.transport.write(whole(MODELS))
        elif b'"stream":true' in body or b'"stream": true' in body:
            if b'"seed":1' in body or b'"seed": 1' in body:
                self.task = asyncio.ensure_future(self.slowly(EVENTS[self.url]))
            else:
                self.transport.write(STREAM + BURST[self.url])
        else:
            self.transport.write(whole(WHOLE if self.url == b"/v1/chat/completions" else TRIED))

    async def slowly(self, events: list[bytes]) -> None:
        self.transport.write(STREAM)
        for one in events:
            await asyncio.sleep(APART)
            self.transport.write(chunk(one))
        self.transport.write(chunk(DONE) + b"0\r\n\r\n")


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", 0, backlog=1000)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
