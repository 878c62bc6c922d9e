"""The chat-completions protocol: OpenAI's request bodies in, its responses and event streams out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from rl_harness.contracts.renderer import Delta, ToolSpec
from rl_harness.gateway.arguments import dump_object
from rl_harness.gateway.calls import Call, Finish, NamedTool, Piece, Token, ToolChoice
from rl_harness.gateway.errors import ApiError, bad_request
from rl_harness.gateway.protocols.base import Protocol, Reply, Request, sse
from rl_harness.gateway.protocols.fields import (
    MAX_REPLIES,
    check,
    client_sampling,
    decode,
    encode,
    new_id,
    stand_in,
    text_only,
)
from rl_harness.gateway.sampling import ClientSampling, resolve
from rl_harness.gateway.sessions import Session
from rl_harness.gateway.tree import Conversation
from rl_harness.gateway.upstream import as_openai_call
from rl_harness.records.turn import Message, ToolCall, Turn

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
#: Fields that change what is sampled, with the values that change nothing. Our own engines cannot honour others.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
}
#: Fields this module has turned into something else; everything else is passed on to a chat API.
_OURS = frozenset(
    {"model", "stream", "stream_options", "n", "logprobs", "top_logprobs", "stop", "seed", "top_p"}
    | {"max_tokens", "max_completion_tokens", "temperature", "top_k", "min_p"}
)


class _Part(msgspec.Struct):
    type: str = ""
    text: str | None = None
    refusal: str | None = None


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class _ToolCall(msgspec.Struct):
    function: _Function | None = None
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


class _JsonSchema(msgspec.Struct):
    schema: dict[str, Any] | None = None


class _Format(msgspec.Struct):
    type: str
    json_schema: _JsonSchema | None = None


class _Body(msgspec.Struct):
    messages: list[_Message]
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
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
    response_format: _Format | None = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    repetition_penalty: Any = None
    logit_bias: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None


_decoder = msgspec.json.Decoder(_Body)
_any_decoder = msgspec.json.Decoder()


class Chat(Protocol):
    """OpenAI's chat completions."""

    name: ClassVar[str] = "chat"
    path: ClassVar[str] = "/chat/completions"

    def parse(self, data: bytes, session: Session, *, retry: bool) -> Request:
        body = decode(_decoder, data)
        exact = session.policy.protocol == "tokens"
        raw: dict[str, Any] = {}
        tools: Sequence[ToolSpec] = body.tools or ()
        choice: ToolChoice = "auto"
        if exact:
            for position, tool in enumerate(tools):
                _check_tool(tool, position)
            choice = _tool_choice(body.tool_choice, tools)
            _refuse_unsupported(body)
        else:
            raw = decode(_any_decoder, data)
        n = 1 if body.n is None else body.n
        check("n", n, 1 <= n <= MAX_REPLIES, f"from 1 to {MAX_REPLIES}")
        if not body.messages:
            raise bad_request("messages: a conversation needs at least one message", param="messages")
        sent = raw.get("messages", ())
        messages = [
            _message(one, position, sent[position : position + 1]) for position, one in enumerate(body.messages)
        ]
        sampling, overridden = resolve(session.sampling, _sampling(body), session.fixed)
        logprobs = bool(body.logprobs)
        call = Call(
            conversation=Conversation.of(messages, tools),
            sampling=sampling,
            tool_choice=choice,
            parallel=body.parallel_tool_calls is not False,
            json_schema=_json_schema(body.response_format),
            logprobs=logprobs,
            n=n,
            retry=retry,
            reply=new_id("chatcmpl-"),
            options={name: value for name, value in raw.items() if name not in _OURS},
        )
        include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        reply = ChatReply(session.policy.name, call.reply, logprobs=logprobs, include_usage=include_usage, n=n)
        return Request(call=call, reply=reply, stream=bool(body.stream), overridden=overridden)

    def error(self, error: ApiError) -> bytes:
        return openai_error(error)


def openai_error(error: ApiError) -> bytes:
    """An error in OpenAI's shape."""
    return encode({"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}})


def _refuse_unsupported(body: _Body) -> None:
    for field, neutral in _NEUTRAL.items():
        value = getattr(body, field)
        if value is not None and value not in neutral:
            raise bad_request(f"{field}: not supported by this model; leave it out", param=field)


def _check_tool(tool: Mapping[str, Any], position: int) -> None:
    where = f"tools[{position}]"
    if tool.get("type") != "function":
        raise bad_request(f"{where}: only tools of type 'function' are supported", param=where)
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise bad_request(f"{where}.function.name: a non-empty string is needed", param=where)


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


def _json_schema(wanted: _Format | None) -> Mapping[str, Any] | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_schema" and wanted.json_schema is not None and wanted.json_schema.schema is not None:
        return wanted.json_schema.schema
    return {"type": "object"}


def _message(message: _Message, position: int, sent: Sequence[Any]) -> Message:
    """``sent``: the message as it goes on to a chat API, which may take what our own models do not; else nothing."""
    where = f"messages[{position}]"
    role = _ROLES.get(message.role)
    if role is None:
        if not sent:
            raise bad_request(f"{where}.role: {message.role!r} is none of {', '.join(_ROLES)}", param=where)
        role = message.role
    reasoning = message.reasoning_content
    if reasoning is None and isinstance(message.reasoning, str):
        reasoning = message.reasoning
    return Message(
        role=role,
        content=_text(message.content, where, sent),
        reasoning=reasoning or None,
        tool_calls=tuple(_calls(message.tool_calls, where, sent)),
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def _text(content: str | list[_Part | str] | None, where: str, sent: Sequence[Any]) -> str:
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
            if not sent:
                raise text_only(f"{where}.content[{number}]", part.type)
            texts.append(stand_in(part.type, sent[0]["content"][number]))
    return "\n".join(texts)


def _calls(calls: Sequence[_ToolCall] | None, where: str, sent: Sequence[Any]) -> list[ToolCall]:
    made: list[ToolCall] = []
    for number, call in enumerate(calls or ()):
        if call.function is not None:
            arguments = call.function.arguments
            if isinstance(arguments, dict):
                arguments = dump_object(arguments)
            made.append(ToolCall(id=call.id or "", name=call.function.name, arguments=arguments or "{}"))
        elif not sent:
            raise bad_request(f"{where}.tool_calls[{number}].function: a function is needed", param=where)
    return made


def _sampling(body: _Body) -> ClientSampling:
    top = body.top_logprobs or 0
    if top and not body.logprobs:
        raise bad_request("top_logprobs: needs logprobs to be true", param="top_logprobs")
    return client_sampling(
        limit=body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        stop=(body.stop,) if isinstance(body.stop, str) else body.stop or (),
        seed=body.seed,
        top_logprobs=top,
    )


class ChatReply(Reply):
    """Writes the replies to one request, whole or as server-sent events."""

    def __init__(self, model: str, id: str, *, logprobs: bool, include_usage: bool, n: int = 1) -> None:
        self._id = id
        self._created = int(time.time())
        self._model = model
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._tokens: list[list[Token]] = [[] for _ in range(n)]
        self._calls = [0] * n
        self._finished: list[Turn] = []
        self._n = n
        self._head = b""
        self._heads: list[bytes] = []

    def collect(self, piece: Piece) -> None:
        self._tokens[piece.choice] += piece.tokens

    def whole(self, turns: Sequence[Turn]) -> bytes:
        choices = [self._choice(index, turn) for index, turn in enumerate(turns)]
        return encode(self._envelope("chat.completion", choices) | {"usage": usage(turns)})

    def first(self, piece: Piece) -> bytes:
        # What every event begins with, and what those of one choice do: only their deltas are written each time.
        envelope = encode(self._envelope("chat.completion.chunk", []))
        self._head = b"data: " + envelope[: -len(b"]}")]
        self._heads = [self._head + b'{"index":%d,"delta":' % index for index in range(self._n)]
        return b"".join(head + b'{"role":"assistant","content":""}' + _TAIL for head in self._heads)

    def piece(self, piece: Piece) -> bytes:
        head = self._heads[piece.choice]
        out = b""
        for delta in piece.deltas:
            out += head + self._delta(delta, piece.choice) + _TAIL
        if piece.tokens:
            # Log-probs go out with their tokens, also where the text of these is still held back.
            out += head + b'{},"logprobs":' + encode(_logprobs(piece.tokens)) + b',"finish_reason":null}]}\n\n'
        return out

    def last(self, finish: Finish) -> bytes:
        out = self._heads[finish.choice] + b'{},"logprobs":null,"finish_reason":%b}]}\n\n' % encode(
            finish.turn.finish_reason
        )
        self._finished.append(finish.turn)
        if len(self._finished) < len(self._heads):
            return out
        if self._include_usage:
            out += self._head + b'],"usage":' + encode(usage(self._finished)) + b"}\n\n"
        return out + b"data: [DONE]\n\n"

    def failed(self, error: ApiError) -> bytes:
        return sse(openai_error(error))

    def _choice(self, index: int, turn: Turn) -> dict[str, Any]:
        said = turn.message
        message: dict[str, Any] = {"role": "assistant", "content": said.content}
        if said.tool_calls:
            message["content"] = said.content or None
            message["tool_calls"] = [as_openai_call(call) for call in said.tool_calls]
        if said.reasoning is not None:
            message["reasoning_content"] = said.reasoning
        return {
            "index": index,
            "message": message | {"refusal": None},
            "logprobs": _logprobs(self._tokens[index]) if self._logprobs else None,
            "finish_reason": turn.finish_reason,
        }

    def _delta(self, delta: Delta, choice: int) -> bytes:
        if delta.tool_call is not None:
            call = {"index": self._calls[choice]} | as_openai_call(delta.tool_call)
            self._calls[choice] += 1
            return b'{"tool_calls":[%b]}' % encode(call)
        if delta.reasoning:
            return b'{"reasoning_content":%b}' % encode(delta.reasoning)
        return b'{"content":%b}' % encode(delta.text)

    def _envelope(self, kind: str, choices: list[Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }


_TAIL = b',"logprobs":null,"finish_reason":null}]}\n\n'


def usage(turns: Sequence[Turn]) -> dict[str, Any]:
    """What some turns of one prompt used together; the prompt counts once, as it does with OpenAI."""
    prompt = max(turn.prompt_tokens for turn in turns)
    completion = sum(turn.completion_tokens for turn in turns)
    used: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": max(turn.cached_tokens for turn in turns)},
    }
    reasoning = sum(turn.extra.get("reasoning_tokens", 0) for turn in turns)
    if reasoning:
        used["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return used


def _logprobs(tokens: Sequence[Token]) -> dict[str, Any]:
    return {"content": [logprob(token) for token in tokens]}


def logprob(token: Token) -> dict[str, Any]:
    """A token with its log-prob, in the shape OpenAI's protocols share."""
    return {
        **_logprob(token.text, token.logp),
        "top_logprobs": [_logprob(text, logp) for text, logp in token.top],
    }


def _logprob(text: str, logp: float) -> dict[str, Any]:
    # A token can be part of a character only; its bytes are not known from its text then.
    known = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": logp, "bytes": known}
