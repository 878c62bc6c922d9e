"""The responses protocol: OpenAI's request bodies and conversation items in, a call out. What answers it is written by
:mod:`~rl_harness.gateway.protocols.responses_reply`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from rl_harness.contracts.renderer import ToolSpec
from rl_harness.gateway.arguments import dump_object
from rl_harness.gateway.calls import Call, NamedTool, ToolChoice
from rl_harness.gateway.errors import ApiError, bad_request
from rl_harness.gateway.protocols.base import Protocol, Request
from rl_harness.gateway.protocols.chat import openai_error
from rl_harness.gateway.protocols.fields import (
    ChatPart,
    client_sampling,
    decode,
    new_id,
)
from rl_harness.gateway.protocols.media import Media
from rl_harness.gateway.protocols.responses_reply import ResponsesReply, unseal
from rl_harness.gateway.protocols.responses_tools import CUSTOM, SHELL, Toolbox
from rl_harness.gateway.sampling import resolve
from rl_harness.gateway.sessions import Session
from rl_harness.gateway.tree import Conversation
from rl_harness.records.turn import Message, ToolCall

LOGPROBS = "message.output_text.logprobs"

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output", "local_shell_call_output"})
#: What needs something that is kept between requests. Nothing is.
_STORED: Mapping[str, str] = {
    "previous_response_id": "send the whole conversation in input",
    "conversation": "send the whole conversation in input",
    "prompt": "send its text in instructions or input",
}


class _Part(msgspec.Struct):
    type: str = ""
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    file_data: str | None = None
    filename: str | None = None
    input_audio: Any = None


class _Action(msgspec.Struct):
    command: list[str] | None = None
    timeout_ms: int | None = None
    working_directory: str | None = None


class _Item(msgspec.Struct):
    type: str | None = None
    role: str | None = None
    content: Any = None
    id: str | None = None
    name: str | None = None
    namespace: str | None = None
    call_id: str | None = None
    arguments: str | dict[str, Any] | None = None
    input: Any = None
    action: Any = None
    output: Any = None
    tools: list[Any] | None = None
    summary: Any = None
    encrypted_content: str | None = None


class _Format(msgspec.Struct, omit_defaults=True):
    type: str = "text"
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class _Text(msgspec.Struct):
    format: _Format | None = None


class _Reasoning(msgspec.Struct):
    effort: str | None = None


class _Body(msgspec.Struct):
    input: str | list[_Item | str] | None = None
    instructions: str | None = None
    stream: bool | None = None
    background: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    text: _Text | None = None
    reasoning: _Reasoning | None = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None


_decoder = msgspec.json.Decoder(_Body)
_Parts = list[_Part | str]


class Responses(Protocol):
    """OpenAI's responses, with nothing stored."""

    name: ClassVar[str] = "responses"
    path: ClassVar[str] = "/responses"
    #: Only the tokens of the prompt are asked for.
    counts: ClassVar[bool] = False

    def parse(self, data: bytes, session: Session, *, retry: bool) -> Request:
        body = decode(_decoder, data)
        for field, remedy in _STORED.items():
            if getattr(body, field) is not None:
                raise bad_request(f"{field}: nothing is stored here; {remedy}", param=field)
        if body.background:
            raise bad_request("background: nothing is stored here; stream the reply instead", param="background")
        exact = session.policy.protocol == "tokens"
        toolbox = Toolbox(body.tools or ())
        reader = _Reader(toolbox, exact)
        messages = reader.read(body)
        logprobs = LOGPROBS in (body.include or ()) or bool(body.top_logprobs)
        sampling, overridden = resolve(
            session.sampling,
            client_sampling(
                limit=body.max_output_tokens,
                temperature=body.temperature,
                top_p=body.top_p,
                stop=(body.stop,) if isinstance(body.stop, str) else body.stop or (),
                seed=body.seed,
                top_logprobs=body.top_logprobs or 0,
                limit_field="max_output_tokens",
            ),
            session.fixed,
        )
        choice, tools = _tool_choice(body.tool_choice, toolbox)
        parallel = body.parallel_tool_calls is not False
        call = Call(
            conversation=Conversation.of(messages, tools),
            sampling=sampling,
            tool_choice=choice,
            parallel=parallel,
            json_schema=_json_schema(body),
            logprobs=logprobs,
            retry=retry,
            reply=new_id("resp_"),
            options={} if exact else reader.options(body),
        )
        reply = ResponsesReply(
            session.policy.name,
            call.reply,
            toolbox,
            said={
                "instructions": body.instructions,
                "max_output_tokens": body.max_output_tokens,
                "parallel_tool_calls": parallel,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
            },
        )
        return Request(call=call, reply=reply, stream=bool(body.stream), counts=self.counts, overridden=overridden)

    def error(self, error: ApiError) -> bytes:
        return openai_error(error)


class CountInput(Responses):
    """How many tokens the prompt of a request would have."""

    path: ClassVar[str] = "/responses/input_tokens"
    counts: ClassVar[bool] = True


class _Reader:
    """Turns conversation items into messages: what one reply consisted of is one message again."""

    def __init__(self, toolbox: Toolbox, exact: bool) -> None:
        self._toolbox = toolbox
        self._messages: list[Message] = []
        self._media = Media(exact, _plain, _chat_part)
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[ToolCall] = []
        self._replying = False

    def read(self, body: _Body) -> list[Message]:
        if body.instructions:
            self._messages.append(Message(role="system", content=body.instructions))
        if isinstance(body.input, str):
            self._messages.append(Message(role="user", content=body.input))
        else:
            for position, item in enumerate(body.input or ()):
                where = f"input[{position}]"
                self._item(_Item(role="user", content=item) if isinstance(item, str) else item, where)
        self._end_reply()
        if not self._messages:
            raise bad_request("input: a conversation needs at least one item", param="input")
        return self._messages

    def options(self, body: _Body) -> Mapping[str, Any]:
        """What a chat API is sent beside, or in the place of, what is made of the call."""
        options: dict[str, Any] = {}
        if body.reasoning is not None and body.reasoning.effort is not None:
            options["reasoning_effort"] = body.reasoning.effort
        wanted = None if body.text is None else body.text.format
        if wanted is not None and wanted.type == "json_schema":
            named = {name: value for name, value in msgspec.to_builtins(wanted).items() if name != "type"}
            options["response_format"] = {"type": "json_schema", "json_schema": named}
        elif wanted is not None and wanted.type != "text":
            options["response_format"] = {"type": wanted.type}
        shaped = self._media.messages(self._messages)
        if shaped is not None:
            options["messages"] = shaped
        return options

    def _item(self, item: _Item, where: str) -> None:
        kind = item.type or ("message" if item.role is not None else "")
        if kind == "message":
            self._message(item, where)
        elif kind == "reasoning":
            if self._texts or self._calls:
                self._end_reply()  # a reply begins with its reasoning
            self._replying = True
            self._thoughts.append(_thought(item, where))
        elif kind in ("function_call", "custom_tool_call", "local_shell_call"):
            self._replying = True
            self._calls.append(self._call(item, kind, where))
        elif kind in _OUTPUTS:
            self._end_reply()
            text = self._text(item.output, f"{where}.output")
            self._messages.append(Message(role="tool", content=text, tool_call_id=item.call_id or item.id))
        elif kind == "additional_tools":
            self._toolbox.add(item.tools or (), f"{where}.tools")
        elif kind == "item_reference":
            raise bad_request(f"{where}: nothing is stored here; send the item itself", param=where)
        elif not kind.endswith(("_call", "_list_tools", "_search_output")):
            raise bad_request(f"{where}.type: {item.type!r} is not known", param=where)

    def _message(self, item: _Item, where: str) -> None:
        role = _ROLES.get(item.role or "")
        if role is None:
            raise bad_request(f"{where}.role: {item.role!r} is none of {', '.join(_ROLES)}", param=where)
        if role == "assistant":
            self._replying = True
            self._texts.append(self._text(item.content, f"{where}.content"))
            return
        self._end_reply()
        text = self._text(item.content, f"{where}.content")
        self._messages.append(Message(role=role, content=text))

    def _call(self, item: _Item, kind: str, where: str) -> ToolCall:
        arguments = item.arguments
        name = item.name or ""
        if kind == "custom_tool_call":
            arguments = {CUSTOM: item.input if isinstance(item.input, str) else ""}
        elif kind == "local_shell_call":
            name = SHELL
            arguments = _shell_arguments(item.action, where)
        if not name:
            raise bad_request(f"{where}.name: a name is needed", param=where)
        if isinstance(arguments, dict):
            arguments = dump_object(arguments)
        qualified = self._toolbox.qualified(item.namespace, name)
        return ToolCall(id=item.call_id or item.id or "", name=qualified, arguments=arguments or "{}")

    def _end_reply(self) -> None:
        """What the assistant said until here is whole."""
        if self._replying:
            self._messages.append(
                Message(
                    role="assistant",
                    content="\n".join(text for text in self._texts if text),
                    reasoning="\n".join(thought for thought in self._thoughts if thought) or None,
                    tool_calls=tuple(self._calls),
                )
            )
        self._texts, self._thoughts, self._calls, self._replying = [], [], [], False

    def _text(self, content: Any, where: str) -> str:
        """The text of the message that is added next; what of it is no text is kept for a chat API, or refused."""
        if content is None or isinstance(content, str):
            return content or ""
        try:
            read = msgspec.convert(content, _Parts)
        except (msgspec.ValidationError, RecursionError) as error:
            raise bad_request(f"{where}: {error}", param=where) from None
        parts = ((f"{where}[{number}]", part) for number, part in enumerate(read))
        return self._media.text(len(self._messages), parts)


def _plain(part: _Part | str) -> str | None:
    """A part as text; None for what is none."""
    if isinstance(part, str):
        return part
    if part.type in ("input_text", "output_text", "text", "summary_text", "reasoning_text"):
        return part.text or ""
    if part.type == "refusal":
        return part.refusal or ""
    return None


def _chat_part(part: _Part, where: str) -> ChatPart:
    """An image, a sound or a file as a chat API takes it."""
    if part.type == "input_image" and isinstance(part.image_url, str):
        return {"type": "image_url", "image_url": {"url": part.image_url}}
    if part.type == "input_file" and part.file_data is not None:
        return {"type": "file", "file": {"filename": part.filename or "file", "file_data": part.file_data}}
    if part.type == "input_audio" and isinstance(part.input_audio, dict):
        return {"type": "input_audio", "input_audio": part.input_audio}
    raise bad_request(f"{where}: {part.type!r} of this kind cannot be passed on to a chat API", param=where)


def _thought(item: _Item, where: str) -> str:
    """The reasoning that an item holds: sealed by us, open, or only its summary."""
    sealed = unseal(item.encrypted_content)
    if sealed is not None:
        return sealed
    for parts in (item.content, item.summary):
        if parts:
            try:
                return "\n".join(_plain(part) or "" for part in msgspec.convert(parts, _Parts))
            except (msgspec.ValidationError, RecursionError) as error:
                raise bad_request(f"{where}: {error}", param=where) from None
    return ""


def _shell_arguments(action: Any, where: str) -> dict[str, Any]:
    try:
        asked = msgspec.convert(action, _Action)
    except msgspec.ValidationError as error:
        raise bad_request(f"{where}.action: {error}", param=where) from None
    return {name: value for name, value in msgspec.structs.asdict(asked).items() if value is not None}


def _tool_choice(choice: str | dict[str, Any] | None, toolbox: Toolbox) -> tuple[ToolChoice, Sequence[ToolSpec]]:
    """How tools may be used, and which of them."""
    tools = toolbox.tools
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = choice.get("tools")
        named = [toolbox.find(one) for one in allowed] if isinstance(allowed, list) else []
        tools = [tool for tool in tools if tool["function"]["name"] in named]
        choice = choice.get("mode")
    if isinstance(choice, dict):
        name = toolbox.find(choice)
        if name is None:
            raise bad_request(f"tool_choice: {choice.get('name')!r} is no tool of this request", param="tool_choice")
        return NamedTool(name), tools
    if choice == "required":
        if not tools:
            raise bad_request("tool_choice: 'required' needs tools", param="tool_choice")
        return "required", tools
    if choice == "none":
        return "none", tools
    if choice in (None, "auto"):
        return "auto", tools
    raise bad_request(f"tool_choice: {choice!r} is none of 'auto', 'none', 'required'", param="tool_choice")


def _json_schema(body: _Body) -> Mapping[str, Any] | None:
    wanted = None if body.text is None else body.text.format
    if wanted is None or wanted.type == "text":
        return None
    return wanted.schema or {"type": "object"}
