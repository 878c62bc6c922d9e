"""The messages protocol: Anthropic's request bodies in, its messages and event streams out, its counting of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from rl_harness.contracts.renderer import ToolSpec
from rl_harness.gateway.calls import Call, Finish, NamedTool, Piece, ToolChoice
from rl_harness.gateway.errors import ApiError, ContextTooLong, bad_request
from rl_harness.gateway.protocols.base import Protocol, Reply, Request, sse
from rl_harness.gateway.protocols.fields import (
    ChatPart,
    arguments_object,
    client_sampling,
    decode,
    encode,
    function_tool,
    new_id,
    text_only,
)
from rl_harness.gateway.protocols.media import Media
from rl_harness.gateway.sampling import resolve
from rl_harness.gateway.sessions import Session
from rl_harness.gateway.tree import Conversation
from rl_harness.records.turn import Message, ToolCall, Turn

#: What a reasoning block is signed with: it says where the block is from. Nothing here asks for it back.
_SIGNATURE = "cmwtaGFybmVzcw=="
#: A first system block that Claude Code changes with every call. It is for the bill, not for the model.
_BILLING = "x-anthropic-billing-header:"

_ERROR_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_STOP_REASONS: Mapping[str, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}
#: Tools that clients of this API run themselves although they do not send their schema, by how their type begins.
_KNOWN_TOOLS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "bash_": (
        "Run a command in a bash session that stays open between calls.",
        {
            "type": "object",
            "properties": {
                "command": {"type": "string", "description": "the command to run"},
                "restart": {"type": "boolean", "description": "true starts the session anew instead"},
            },
        },
    ),
    "text_editor_": (
        "View, create and edit text files.",
        {
            "type": "object",
            "properties": {
                "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert"]},
                "path": {"type": "string"},
                "view_range": {"type": "array", "items": {"type": "integer"}, "description": "first and last line"},
                "file_text": {"type": "string", "description": "the content of the file to create"},
                "old_str": {"type": "string"},
                "new_str": {"type": "string"},
                "insert_line": {"type": "integer", "description": "the line to insert after"},
                "insert_text": {"type": "string"},
            },
            "required": ["command", "path"],
        },
    ),
    "memory_": (
        "Keep notes between conversations, as files below /memories.",
        {
            "type": "object",
            "properties": {
                "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert", "delete", "rename"]},
                "path": {"type": "string"},
                "view_range": {"type": "array", "items": {"type": "integer"}, "description": "first and last line"},
                "file_text": {"type": "string", "description": "the content of the file to create"},
                "old_str": {"type": "string"},
                "new_str": {"type": "string"},
                "insert_line": {"type": "integer", "description": "the line to insert after"},
                "insert_text": {"type": "string"},
                "old_path": {"type": "string"},
                "new_path": {"type": "string"},
            },
            "required": ["command"],
        },
    ),
}
#: Tools that clients run too, for models that see.
_SEEING_TOOLS = ("computer_", "browser_")


class _Source(msgspec.Struct):
    type: str = ""
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class _Block(msgspec.Struct):
    type: str = "text"
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = msgspec.Raw(b"{}")
    tool_use_id: str | None = None
    tool_name: str | None = None
    content: Any = None
    is_error: bool | None = None
    source: _Source | str | None = None
    title: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Block | str] | None = None


class _Tool(msgspec.Struct):
    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: Any = None


class _ToolChoice(msgspec.Struct):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Format(msgspec.Struct):
    type: str = ""
    schema: dict[str, Any] | None = None


class _Unthreaded(ApiError):
    """Told so, clients send the whole conversation instead."""

    def __init__(self) -> None:
        super().__init__(400, "thread: nothing is stored here; send the whole conversation without it", param="thread")


class _OutputConfig(msgspec.Struct):
    format: _Format | None = None


class _Body(msgspec.Struct):
    messages: list[_Message]
    system: str | list[_Block | str] | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    tools: list[_Tool] | None = None
    tool_choice: _ToolChoice | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    output_config: _OutputConfig | None = None
    output_format: _Format | None = None
    thread: Any = None
    compaction: Any = None


_decoder = msgspec.json.Decoder(_Body)
_Content = str | Sequence[_Block | str] | None


class Messages(Protocol):
    """Anthropic's messages."""

    name: ClassVar[str] = "messages"
    path: ClassVar[str] = "/messages"
    #: Only the tokens of the prompt are asked for.
    counts: ClassVar[bool] = False

    def parse(self, data: bytes, session: Session, *, retry: bool) -> Request:
        body = decode(_decoder, data)
        if body.thread is not None:
            raise _Unthreaded
        if body.compaction is not None:
            raise bad_request("compaction: not supported here; ask the model for a summary instead", param="compaction")
        exact = session.policy.protocol == "tokens"
        tools = list(_tools(body.tools or ()))
        reader = _Reader(exact)
        messages = reader.read(body)
        sampling, overridden = resolve(
            session.sampling,
            client_sampling(
                limit=body.max_tokens,
                temperature=body.temperature,
                top_p=body.top_p,
                top_k=body.top_k,
                stop=body.stop_sequences or (),
                stop_field="stop_sequences",
            ),
            session.fixed,
        )
        call = Call(
            conversation=Conversation.of(messages, tools),
            sampling=sampling,
            tool_choice=_tool_choice(body.tool_choice, tools),
            parallel=body.tool_choice is None or not body.tool_choice.disable_parallel_tool_use,
            json_schema=_json_schema(body),
            retry=retry,
            reply=new_id("msg_"),
            options=reader.options(messages),
        )
        return Request(
            call=call,
            reply=MessagesReply(session.policy.name, call.reply),
            stream=bool(body.stream),
            counts=self.counts,
            overridden=overridden,
        )

    def error(self, error: ApiError) -> bytes:
        message = error.message
        if isinstance(error, ContextTooLong):
            message = f"prompt is too long: {error.tokens} tokens > {error.room} maximum"
        elif error.code == "context_length_exceeded":
            message = f"prompt is too long: {message}"
        kind = _ERROR_TYPES.get(error.status) or ("invalid_request_error" if error.status < 500 else "api_error")
        told: dict[str, Any] = {"type": kind, "message": message}
        if isinstance(error, _Unthreaded):
            told["details"] = {"error_code": "thread_unsupported_request", "unsupported": []}
        return encode({"type": "error", "error": told})

    def models(self, name: str) -> bytes:
        return encode({"data": [msgspec.Raw(self.model(name))], "has_more": False, "first_id": name, "last_id": name})

    def model(self, name: str) -> bytes:
        return encode({"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"})


class CountTokens(Messages):
    """How many tokens the prompt of a request would have."""

    path: ClassVar[str] = "/messages/count_tokens"
    counts: ClassVar[bool] = True


class _Reader:
    """Turns a body's messages into the one form of a conversation."""

    def __init__(self, exact: bool) -> None:
        self._exact = exact
        self._media = Media(exact, _plain, _chat_part)
        self._messages: list[Message] = []

    def read(self, body: _Body) -> list[Message]:
        if body.system:
            blocks = [body.system] if isinstance(body.system, str) else body.system
            kept = [block for block in blocks if not _text_of(block).startswith(_BILLING)]
            if kept:
                self._say("system", kept, "system")
        if not body.messages:
            raise bad_request("messages: at least one message is required", param="messages")
        for position, message in enumerate(body.messages):
            where = f"messages.{position}"
            if message.role == "assistant":
                self._messages.append(self._assistant(message.content, where))
            elif message.role in ("user", "system"):
                self._user(message.role, message.content, where)
            else:
                raise bad_request(f"{where}.role: {message.role!r} is none of user, assistant, system", param=where)
        last = self._messages[-1]
        if self._exact and last.role == "assistant":
            raise bad_request(
                "messages: this model does not continue an assistant message; the last message has to be the user's",
                param="messages",
            )
        return self._messages

    def options(self, messages: Sequence[Message]) -> Mapping[str, Any]:
        """What a chat API is sent in the place of these messages, if they hold more than text."""
        shaped = self._media.messages(messages)
        return {} if shaped is None else {"messages": shaped}

    def _user(self, role: str, content: _Content, where: str) -> None:
        """Results of tools are messages of their own, before what else the user says."""
        if content is None or isinstance(content, str):
            self._say(role, content, where)
            return
        said: list[_Block | str] = []
        results = False
        for number, block in enumerate(content):
            if isinstance(block, str) or block.type != "tool_result":
                said.append(block)
                continue
            if said:
                self._say(role, said, where)
                said = []
            results = True
            self._result(block, f"{where}.content.{number}")
        if said or not results:
            self._say(role, said, where)

    def _result(self, block: _Block, where: str) -> None:
        inner = block.content
        if inner is not None and not isinstance(inner, str):
            try:
                inner = msgspec.convert(inner, list[_Block | str])
            except msgspec.ValidationError as error:
                raise bad_request(f"{where}.content: {error}", param=where) from None
        text = self._text(inner, where)
        if block.is_error and not text.lstrip("< ").lower().startswith(("error", "tool_use_error")):
            text = f"Error: {text}"
        self._messages.append(Message(role="tool", content=text, tool_call_id=_inner_id(block.tool_use_id or "")))

    def _say(self, role: str, content: _Content, where: str) -> None:
        self._messages.append(Message(role=role, content=self._text(content, where)))

    def _assistant(self, content: _Content, where: str) -> Message:
        if content is None or isinstance(content, str):
            return Message(role="assistant", content=content or "")
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        for number, block in enumerate(content):
            if isinstance(block, str):
                texts.append(block)
            elif block.type == "text":
                texts.append(block.text or "")
            elif block.type == "thinking":
                thoughts.append(block.thinking or "")
            elif block.type == "tool_use":
                if not block.name:
                    raise bad_request(f"{where}.content.{number}.name: a name is needed", param=where)
                arguments = bytes(block.input).decode()
                calls.append(ToolCall(id=_inner_id(block.id or ""), name=block.name, arguments=arguments))
            elif block.type == "compaction":
                texts.append(block.content if isinstance(block.content, str) else "")
            elif not _is_hosted(block.type):
                raise bad_request(f"{where}.content.{number}.type: {block.type!r} is not known", param=where)
        return Message(
            role="assistant",
            content="\n".join(text for text in texts if text),
            reasoning="\n".join(thoughts) or None,
            tool_calls=tuple(calls),
        )

    def _text(self, content: _Content, where: str) -> str:
        """The text of the message that is added next; what of it is no text is kept for a chat API, or refused."""
        if content is None or isinstance(content, str):
            return content or ""
        parts = ((f"{where}.content.{number}", block) for number, block in enumerate(content))
        return self._media.text(len(self._messages), parts)


def _text_of(block: _Block | str) -> str:
    return block if isinstance(block, str) else block.text or ""


def _plain(block: _Block | str) -> str | None:
    """A block as text; None for what is none."""
    if isinstance(block, str):
        return block
    if block.type == "text":
        return block.text or ""
    if block.type == "tool_reference":
        # The tools it refers to are all known to the model already.
        return f"The tool {block.tool_name or ''} is available."
    if block.type == "document" and isinstance(block.source, _Source) and block.source.type == "text":
        return "\n".join(text for text in (block.title, block.source.data) if text)
    if block.type == "search_result" and isinstance(block.content, list):
        found = [one.get("text") for one in block.content if isinstance(one, dict)]
        return "\n".join(text for text in (block.title, *found) if isinstance(text, str))
    return None


def _is_hosted(kind: str) -> bool:
    """Something that a server of this protocol did within a reply, or hid in it: no model here said it."""
    return kind in ("redacted_thinking", "server_tool_use", "mcp_tool_use") or kind.endswith("_tool_result")


def _chat_part(block: _Block, where: str) -> ChatPart:
    """An image or a file as a chat API takes it."""
    source = block.source
    if isinstance(source, _Source) and block.type in ("image", "document"):
        address = source.url
        if source.type == "base64" and source.data is not None:
            address = f"data:{source.media_type or 'application/octet-stream'};base64,{source.data}"
        if block.type == "image" and address is not None:
            return {"type": "image_url", "image_url": {"url": address}}
        if block.type == "document" and source.type == "base64" and address is not None:
            return {"type": "file", "file": {"filename": block.title or "document", "file_data": address}}
    raise bad_request(f"{where}: a {block.type!r} block of this kind cannot be passed on to a chat API", param=where)


def _tools(tools: Sequence[_Tool]) -> Iterator[ToolSpec]:
    """Tools the client runs. Those that Anthropic's servers would run are not offered to the model."""
    for position, tool in enumerate(tools):
        where = f"tools.{position}"
        if tool.type is None or tool.type == "custom":
            yield function_tool(tool.name, tool.description, tool.input_schema, where)
            continue
        if tool.type.startswith(_SEEING_TOOLS):
            raise text_only(where, tool.type)
        for kind, (description, schema) in _KNOWN_TOOLS.items():
            if tool.type.startswith(kind):
                yield function_tool(tool.name, description, dict(schema), where)


def _tool_choice(choice: _ToolChoice | None, tools: Sequence[ToolSpec]) -> ToolChoice:
    if choice is None or choice.type == "auto":
        return "auto"
    if choice.type == "none":
        return "none"
    if choice.type == "any":
        if not tools:
            raise bad_request("tool_choice: 'any' needs tools", param="tool_choice")
        return "required"
    if choice.type == "tool":
        if choice.name is None or choice.name not in [tool["function"]["name"] for tool in tools]:
            raise bad_request(f"tool_choice.name: {choice.name!r} is no tool of this request", param="tool_choice")
        return NamedTool(choice.name)
    raise bad_request(f"tool_choice.type: {choice.type!r} is none of auto, any, tool, none", param="tool_choice")


def _json_schema(body: _Body) -> Mapping[str, Any] | None:
    wanted = body.output_format if body.output_config is None else body.output_config.format or body.output_format
    return wanted.schema or {"type": "object"} if wanted is not None and wanted.type == "json_schema" else None


def _inner_id(id: str) -> str:
    """A call's id as it is recorded, of how this protocol spells it."""
    return f"call_{id[len('toolu_') :]}" if id.startswith("toolu_") else id


def _outer_id(id: str) -> str:
    return f"toolu_{id[len('call_') :]}" if id.startswith("call_") else id


class MessagesReply(Reply):
    """Writes one reply, whole or as server-sent events."""

    def __init__(self, model: str, id: str) -> None:
        self._id = id
        self._model = model
        self._index = -1
        self._open = ""  # the kind of the block that is open
        self._head = b""  # what each of its deltas begins with
        self._said = False  # there was text

    def whole(self, turns: Sequence[Turn]) -> bytes:
        (turn,) = turns
        said = turn.message
        content: list[dict[str, Any]] = []
        if said.reasoning is not None:
            content.append({"type": "thinking", "thinking": said.reasoning, "signature": _SIGNATURE})
        if said.content:
            content.append({"type": "text", "text": said.content})
        content += [
            {
                "type": "tool_use",
                "id": _outer_id(call.id),
                "name": call.name,
                "input": msgspec.Raw(arguments_object(call)),
            }
            for call in said.tool_calls
        ]
        used = _usage(turn.prompt_tokens, turn.cached_tokens, turn.completion_tokens)
        return encode(self._envelope(content, used) | _ending(turn))

    def counted(self, tokens: int) -> bytes:
        return encode({"input_tokens": tokens})

    def first(self, piece: Piece) -> bytes:
        used = _usage(piece.prompt_tokens, piece.cached_tokens, 0)
        message = self._envelope([], used) | {"stop_reason": None, "stop_sequence": None}
        return sse(encode({"type": "message_start", "message": message}), b"message_start") + _PING

    def piece(self, piece: Piece) -> bytes:
        out = b""
        for delta in piece.deltas:
            if delta.reasoning:
                if self._open != "thinking":
                    out += self._start("thinking", _THINKING, b'"thinking_delta","thinking":')
                out += self._head + encode(delta.reasoning) + _END
            if text := delta.text:
                if self._open != "text":
                    if self._said and text.startswith("\n"):
                        text = text[1:]  # text blocks are put together again with a line break between them
                    out += self._start("text", _TEXT, b'"text_delta","text":')
                    self._said = True
                out += self._head + encode(text) + _END
            if delta.tool_call is not None:
                out += self._call(delta.tool_call)
        return out

    def last(self, finish: Finish) -> bytes:
        turn = finish.turn
        used = _usage(turn.prompt_tokens, turn.cached_tokens, turn.completion_tokens)
        delta = {"type": "message_delta", "delta": _ending(turn), "usage": used}
        return self._close() + sse(encode(delta), b"message_delta") + _STOP

    def failed(self, error: ApiError) -> bytes:
        return sse(Messages().error(error), b"error")

    def _start(self, kind: str, block: bytes, delta: bytes) -> bytes:
        """Open a block, and close the one before it."""
        closed = self._close()
        self._open = kind
        self._index += 1
        self._head = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":%b'
            % (self._index, delta)
        )
        return closed + (
            b'event: content_block_start\ndata: {"type":"content_block_start","index":%d,"content_block":%b}\n\n'
            % (self._index, block)
        )

    def _close(self) -> bytes:
        if not self._open:
            return b""
        out = b'event: content_block_stop\ndata: {"type":"content_block_stop","index":%d}\n\n' % self._index
        if self._open == "thinking":
            signed = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":%b}\n\n'
            out = signed % (self._index, _SIGNED) + out
        self._open = ""
        return out

    def _call(self, call: ToolCall) -> bytes:
        block = {"type": "tool_use", "id": _outer_id(call.id), "name": call.name, "input": {}}
        out = self._start("tool_use", encode(block), b'"input_json_delta","partial_json":')
        return out + self._head + encode(arguments_object(call).decode()) + _END + self._close()

    def _envelope(self, content: list[dict[str, Any]], used: dict[str, int]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "usage": used,
        }


_END = b"}}\n\n"
_TEXT = b'{"type":"text","text":""}'
_THINKING = b'{"type":"thinking","thinking":"","signature":""}'
_SIGNED = encode({"type": "signature_delta", "signature": _SIGNATURE})
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


def _ending(turn: Turn) -> dict[str, str | None]:
    stop = turn.extra.get("stop") if turn.finish_reason == "stop" else None
    reason = "stop_sequence" if stop else _STOP_REASONS.get(turn.finish_reason, "end_turn")
    return {"stop_reason": reason, "stop_sequence": stop}


def _usage(prompt: int, cached: int, completion: int) -> dict[str, int]:
    """What is read from the cache is not counted as input again."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": completion,
    }
