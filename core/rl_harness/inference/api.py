"""The engine ``api``: a model behind an OpenAI-compatible address. It streams, retries what failed before its first
byte, and knows no total timeout: long generations are long."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, Literal

import aiohttp
import msgspec
from pydantic import Field

from rl_harness.contracts.common import Options
from rl_harness.contracts.engine import ChatEngine, ModelInfo
from rl_harness.errors import EngineError, RequestRefused, Unavailable

_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
#: The request is at fault, not the upstream.
_REFUSED = frozenset({400, 413, 422})
_ERROR_TEXT = 2000
_MAX_EVENT = 16 << 20
_JSON = {"content-type": "application/json"}
_decode = msgspec.json.Decoder().decode


class ApiOptions(Options):
    base_url: str = Field("https://api.openai.com/v1", description="address of the API, up to and including /v1")
    api_key_env: str = Field("OPENAI_API_KEY", description="environment variable that holds the key; unset sends none")
    connect_timeout: float = Field(30.0, gt=0, description="seconds to reach the address")
    idle_timeout: float = Field(600.0, gt=0, description="seconds without a byte before a reply counts as dead")
    retries: int = Field(5, ge=0, description="further attempts after 429, 5xx and connection errors")
    backoff: float = Field(1.0, gt=0, description="seconds before the first further attempt, doubled each time")
    max_backoff: float = Field(60.0, gt=0, description="seconds at most between attempts")
    max_tokens_key: Literal["max_tokens", "max_completion_tokens"] = Field(
        "max_tokens", description="the field in which this API takes the limit"
    )
    max_connections: int = Field(256, ge=1, description="connections open at once")


class ApiEngine(ChatEngine):
    """Can be evaluated, not trained: nobody knows what ids it sampled."""

    api = 1
    Options = ApiOptions

    def __init__(self, options: ApiOptions) -> None:
        super().__init__(options)
        self._options = options
        self._url = options.base_url.rstrip("/") + "/chat/completions"
        self._http: aiohttp.ClientSession | None = None
        self._model = ""

    async def preflight(self) -> None:
        """Raises ``Unavailable`` when the address does not answer or refuses the key."""
        async with self._session() as http:
            try:
                async with http.get(self._options.base_url.rstrip("/") + "/models") as response:
                    if response.status in (401, 403):
                        raise Unavailable(
                            f"{self._options.base_url} refuses the key ({response.status})",
                            remedy=f"set the environment variable {self._options.api_key_env}",
                        )
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                raise Unavailable(
                    f"{self._options.base_url} does not answer: {_reason(error)}",
                    remedy="check --base-url; it ends in /v1 for most servers",
                ) from error

    async def start(self, model: str) -> ModelInfo:
        self._model = model
        self._http = self._session()
        return ModelInfo(name=model)

    def _session(self) -> aiohttp.ClientSession:
        key = os.environ.get(self._options.api_key_env, "")
        return aiohttp.ClientSession(
            headers={"authorization": f"Bearer {key}"} if key else {},
            connector=aiohttp.TCPConnector(limit=self._options.max_connections),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=self._options.connect_timeout, sock_read=self._options.idle_timeout
            ),
            trust_env=True,
        )

    async def complete(self, body: Mapping[str, Any]) -> AsyncGenerator[Mapping[str, Any]]:
        """The upstream's chunks. Raises ``EngineError`` with its status and message, ``RequestRefused`` where the
        request is at fault."""
        if self._http is None:
            raise EngineError("the api engine was not started")
        payload = dict(body) | {"model": self._model, "stream": True}
        if "max_tokens" in payload:
            payload[self._options.max_tokens_key] = payload.pop("max_tokens")
        async with await self._post(self._http, payload) as response:
            if response.content_type != "text/event-stream":
                yield _as_chunk(await _whole(response))
                return
            try:
                async for data in _events(response.content):
                    yield data
            except (aiohttp.ClientError, TimeoutError, ValueError, msgspec.MsgspecError) as error:
                raise EngineError(f"{self._url}: the reply broke off: {_reason(error)}") from error

    async def _post(self, http: aiohttp.ClientSession, payload: Mapping[str, Any]) -> aiohttp.ClientResponse:
        """A response with a good status, after as many attempts as it takes and is allowed."""
        attempt = 0
        body = msgspec.json.encode(payload)
        while True:
            wait: float | None = None
            status: int | None = None
            try:
                response = await http.post(self._url, data=body, headers=_JSON)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                failure = f"{self._url}: {_reason(error)}"
                retry = True
            else:
                if response.status < 300:
                    return response
                text, code = await _error_of(response)
                if response.status in _REFUSED:
                    raise RequestRefused(text, code=code, status=response.status)
                status = response.status
                failure = f"{self._url} answered {response.status}: {text}"
                retry = response.status in _RETRIED
                wait = _retry_after(response.headers.get("retry-after"))
            if not retry or attempt >= self._options.retries:
                raise EngineError(f"{failure} (after {attempt + 1} attempts)" if attempt else failure, status=status)
            await asyncio.sleep(self._pause(attempt, wait))
            attempt += 1

    def _pause(self, attempt: int, asked: float | None) -> float:
        """Full jitter, so that many sessions do not come back at once; at least what the upstream asked for."""
        longest: float = min(self._options.backoff * 2**attempt, self._options.max_backoff)
        pause = longest * (0.5 + random.random() / 2)
        return pause if asked is None else min(max(pause, asked), self._options.max_backoff)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[Mapping[str, Any]]:
    """The data of server-sent events, until [DONE]. Raises ``ValueError`` for what is not JSON."""
    buffer = bytearray()
    async for piece in content.iter_any():
        buffer += piece
        while (end := buffer.find(b"\n")) >= 0:
            line = bytes(buffer[:end]).strip()
            del buffer[: end + 1]
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            yield _decode(data)
        if len(buffer) > _MAX_EVENT:
            raise ValueError(f"an event of more than {_MAX_EVENT} bytes")


async def _whole(response: aiohttp.ClientResponse) -> Mapping[str, Any]:
    """The body of an upstream that does not stream."""
    try:
        value = json.loads(await response.read())
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise EngineError(f"{response.url}: the reply cannot be read: {_reason(error)}") from error
    if not isinstance(value, dict):
        raise EngineError(f"{response.url}: the reply is no chat completion")
    return value


def _as_chunk(completion: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = [
        {**choice, "delta": choice.get("message")}
        for choice in completion.get("choices") or ()
        if isinstance(choice, dict)
    ]
    return {**completion, "choices": choices}


async def _error_of(response: aiohttp.ClientResponse) -> tuple[str, str | None]:
    """What an upstream says went wrong: its message and its code."""
    try:
        data = await response.content.read(_ERROR_TEXT)
    except (aiohttp.ClientError, TimeoutError):
        data = b""
    response.release()
    text = data.decode(errors="replace")
    try:
        error = json.loads(text)["error"]
        code = error.get("code")
        return str(error["message"]), code if isinstance(code, str) else None
    except (ValueError, LookupError, TypeError, AttributeError):
        return text or str(response.reason), None


def _retry_after(value: str | None) -> float | None:
    try:
        return None if value is None else max(0.0, float(value))
    except ValueError:
        return None  # a date; our own pause will do


def _reason(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.strerror:
        return f"{error.host}:{error.port}: {error.os_error.strerror}"
    return str(error) or type(error).__name__
