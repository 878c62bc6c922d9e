"""How records become rows and back. Arrays are stored as raw little-endian bytes, one-valued ones as one value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rl_harness.records import Episode, Turn

_ARRAYS = ("context", "completion", "logps", "versions")
_PLAIN = tuple(name for name in Turn.__struct_fields__ if name not in _ARRAYS)


def _plain_number(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not serialisable in a record")


_json = msgspec.json.Encoder(enc_hook=_plain_number)


def to_json(value: object) -> str:
    """A record as JSON. Lone surrogates, which a model's or an agent's JSON may contain but no UTF-8 can, become
    U+FFFD: one odd character must not cost an episode."""
    try:
        return _json.encode(value).decode()
    except UnicodeEncodeError:
        return _json.encode(_scrubbed(msgspec.to_builtins(value, enc_hook=_plain_number))).decode()


def _scrubbed(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, Mapping):
        return {_scrubbed(key): _scrubbed(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_scrubbed(inner) for inner in value]
    return value


def episode_of(record: str) -> Episode:
    return msgspec.json.decode(record, type=Episode)


def turn_row(turn: Turn) -> tuple[str, bytes, bytes, bytes, bytes]:
    """``record, context, completion, logps, versions`` of the turns table."""
    plain = {name: getattr(turn, name) for name in _PLAIN}
    return (
        to_json(plain),
        _bytes(turn.context, "<i4"),
        _bytes(turn.completion, "<i4"),
        _bytes(turn.logps, "<f4"),
        pack(turn.versions, "<i4"),
    )


def turn_of(record: str, context: bytes, completion: bytes, logps: bytes, versions: bytes) -> Turn:
    fields = msgspec.json.decode(record)
    fields["context"] = np.frombuffer(context, "<i4")
    fields["completion"] = np.frombuffer(completion, "<i4")
    fields["logps"] = np.frombuffer(logps, "<f4")
    fields["versions"] = unpack(versions, len(fields["completion"]), "<i4")
    return msgspec.convert(fields, Turn, dec_hook=lambda _, array: array)


def pack(array: NDArray[Any], dtype: str) -> bytes:
    """The array's bytes, or just one element's if all are equal (a version, an advantage: the usual case)."""
    if len(array) > 1 and bool((array == array[0]).all()):
        array = array[:1]
    return _bytes(array, dtype)


def unpack(data: bytes, length: int, dtype: str) -> NDArray[Any]:
    array = np.frombuffer(data, dtype)
    if len(array) == 1 and length != 1:
        array = np.full(length, array[0], dtype)
        array.flags.writeable = False
    return array


def _bytes(array: NDArray[Any], dtype: str) -> bytes:
    return np.ascontiguousarray(array, dtype).tobytes()
