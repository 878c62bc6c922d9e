"""A real chat-completions server on loopback that answers from a script: a model for tests of harnesses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec
from aiohttp import web

from rl_harness.contracts.harness import Endpoint

Body = Mapping[str, Any]


class ScriptedReply(msgspec.Struct, frozen=True, kw_only=True):
    """What the server answers once: a message, or an error when ``status`` is not 200.

    ``tool_calls`` are ``(name, arguments)`` with the arguments as JSON text. ``delay`` is seconds before the answer.
    ``error`` is the OpenAI error code. ``raw`` replaces the whole body.
    """

    text: str | None = None
    tool_calls: tuple[tuple[str, str], ...] = ()
    finish_reason: str | None = None
    status: int = 200
    error: str = ""
    delay: float = 0.0
    raw: bytes | None = None


Script = Sequence[str | ScriptedReply] | Callable[[Body], str | ScriptedReply]


class ScriptedChat:
    """``async with ScriptedChat(["first", "second"]) as chat``: gives the replies in turn, or what a function of
    the request's body returns, and keeps every body in ``requests``. A script that has run out answers as a
    session out of turns does."""

    def __init__(self, script: Script = (), *, api_key: str = "key-of-this-session", model: str = "scripted") -> None:
        self._script = script
        self._api_key = api_key
        self._model = model
        self._runner: web.AppRunner | None = None
        self._base_url = ""
        self.requests: list[dict[str, Any]] = []
        #: Requests without this session's key.
        self.refused = 0
        #: Requests whose client went away before the answer.
        self.abandoned = 0

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self._base_url = f"http://{host}:{port}/v1"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(base_url=self._base_url, api_key=self._api_key, model=self._model)

    async def _handle(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {self._api_key}":
            self.refused += 1
            return _error(401, "invalid_api_key")
        body = await request.json()
        self.requests.append(body)
        reply = self._next(body)
        if reply.delay:
            try:
                await asyncio.sleep(reply.delay)
            except asyncio.CancelledError:
                self.abandoned += 1
                raise
        if reply.raw is not None:
            return web.Response(status=reply.status, body=reply.raw, content_type="application/json")
        if reply.status != 200:
            return _error(reply.status, reply.error)
        return web.json_response(_completion(reply, len(self.requests), self._model))

    def _next(self, body: Body) -> ScriptedReply:
        if callable(self._script):
            reply = self._script(body)
        elif len(self.requests) <= len(self._script):
            reply = self._script[len(self.requests) - 1]
        else:
            return ScriptedReply(status=403, error="turn_limit")
        return ScriptedReply(text=reply) if isinstance(reply, str) else reply


def _completion(reply: ScriptedReply, number: int, model: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if reply.tool_calls:
        message["tool_calls"] = [
            {"id": f"call_{number}_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for index, (name, arguments) in enumerate(reply.tool_calls)
        ]
    finish_reason = reply.finish_reason or ("tool_calls" if reply.tool_calls else "stop")
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }


def _error(status: int, code: str) -> web.Response:
    error = {"message": f"scripted failure {code}", "type": "invalid_request_error", "code": code}
    return web.json_response({"error": error}, status=status)
