"""The data that flows between the parts: frozen, serialisable, no I/O.

All records are :class:`msgspec.Struct`; :func:`encode` and :func:`decode` turn any of them into JSON-compatible
msgpack and back. Token arrays are one-dimensional numpy arrays (ids ``int32``, log-probs ``float32``).
"""

from rl_harness.records.arrays import IdArray, LogpArray, decode, encode, ids, logps
from rl_harness.records.episode import (
    EMPTY_USAGE,
    Episode,
    EpisodeKey,
    Event,
    Origin,
    TaskRef,
    Termination,
    UnscoredReason,
    Usage,
)
from rl_harness.records.sample import Group, Sample, TokenBatch
from rl_harness.records.turn import Message, SamplingParams, ToolCall, Turn, prompt_of, sequence_of

__all__ = [
    "EMPTY_USAGE",
    "Episode",
    "EpisodeKey",
    "Event",
    "Group",
    "IdArray",
    "LogpArray",
    "Message",
    "Origin",
    "Sample",
    "SamplingParams",
    "TaskRef",
    "Termination",
    "TokenBatch",
    "ToolCall",
    "Turn",
    "UnscoredReason",
    "Usage",
    "decode",
    "encode",
    "ids",
    "logps",
    "prompt_of",
    "sequence_of",
]
