"""The chat-completions protocol seen from its other side: a call as the body for somebody's API, and that API's
stream of fragments as whole deltas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_harness.contracts.renderer import Delta
from rl_harness.errors import EngineError, RequestRefused
from rl_harness.gateway.calls import Call, NamedTool, Token, ToolChoice
from rl_harness.gateway.renderers.formats.base import new_call_id
from rl_harness.gateway.sampling import DEFAULT_SAMPLING
from rl_harness.records.episode import Usage
from rl_harness.records.turn import Message, ToolCall


def upstream_body(call: Call) -> dict[str, Any]:
    """A streamed chat-completions body. What has its default value is left out: many models refuse it."""
    body: dict[str, Any] = dict(call.options)
    if "messages" not in body:
        body["messages"] = [as_openai(message) for message in call.conversation.messages]
    if call.conversation.tools and "tools" not in body:
        body["tools"] = list(call.conversation.tools)
    if call.tool_choice != "auto" and "tool_choice" not in body:
        body["tool_choice"] = as_openai_choice(call.tool_choice)
    if not call.parallel:
        body["parallel_tool_calls"] = False
    if call.json_schema is not None and "response_format" not in body:
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "reply", "schema": call.json_schema},
        }
    if call.logprobs:
        body["logprobs"] = True
        if call.sampling.top_logprobs:
            body["top_logprobs"] = call.sampling.top_logprobs
    for name in ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed"):
        value = getattr(call.sampling, name)
        if value != getattr(DEFAULT_SAMPLING, name):
            body[name] = value
    if call.sampling.stop:
        body["stop"] = list(call.sampling.stop)
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


def as_openai(message: Message) -> dict[str, Any]:
    """A message as OpenAI's API takes it."""
    shaped: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        shaped["content"] = message.content or None
        shaped["tool_calls"] = [as_openai_call(call) for call in message.tool_calls]
    if message.reasoning is not None:
        shaped["reasoning_content"] = message.reasoning
    if message.tool_call_id is not None:
        shaped["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        shaped["name"] = message.name
    return shaped


def as_openai_choice(choice: ToolChoice) -> Any:
    return {"type": "function", "function": {"name": choice.name}} if isinstance(choice, NamedTool) else choice


def as_openai_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class UpstreamReply:
    """Collects an upstream's chunks. A tool call comes out once it is whole."""

    def __init__(self) -> None:
        self.finish_reason = ""
        self.usage = Usage()
        self.model: str | None = None
        self._stop: str | None = None
        self._reasoning_tokens = 0
        self._tokens: list[Token] = []
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._open: dict[int, dict[str, str]] = {}

    def add(self, chunk: Mapping[str, Any]) -> list[Delta]:
        """What a chunk made certain. Raises ``EngineError`` for something that is not a chunk."""
        try:
            return self._add(chunk)
        except (TypeError, AttributeError, KeyError, IndexError, ValueError) as error:
            raise EngineError(f"the upstream sent something that is no chat completion chunk: {error!r}") from error

    def finish(self) -> list[Delta]:
        """Calls still open. Raises ``EngineError`` if the reply was cut."""
        if not self.finish_reason:
            raise EngineError("the upstream's stream ended without a finish reason")
        return self._close_calls(None)

    def take_tokens(self) -> list[Token]:
        """Tokens with their log-probs, since they were taken last."""
        taken, self._tokens = self._tokens, []
        return taken

    def extra(self) -> dict[str, Any]:
        """What else a turn records of the reply."""
        known = {"model": self.model, "stop": self._stop, "reasoning_tokens": self._reasoning_tokens}
        return {name: value for name, value in known.items() if value}

    def message(self) -> Message:
        return Message(
            role="assistant",
            content="".join(self._text),
            reasoning="".join(self._reasoning) or None,
            tool_calls=tuple(self._calls),
        )

    def _add(self, chunk: Mapping[str, Any]) -> list[Delta]:
        if chunk.get("error"):
            error = chunk["error"] if isinstance(chunk["error"], dict) else {"message": chunk["error"]}
            if error.get("code") == "context_length_exceeded":
                raise RequestRefused(str(error.get("message")), code=error["code"])
            raise EngineError(f"the upstream failed: {error.get('message')}")
        self.model = chunk.get("model") or self.model
        if chunk.get("usage"):
            self._count(chunk["usage"])
        deltas: list[Delta] = []
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            reasoning = delta.get("reasoning_content") or delta.get("reasoning")
            if isinstance(reasoning, str) and reasoning:
                self._reasoning.append(reasoning)
                deltas.append(Delta(reasoning=reasoning))
            content = delta.get("content") or ""
            if not isinstance(content, str):
                raise TypeError("its content is no text")
            if content:
                self._text.append(content)
                deltas.append(Delta(text=content))
            for fragment in delta.get("tool_calls") or ():
                deltas += self._fragment(fragment)
            for entry in (choice.get("logprobs") or {}).get("content") or ():
                self._tokens.append(_token(entry))
            if isinstance(choice.get("stop_reason"), str):
                self._stop = choice["stop_reason"]  # some say which stop string it was
            if choice.get("finish_reason"):
                self.finish_reason = str(choice["finish_reason"])
                deltas += self._close_calls(None)
        return deltas

    def _fragment(self, fragment: Mapping[str, Any]) -> list[Delta]:
        index = int(fragment.get("index", len(self._calls)))
        deltas = [] if index in self._open else self._close_calls(index)
        call = self._open.setdefault(index, {"id": "", "name": "", "arguments": ""})
        function = fragment.get("function") or {}
        call["id"] = fragment.get("id") or call["id"]
        call["name"] = function.get("name") or call["name"]
        call["arguments"] += function.get("arguments") or ""
        return deltas

    def _close_calls(self, index: int | None) -> list[Delta]:
        """Fragments of a later call have begun, or the reply is over: what came before is whole."""
        whole = sorted(number for number in self._open if index is None or number < index)
        deltas = []
        for number in whole:
            call = self._open.pop(number)
            self._calls.append(
                ToolCall(id=call["id"] or new_call_id(), name=call["name"], arguments=call["arguments"] or "{}")
            )
            deltas.append(Delta(tool_call=self._calls[-1]))
        return deltas

    def _count(self, usage: Mapping[str, Any]) -> None:
        details = usage.get("prompt_tokens_details") or {}
        self._reasoning_tokens = int((usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0)
        self.usage = Usage(
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            cached_tokens=int(details.get("cached_tokens") or 0),
            completion_tokens=int(usage.get("completion_tokens") or 0),
        )


def _token(entry: Mapping[str, Any]) -> Token:
    top = tuple((str(one["token"]), float(one["logprob"])) for one in entry.get("top_logprobs") or ())
    return Token(text=str(entry["token"]), logp=float(entry["logprob"]), top=top)
