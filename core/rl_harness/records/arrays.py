"""Token arrays and their serialisation: the one place that knows how numpy arrays become bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")

IdArray = NDArray[np.int32]
LogpArray = NDArray[np.float32]


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array


def ids(values: Iterable[int] | NDArray[Any]) -> IdArray:
    """A read-only one-dimensional ``int32`` array of token ids (or of policy versions)."""
    if isinstance(values, np.ndarray):
        return _frozen(np.array(values, dtype=np.int32).reshape(-1))
    return _frozen(np.fromiter(values, dtype=np.int32))


def logps(values: Iterable[float] | NDArray[Any]) -> LogpArray:
    """A read-only one-dimensional ``float32`` array of per-token values (nats, or a mask, or weights)."""
    if isinstance(values, np.ndarray):
        return _frozen(np.array(values, dtype=np.float32).reshape(-1))
    return _frozen(np.fromiter(values, dtype=np.float32))


def finite(values: LogpArray) -> bool:
    """Whether each is a number. Of log-probs, whose sum shows what any of them is not."""
    return math.isfinite(np.add.reduce(values, dtype=np.float64))


def _enc_hook(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype == np.int32 or value.dtype == np.float32:
            return [value.dtype.str, np.ascontiguousarray(value).tobytes()]
        raise TypeError(f"records hold int32 and float32 arrays, not {value.dtype}")
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, np.floating):
        return float(value)
    raise TypeError(f"{type(value).__name__} is not serialisable in a record")


def _dec_hook(target: Any, value: Any) -> Any:
    origin = getattr(target, "__origin__", target)
    if origin is np.ndarray:
        dtype, data = value
        if dtype not in ("<i4", "<f4"):
            raise TypeError(f"unexpected array type {dtype!r} in a record")
        return np.frombuffer(data, dtype=dtype)
    raise TypeError(f"cannot decode into {target!r}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_enc_hook)


def encode(record: object) -> bytes:
    """Serialise any record (or list or mapping of records) to msgpack."""
    return _encoder.encode(record)


def decode(kind: type[T], data: bytes) -> T:
    """Inverse of :func:`encode`. Raises :class:`msgspec.ValidationError` on data of another shape."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_dec_hook)
