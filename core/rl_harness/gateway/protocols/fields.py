"""What the bodies of all protocols have in common: how they are decoded, which values sampling parameters may have,
the one form of a tool, and how what is no text is refused or passed on."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from rl_harness.contracts.renderer import ToolSpec
from rl_harness.gateway.arguments import load_object
from rl_harness.gateway.errors import ApiError, bad_request
from rl_harness.gateway.sampling import ClientSampling
from rl_harness.records.turn import ToolCall

MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
MAX_REPLIES = 128

Body = TypeVar("Body")
ChatPart = Mapping[str, Any]
"""A part of a message's content as a chat API takes it."""

_encoder = msgspec.json.Encoder()
#: JSON of a value, as it goes into an event.
encode: Callable[[Any], bytes] = _encoder.encode


def decode(decoder: msgspec.json.Decoder[Body], data: bytes) -> Body:
    """A request's body. Raises :class:`ApiError` (400) that names the field which is wrong."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"the request body is not valid: {error}") from None


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)


def check(name: str, value: object, valid: bool, meaning: str) -> None:
    if not valid:
        raise bad_request(f"{name}: {value!r} is not {meaning}", param=name)


def client_sampling(
    *,
    limit: int | None,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None = None,
    min_p: float | None = None,
    stop: Sequence[str] = (),
    seed: int | None = None,
    top_logprobs: int = 0,
    limit_field: str = "max_tokens",
    stop_field: str = "stop",
) -> ClientSampling:
    """What a request asks for, within what is possible. Raises :class:`ApiError` (400) naming the field."""
    check(limit_field, limit, limit is None or limit >= 1, "at least 1")
    check("temperature", temperature, temperature is None or 0 <= temperature <= 100, "from 0 to 100")
    check("top_p", top_p, top_p is None or 0 < top_p <= 1, "above 0 and at most 1")
    check("min_p", min_p, min_p is None or 0 <= min_p <= 1, "from 0 to 1")
    check("top_k", top_k, top_k is None or -1 <= top_k < 2**31, "at least 0")
    check("seed", seed, seed is None or -(2**63) <= seed < 2**63, "a 64-bit integer")
    check(stop_field, stop, len(stop) <= MAX_STOPS and all(stop), f"at most {MAX_STOPS} non-empty strings")
    check("top_logprobs", top_logprobs, 0 <= top_logprobs <= MAX_TOP_LOGPROBS, f"from 0 to {MAX_TOP_LOGPROBS}")
    return ClientSampling(
        max_tokens=limit,
        temperature=temperature,
        top_p=top_p,
        top_k=None if top_k is None else max(top_k, 0),
        min_p=min_p,
        stop=tuple(stop),
        seed=None if seed is None else seed & (2**63 - 1),
        top_logprobs=top_logprobs,
    )


def function_tool(name: str, description: str | None, schema: Any, where: str) -> ToolSpec:
    """A tool in the one form renderers take. Raises :class:`ApiError` (400) for one without a name."""
    if not name:
        raise bad_request(f"{where}.name: a non-empty string is needed", param=where)
    function: dict[str, Any] = {"name": name}
    if description:
        function["description"] = description
    function["parameters"] = {"type": "object", "properties": {}} if schema is None else schema
    return {"type": "function", "function": function}


def text_only(where: str, kind: str) -> ApiError:
    return bad_request(f"{where}: this model takes text only, not {kind!r}", param=where)


def stand_in(kind: str, part: Any) -> str:
    """The words for something that is no text, in what is recorded of a message: the same for the same."""
    return f"[{kind} {hashlib.blake2b(encode(part), digest_size=8).hexdigest()}]"


def arguments_object(call: ToolCall) -> bytes:
    """The arguments of a call as a JSON object, for protocols that take nothing else."""
    if load_object(call.arguments) is None:
        return encode({"arguments": call.arguments})
    return call.arguments.encode()
