"""Call the gateway's chat-completions route on behalf of a harness that runs in this process.

Small on purpose: it sends what it is told, gives back the reply, and tells apart the two ways a call can fail:
a limit that ends the agent (:class:`LimitReached`) and a failure that is nobody's doing (``EngineError``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from rl_harness.contracts.harness import Endpoint, HarnessContext
from rl_harness.errors import EngineError, PluginError
from rl_harness.records.episode import Termination
from rl_harness.records.turn import Message

#: Error codes of the gateway that end the agent rather than the engine.
_LIMIT_CODES = {"turn_limit": Termination.TURN_LIMIT, "context_length_exceeded": Termination.TOKEN_LIMIT}
#: Only what a chat message may contain goes back to the gateway: servers add fields that others refuse.
_KEPT_FIELDS = ("role", "content", "reasoning_content", "reasoning", "tool_calls")
#: Long generations are normal: the episode's deadline ends them, not a timeout of the transport.
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=30)


class LimitReached(Exception):
    """The session allows no further model call; ``termination`` says which limit was met."""

    def __init__(self, termination: Termination, detail: str) -> None:
        super().__init__(detail)
        self.termination = termination
        self.detail = detail


class _Function(msgspec.Struct):
    name: str = ""
    arguments: str = ""


class RequestedCall(msgspec.Struct):
    """A tool call as it arrived; ``function.arguments`` is JSON text that may be broken."""

    id: str = ""
    function: _Function = msgspec.field(default_factory=_Function)


class Reply(msgspec.Struct):
    """One assistant message: ``message`` goes back into the history unchanged."""

    message: dict[str, Any]
    text: str
    tool_calls: list[RequestedCall]
    finish_reason: str


class _AssistantMessage(msgspec.Struct):
    content: str | None = None
    tool_calls: list[RequestedCall] | None = None


class ChatClient:
    """Chat completions of one session, one call at a time, none of them past the episode's deadline."""

    def __init__(self, context: HarnessContext, endpoint: Endpoint, http: aiohttp.ClientSession) -> None:
        self._context = context
        self._http = http
        self._url = f"{endpoint.base_url}/chat/completions"
        self._model = endpoint.model
        self._headers = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}

    async def complete(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> Reply:
        """One model call. Sampling parameters are the session's, so none are sent.

        Raises :class:`LimitReached` (turns, tokens or time) and ``EngineError``.
        """
        body: dict[str, Any] = {"model": self._model, "messages": messages}
        if tools:
            body["tools"] = tools
        try:
            async with asyncio.timeout(self._context.seconds_left()):
                status, data = await self._post(msgspec.json.encode(body))
        except TimeoutError:
            raise LimitReached(Termination.TIME_LIMIT, "the deadline passed during a model call") from None
        if status != 200:
            raise _failure(status, data)
        return _reply(data)

    async def _post(self, body: bytes) -> tuple[int, bytes]:
        try:
            async with self._http.post(self._url, data=body, headers=self._headers, timeout=_TIMEOUT) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
                raise
            raise EngineError(f"the model call to {self._url} failed: {error or type(error).__name__}") from error


@asynccontextmanager
async def open_client(context: HarnessContext) -> AsyncIterator[ChatClient]:
    """A client on the run's shared HTTP session, or on one of its own where the run has none."""
    if context.endpoint is None:
        raise PluginError("this harness calls a model, and the run gave it no endpoint")
    if context.http is not None:
        yield ChatClient(context, context.endpoint, context.http)
        return
    async with aiohttp.ClientSession() as http:
        yield ChatClient(context, context.endpoint, http)


def to_wire(message: Message) -> dict[str, Any]:
    """A record's message as the chat protocol writes it."""
    wire: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        wire["reasoning_content"] = message.reasoning
    if message.tool_calls:
        wire["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        wire["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        wire["name"] = message.name
    return wire


def opening_messages(context: HarnessContext, system: str | None) -> list[dict[str, Any]]:
    """System prompt, worked examples as real turns, then the instruction."""
    messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    messages.extend(to_wire(example) for example in context.task.examples)
    messages.append({"role": "user", "content": context.task.instruction})
    return messages


def _reply(data: bytes) -> Reply:
    try:
        choice = msgspec.json.decode(data)["choices"][0]
        raw = choice["message"]
        parsed = msgspec.convert(raw, _AssistantMessage)
    except (msgspec.DecodeError, KeyError, IndexError, TypeError) as error:
        raise EngineError(f"the model call returned no chat completion ({error}): {_excerpt(data)}") from error
    return Reply(
        message={field: raw[field] for field in _KEPT_FIELDS if raw.get(field) is not None},
        text=parsed.content or "",
        tool_calls=parsed.tool_calls or [],
        finish_reason=choice.get("finish_reason") or "stop",
    )


def _failure(status: int, data: bytes) -> Exception:
    try:
        error = msgspec.json.decode(data)["error"]
        code, text = error.get("code") or error.get("type"), str(error.get("message", ""))
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        code, text = None, _excerpt(data)
    if status < 500 and code in _LIMIT_CODES:
        return LimitReached(_LIMIT_CODES[code], text)
    return EngineError(f"the model call failed with HTTP status {status}: {text}")


def _excerpt(data: bytes) -> str:
    return data[:300].decode("utf-8", "replace")
