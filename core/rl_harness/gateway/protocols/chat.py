"""The chat-completions protocol: OpenAI's request bodies in, its responses and event streams out."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from rl_harness.contracts.renderer import Delta, ToolSpec
from rl_harness.gateway.arguments import dump_object
from rl_harness.gateway.calls import Call, Finish, NamedTool, Piece, Token, ToolChoice
from rl_harness.gateway.errors import ApiError, bad_request
from rl_harness.gateway.protocols.base import Protocol, Reply, Request, sse
from rl_harness.gateway.sampling import ClientSampling, resolve
from rl_harness.gateway.sessions import Session
from rl_harness.gateway.tree import Conversation
from rl_harness.gateway.upstream import as_openai_call
from rl_harness.records.turn import Message, ToolCall, Turn

MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
#: Fields that change what is sampled, with the values that change nothing. Our own engines cannot honour others.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "response_format": (None, {"type": "text"}),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
}
#: Fields this module has turned into something else; everything else is passed on to a chat API.
_OURS = frozenset(
    {"messages", "tools", "model", "stream", "stream_options", "n", "logprobs", "top_logprobs", "stop", "seed", "top_p"}
    | {"max_tokens", "max_completion_tokens", "temperature", "top_k", "min_p"}
)


class _Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class _ToolCall(msgspec.Struct):
    function: _Function
    id: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part | str] | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct):
    messages: list[_Message]
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    n: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


_decoder = msgspec.json.Decoder(_Body)
_any_decoder = msgspec.json.Decoder()


class Chat(Protocol):
    """OpenAI's chat completions."""

    name: ClassVar[str] = "chat"
    path: ClassVar[str] = "/chat/completions"

    def parse(self, data: bytes, session: Session, *, retry: bool) -> Request:
        try:
            body = _decoder.decode(data)
            raw = _any_decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise bad_request(f"the request body is not valid: {error}") from None
        exact = session.policy.protocol == "tokens"
        tools = tuple(_tool(tool, position) for position, tool in enumerate(body.tools or ()))
        choice = _tool_choice(body.tool_choice, tools) if exact else "auto"
        if exact:
            _refuse_unsupported(raw)
        if body.n not in (None, 1):
            raise bad_request("n: this gateway gives one choice per request; send several requests", param="n")
        if not body.messages:
            raise bad_request("messages: a conversation needs at least one message", param="messages")
        messages = [_message(message, position) for position, message in enumerate(body.messages)]
        sampling, overridden = resolve(session.sampling, _sampling(body), session.fixed)
        call = Call(
            conversation=Conversation.of(messages, tools),
            sampling=sampling,
            tool_choice=choice,
            logprobs=bool(body.logprobs),
            retry=retry,
            options={} if exact else {key: value for key, value in raw.items() if key not in _OURS},
        )
        if call.logprobs and not exact:
            raise bad_request("logprobs: not passed on by a model behind a chat API", param="logprobs")
        include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        reply = ChatReply(session.policy.name, logprobs=call.logprobs, include_usage=include_usage)
        return Request(call=call, reply=reply, stream=bool(body.stream), overridden=overridden)

    def error(self, error: ApiError) -> bytes:
        return msgspec.json.encode(
            {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}
        )

    def error_event(self, error: ApiError) -> bytes:
        return sse(self.error(error))


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    for field, neutral in _NEUTRAL.items():
        value = raw.get(field)
        if value not in neutral:
            raise bad_request(f"{field}: not supported by this model; leave it out", param=field)


def _tool(tool: Mapping[str, Any], position: int) -> Mapping[str, Any]:
    where = f"tools[{position}]"
    if tool.get("type") != "function":
        raise bad_request(f"{where}: only tools of type 'function' are supported", param=where)
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise bad_request(f"{where}.function.name: a non-empty string is needed", param=where)
    return tool


def _tool_choice(choice: str | dict[str, Any] | None, tools: Sequence[ToolSpec]) -> ToolChoice:
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if name not in [tool["function"]["name"] for tool in tools]:
            raise bad_request(f"tool_choice: {name!r} is no tool of this request", param="tool_choice")
        return NamedTool(str(name))
    if choice == "required":
        if not tools:
            raise bad_request("tool_choice: 'required' needs tools", param="tool_choice")
        return "required"
    if choice == "none":
        return "none"
    if choice in (None, "auto"):
        return "auto"
    raise bad_request(f"tool_choice: {choice!r} is none of 'auto', 'none', 'required'", param="tool_choice")


def _message(message: _Message, position: int) -> Message:
    where = f"messages[{position}]"
    role = _ROLES.get(message.role)
    if role is None:
        raise bad_request(f"{where}.role: {message.role!r} is none of {', '.join(_ROLES)}", param=where)
    reasoning = message.reasoning_content
    if reasoning is None and isinstance(message.reasoning, str):
        reasoning = message.reasoning
    return Message(
        role=role,
        content=_text(message.content, where),
        reasoning=reasoning or None,
        tool_calls=tuple(_call(call) for call in message.tool_calls or ()),
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def _text(content: str | list[_Part | str] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for number, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
        elif part.type in ("text", "input_text", "output_text"):
            texts.append(part.text or "")
        elif part.type == "refusal":
            texts.append(part.refusal or "")
        elif part.type not in ("thinking", "reasoning"):
            raise bad_request(
                f"{where}.content[{number}]: this model takes text only, not {part.type!r}", param=f"{where}.content"
            )
    return "\n".join(texts)


def _call(call: _ToolCall) -> ToolCall:
    arguments = call.function.arguments
    if isinstance(arguments, dict):
        arguments = dump_object(arguments)
    return ToolCall(id=call.id or "", name=call.function.name, arguments=arguments or "{}")


def _sampling(body: _Body) -> ClientSampling:
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    _check("max_tokens", limit, limit is None or limit >= 1, "at least 1")
    _check("temperature", body.temperature, body.temperature is None or 0 <= body.temperature <= 100, "from 0 to 100")
    _check("top_p", body.top_p, body.top_p is None or 0 < body.top_p <= 1, "above 0 and at most 1")
    _check("min_p", body.min_p, body.min_p is None or 0 <= body.min_p <= 1, "from 0 to 1")
    _check("top_k", body.top_k, body.top_k is None or -1 <= body.top_k < 2**31, "at least 0")
    _check("seed", body.seed, body.seed is None or -(2**63) <= body.seed < 2**63, "a 64-bit integer")
    _check("stop", stop, len(stop) <= MAX_STOPS and all(stop), f"at most {MAX_STOPS} non-empty strings")
    top = body.top_logprobs or 0
    _check("top_logprobs", top, 0 <= top <= MAX_TOP_LOGPROBS, f"from 0 to {MAX_TOP_LOGPROBS}")
    if top and not body.logprobs:
        raise bad_request("top_logprobs: needs logprobs to be true", param="top_logprobs")
    return ClientSampling(
        max_tokens=limit,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=None if body.top_k is None else max(body.top_k, 0),
        min_p=body.min_p,
        stop=stop,
        seed=None if body.seed is None else body.seed & (2**63 - 1),
        top_logprobs=top,
    )


def _check(name: str, value: object, valid: bool, meaning: str) -> None:
    if not valid:
        raise bad_request(f"{name}: {value!r} is not {meaning}", param=name)


class ChatReply(Reply):
    """Writes one reply, whole or as server-sent events."""

    def __init__(self, model: str, *, logprobs: bool, include_usage: bool) -> None:
        self._id = f"chatcmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._model = model
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._tokens: list[Token] = []
        self._calls = 0

    def collect(self, piece: Piece) -> None:
        self._tokens += piece.tokens

    def whole(self, turn: Turn) -> bytes:
        message: dict[str, Any] = {"role": "assistant", "content": turn.message.content or None}
        if not turn.message.tool_calls:
            message["content"] = turn.message.content
        else:
            message["tool_calls"] = [as_openai_call(call) for call in turn.message.tool_calls]
        if turn.message.reasoning is not None:
            message["reasoning_content"] = turn.message.reasoning
        choice = {
            "index": 0,
            "message": message | {"refusal": None},
            "logprobs": _logprobs(self._tokens) if self._logprobs else None,
            "finish_reason": turn.finish_reason,
        }
        return msgspec.json.encode(self._envelope("chat.completion", [choice]) | {"usage": usage(turn)})

    def first(self) -> bytes:
        return self._event({"role": "assistant", "content": ""})

    def piece(self, piece: Piece) -> bytes:
        events = [self._event(self._delta(delta)) for delta in piece.deltas]
        if piece.tokens:
            # Log-probs go out with their tokens, also where the text of these is still held back.
            events.append(self._event({}, logprobs=_logprobs(piece.tokens)))
        return b"".join(events)

    def last(self, finish: Finish) -> bytes:
        events = self._event({}, finish_reason=finish.turn.finish_reason)
        if self._include_usage:
            envelope = self._envelope("chat.completion.chunk", []) | {"usage": usage(finish.turn)}
            events += sse(msgspec.json.encode(envelope))
        return events + b"data: [DONE]\n\n"

    def _delta(self, delta: Delta) -> dict[str, Any]:
        if delta.tool_call is not None:
            call = {"index": self._calls} | as_openai_call(delta.tool_call)
            self._calls += 1
            return {"tool_calls": [call]}
        return {"reasoning_content": delta.reasoning} if delta.reasoning else {"content": delta.text}

    def _event(self, delta: dict[str, Any], *, logprobs: Any = None, finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return sse(msgspec.json.encode(self._envelope("chat.completion.chunk", [choice])))

    def _envelope(self, kind: str, choices: list[Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }


def usage(turn: Turn) -> dict[str, Any]:
    return {
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": turn.completion_tokens,
        "total_tokens": turn.prompt_tokens + turn.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": turn.cached_tokens},
    }


def _logprobs(tokens: Sequence[Token]) -> dict[str, Any]:
    return {
        "content": [
            {
                **_logprob(token.text, token.logp),
                "top_logprobs": [_logprob(text, logp) for text, logp in token.top],
            }
            for token in tokens
        ]
    }


def _logprob(text: str, logp: float) -> dict[str, Any]:
    # A token can be part of a character only; its bytes are not known from its text then.
    known = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": logp, "bytes": known}
