"""Clients of envd's RPC that wait where E2B says that there are too many requests, which the SDK's own do not."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import TypeVar

from e2b import AsyncSandbox
from e2b.api import proxy_to_config
from e2b.api.client_async import get_pyqwest_transport
from e2b.envd.client_async import PlainHTTPErrorTransport
from e2b.envd.client_shared import ENVD_JSON_CODEC, ENVD_RPC_COMPRESSION
from e2b.envd.interceptors import build_interceptors
from e2b.retry import parse_retry_after
from pyqwest import Client, Request, Response, Transport

T = TypeVar("T")

_TOO_MANY = 429
_FIRST_WAIT, _LONGEST_WAIT = 0.2, 20.0


class _Patient:
    """Repeats a request that was turned down unread for being one too many, for ``patience`` seconds and after the
    pauses that the answers ask for. No other answer: after a 503, nobody knows whether a command runs."""

    def __init__(self, inner: Transport, patience: float) -> None:
        self._inner = inner
        self._patience = patience

    async def execute(self, request: Request) -> Response:
        content = request.content
        if not isinstance(content, bytes):  # of a request whose answer is a stream; one message
            content = b"".join([chunk async for chunk in content])
        deadline = time.monotonic() + self._patience
        wait = _FIRST_WAIT
        while True:
            again = Request(method=request.method, url=request.url, headers=request.headers, content=content)
            response = await self._inner.execute(again)
            if response.status != _TOO_MANY:
                return response
            asked = parse_retry_after(response.headers.get("retry-after"))
            pause = wait * random.uniform(0.5, 1.5) if asked is None else asked
            if time.monotonic() + pause > deadline:
                return response
            await response.aclose()
            await asyncio.sleep(pause)
            wait = min(2 * wait, _LONGEST_WAIT)


def rpc_client(kind: Callable[..., T], machine: AsyncSandbox, patience: float) -> T:
    """A client of one of envd's services, as the SDK makes them, with patience."""
    config = machine.connection_config
    transport = get_pyqwest_transport(proxy_to_config(config.proxy), http_version=config.http_version)
    return kind(
        machine.envd_api_url,
        codec=ENVD_JSON_CODEC,
        interceptors=build_interceptors(config, machine.envd_api_url),
        http_client=Client(PlainHTTPErrorTransport(_Patient(transport, patience))),
        **ENVD_RPC_COMPRESSION,
    )
