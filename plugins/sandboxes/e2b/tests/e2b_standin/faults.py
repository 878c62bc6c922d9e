"""Faults on demand: a rule names requests and how the next of them go wrong."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fnmatch
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclasses.dataclass
class Rule:
    """``request`` is a pattern of requests such as ``POST /v2/sandboxes``; ``times`` requests meet it.

    ``latency`` seconds pass first. ``status`` is then the answer, with ``retry_after``, in place of doing what was
    asked; with ``answer_lost`` it is done all the same and the connection closed. ``cut_after`` closes the connection
    after that many bytes of the answer's body. ``body`` is the answer though what was asked is done.
    """

    request: str
    times: int = 1
    latency: float = 0.0
    status: int | None = None
    message: str = ""
    retry_after: float | None = None
    answer_lost: bool = False
    cut_after: int | None = None
    body: str | None = None


class Cut(Exception):
    """Ends an answer in its middle; the connection is closed already."""


def hang_up(send: Any) -> None:
    """Close a connection without a word, which ASGI has no message for: ``send`` is uvicorn's, of this request."""
    getattr(send, "beneath", send).__self__.transport.abort()


class Faults:
    """Middleware: counts requests, and has some go wrong."""

    def __init__(self, app: App) -> None:
        self._app = app
        self.rules: list[Rule] = []
        self.calls: dict[str, int] = {}

    def _take(self, request: str) -> Rule | None:
        for rule in self.rules:
            if fnmatch.fnmatchcase(request, rule.request):
                rule.times -= 1
                if rule.times <= 0:
                    self.rules.remove(rule)
                return rule
        return None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = f"{scope['method']} {scope['path']}"
        self.calls[request] = self.calls.get(request, 0) + 1
        rule = self._take(request)
        if rule is None:
            with contextlib.suppress(Cut):
                await self._app(scope, receive, send)
            return
        await asyncio.sleep(rule.latency)
        if rule.body is not None:
            await self._app(scope, receive, _nowhere)
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": rule.status or 200, "headers": headers})
            await send({"type": "http.response.body", "body": rule.body.encode()})
            return
        if rule.answer_lost:
            await self._app(scope, receive, _nowhere)
            hang_up(send)
            return
        if rule.status is not None:
            await answer(send, rule.status, rule.message, rule.retry_after)
            return
        with contextlib.suppress(Cut):
            await self._app(scope, receive, send if rule.cut_after is None else _cutting(send, rule.cut_after))


async def _nowhere(message: Any) -> None:
    return


def _cutting(send: Send, left: int) -> Send:
    async def cut(message: Any) -> None:
        nonlocal left
        body = message.get("body", b"")
        if message["type"] == "http.response.body":
            if len(body) > left:
                await send({"type": "http.response.body", "body": body[:left], "more_body": True})
                await asyncio.sleep(0.05)  # for it to get there
                hang_up(send)
                raise Cut
            left -= len(body)
        await send(message)

    cut.beneath = send  # type: ignore[attr-defined]
    return cut


async def answer(send: Send, status: int, message: str, retry_after: float | None = None) -> None:
    """E2B's form of an error."""
    headers = [(b"content-type", b"application/json")]
    if retry_after is not None:
        headers.append((b"retry-after", f"{retry_after:g}".encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    body = json.dumps({"code": status, "message": message}).encode()
    await send({"type": "http.response.body", "body": body})
