"""The frames that a helper sends, taken apart with the distrust they deserve. The layout is in ``helper``."""

from __future__ import annotations

from collections.abc import Iterator

from rl_harness.sandboxes.resident.helper import CHUNK, HEADER

Frame = tuple[int, int, bytes]

#: No honest frame of a helper has a longer payload.
MAX_PAYLOAD = CHUNK


class ProtocolError(Exception):
    """The helper, or who passes for it, sent what no helper of this version sends."""


class Decoder:
    """Cuts a byte stream into frames; holds at most one unfinished frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> Iterator[Frame]:
        """The frames that ``chunk`` completes. Raises :class:`ProtocolError`; the stream is of no use then."""
        buffer = self._buffer
        buffer += chunk
        at = 0
        try:
            while len(buffer) - at >= HEADER.size:
                kind, stream, length = HEADER.unpack_from(buffer, at)
                if length > MAX_PAYLOAD:
                    raise ProtocolError(f"a frame of {length} bytes")
                start = at + HEADER.size
                if len(buffer) - start < length:
                    break
                at = start + length
                yield kind, stream, bytes(buffer[start:at])
        finally:
            del buffer[:at]
