"""Replies in the responses protocol: items of output, whole or as the long sequence of events that tells of them."""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rl_harness.gateway.arguments import load_object
from rl_harness.gateway.calls import Finish, Piece, Token
from rl_harness.gateway.errors import ApiError
from rl_harness.gateway.protocols.base import Reply
from rl_harness.gateway.protocols.chat import logprob
from rl_harness.gateway.protocols.fields import encode, new_id
from rl_harness.gateway.protocols.responses_tools import Toolbox
from rl_harness.records.turn import ToolCall, Turn

#: What sealed reasoning begins with. It is no secret: clients that drop the open text send this back.
_SEAL = "rlh1."
_PREFIXES = {"function_call": "fc_", "custom_tool_call": "ctc_", "local_shell_call": "lsh_"}
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


def seal(reasoning: str) -> str:
    """Reasoning in the form in which clients keep it without reading it."""
    return _SEAL + base64.b64encode(reasoning.encode()).decode()


def unseal(sealed: str | None) -> str | None:
    """The reasoning; None for what was not sealed here."""
    if sealed is None or not sealed.startswith(_SEAL):
        return None
    try:
        return base64.b64decode(sealed[len(_SEAL) :], validate=True).decode()
    except (binascii.Error, ValueError):
        return None


class ResponsesReply(Reply):
    """Writes one reply. ``said``: fields of the request that a response repeats."""

    def __init__(self, model: str, id: str, toolbox: Toolbox, *, said: Mapping[str, Any]) -> None:
        self._toolbox = toolbox
        self._response: dict[str, Any] = {
            "id": id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "metadata": {},
            "model": model,
            "output": [],
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "truncation": "disabled",
            "usage": None,
            **said,
        }
        self._sequence = 0
        self._output: list[dict[str, Any]] = []
        self._open = ""  # the kind of the item that is open
        self._item_id = ""
        self._said: list[str] = []  # its text so far
        self._head = b""  # what its deltas have after their number
        self._has_text = False  # there was a message
        self._tokens: list[dict[str, Any]] = []  # log-probs of the open message
        self._waiting: list[dict[str, Any]] = []  # those that no delta has had yet

    def collect(self, piece: Piece) -> None:
        self._tokens += [logprob(token) for token in piece.tokens]

    def whole(self, turns: Sequence[Turn]) -> bytes:
        (turn,) = turns
        said = turn.message
        status = "incomplete" if turn.finish_reason in _INCOMPLETE else "completed"
        if said.reasoning is not None:
            self._output.append(_reasoning(new_id("rs_"), said.reasoning))
        if said.content or not (said.tool_calls or said.reasoning):
            text = _text(said.content, self._tokens)
            self._output.append(_message(new_id("msg_"), [text], status))
        for call in said.tool_calls:
            self._output.append(self._call_item(call)[0])
        return encode(self._ended(turn))

    def counted(self, tokens: int) -> bytes:
        return encode({"object": "response.input_tokens", "input_tokens": tokens})

    def first(self, piece: Piece) -> bytes:
        return self._event("response.created", response=self._response) + self._event(
            "response.in_progress", response=self._response
        )

    def piece(self, piece: Piece) -> bytes:
        out = b""
        if piece.tokens:
            self._count(piece.tokens)
        for delta in piece.deltas:
            if delta.reasoning:
                if self._open != "reasoning":
                    out += self._start_reasoning()
                out += self._delta(b"response.reasoning_text.delta", delta.reasoning, b"}\n\n")
            if text := delta.text:
                if self._open != "message":
                    if self._has_text and text.startswith("\n"):
                        text = text[1:]  # messages are put together again with a line break between them
                    out += self._start_message()
                out += self._delta(b"response.output_text.delta", text, self._text_tail())
            if delta.tool_call is not None:
                out += self._call(delta.tool_call)
        return out

    def last(self, finish: Finish) -> bytes:
        turn = finish.turn
        status = "incomplete" if turn.finish_reason in _INCOMPLETE else "completed"
        out = b""
        if not self._output and not self._open:
            out = self._start_message()  # a reply without anything is an empty message
        out += self._close(status)
        ended = self._ended(turn)
        return out + self._event(f"response.{ended['status']}", response=ended)

    def failed(self, error: ApiError) -> bytes:
        code = "server_error" if error.status >= 500 else error.code or "invalid_prompt"
        ended = self._response | {
            "status": "failed",
            "error": {"code": code, "message": error.message},
            "output": self._output,
        }
        opening = b"" if self._sequence else self._event("response.created", response=self._response)
        return opening + self._event("response.failed", response=ended)

    def _event(self, type: str, **fields: Any) -> bytes:
        data = encode({"type": type, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return b"event: %b\ndata: %b\n\n" % (type.encode(), data)

    def _delta(self, type: bytes, text: str, tail: bytes) -> bytes:
        self._said.append(text)
        sequence = self._sequence
        self._sequence += 1
        return b'event: %b\ndata: {"type":"%b","sequence_number":%d,%b%b%b' % (
            type,
            type,
            sequence,
            self._head,
            encode(text),
            tail,
        )

    def _start(self, kind: str, prefix: str, item: dict[str, Any]) -> bytes:
        """Open an item, and close the one before it."""
        closed = self._close("completed")
        self._open = kind
        self._item_id = new_id(prefix)
        place = {"item_id": self._item_id, "output_index": len(self._output), "content_index": 0}
        self._head = encode(place)[1:-1] + b',"delta":'
        added = self._event(
            "response.output_item.added", output_index=len(self._output), item={"id": self._item_id, **item}
        )
        return closed + added

    def _start_reasoning(self) -> bytes:
        item = {"type": "reasoning", "summary": [], "content": [], "status": "in_progress"}
        return self._start("reasoning", "rs_", item) + self._part("added", {"type": "reasoning_text", "text": ""})

    def _start_message(self) -> bytes:
        self._has_text = True
        item = {"type": "message", "status": "in_progress", "role": "assistant", "content": []}
        return self._start("message", "msg_", item) + self._part("added", _text("", []))

    def _part(self, what: str, part: dict[str, Any]) -> bytes:
        return self._event(f"response.content_part.{what}", **self._place(), part=part)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": len(self._output), "content_index": 0}

    def _close(self, status: str) -> bytes:
        """End the item that is open."""
        text = "".join(self._said)
        self._said = []
        if self._open == "reasoning":
            out = self._event("response.reasoning_text.done", **self._place(), text=text)
            out += self._part("done", {"type": "reasoning_text", "text": text})
            out += self._done(_reasoning(self._item_id, text))
        elif self._open == "message":
            part = _text(text, self._tokens)
            self._tokens = []
            out = self._event("response.output_text.done", **self._place(), text=text, logprobs=part["logprobs"])
            out += self._part("done", part)
            out += self._done(_message(self._item_id, [part], status))
        else:
            return b""
        self._open = ""
        return out

    def _done(self, item: dict[str, Any]) -> bytes:
        event = self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        return event

    def _call(self, call: ToolCall) -> bytes:
        item, kind, field, written = self._call_item(call)
        out = self._close("completed")
        index = len(self._output)
        begun = {**item, "status": "in_progress"}
        if kind != "local_shell_call":
            begun[field] = ""
        out += self._event("response.output_item.added", output_index=index, item=begun)
        name = {"function_call": "function_call_arguments", "custom_tool_call": "custom_tool_call_input"}.get(kind)
        if name is not None:
            place = {"item_id": item["id"], "output_index": index}
            out += self._event(f"response.{name}.delta", **place, delta=written)
            out += self._event(f"response.{name}.done", **place, **{field: written})
        return out + self._done(item)

    def _call_item(self, call: ToolCall) -> tuple[dict[str, Any], str, str, str]:
        kind, fields, field, written = self._toolbox.item(call)
        value: Any = written
        if kind == "local_shell_call":
            asked = load_object(written) or {}
            value = {"type": "exec", "command": [], "env": {}, **asked}
        item = {"id": new_id(_PREFIXES[kind]), "type": kind, "status": "completed", **fields, field: value}
        return item, kind, field, written

    def _count(self, tokens: Sequence[Token]) -> None:
        """Log-probs go out with the next text of their message, since only text has a place for them."""
        entries = [logprob(token) for token in tokens]
        self._tokens += entries
        self._waiting += entries

    def _text_tail(self) -> bytes:
        if not self._waiting:
            return b',"logprobs":[]}\n\n'
        tail = b',"logprobs":%b}\n\n' % encode(self._waiting)
        self._waiting = []
        return tail

    def _ended(self, turn: Turn) -> dict[str, Any]:
        """The response as it is in the end."""
        reason = _INCOMPLETE.get(turn.finish_reason)
        return self._response | {
            "status": "completed" if reason is None else "incomplete",
            "incomplete_details": None if reason is None else {"reason": reason},
            "output": self._output,
            "usage": {
                "input_tokens": turn.prompt_tokens,
                "input_tokens_details": {"cached_tokens": turn.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": turn.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": turn.extra.get("reasoning_tokens", 0)},
                "total_tokens": turn.prompt_tokens + turn.completion_tokens,
            },
        }


def _reasoning(id: str, text: str) -> dict[str, Any]:
    return {
        "id": id,
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
        "encrypted_content": seal(text),
        "status": "completed",
    }


def _message(id: str, parts: list[dict[str, Any]], status: str) -> dict[str, Any]:
    return {"id": id, "type": "message", "status": status, "role": "assistant", "content": parts}


def _text(text: str, tokens: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": tokens}
