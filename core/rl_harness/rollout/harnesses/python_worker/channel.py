"""Messages between worker and harness: JSON, each with its length in front, over a socket of its own."""

from __future__ import annotations

import json
import socket
import struct
import threading
from typing import Any

#: Bytes of one message in either direction, file contents included.
MAX_FRAME = 32 * 1024 * 1024
HEADER = struct.Struct(">I")

#: Errors of the harness that are raised again here; any other becomes a RuntimeError.
_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error
    for error in (FileNotFoundError, IsADirectoryError, PermissionError, OSError, ValueError, TypeError)
}


class _Waiting:
    def __init__(self) -> None:
        self.done = threading.Event()
        self.reply: dict[str, Any] = {}


class Channel:
    """Calls may be made from any thread; a reader thread hands each reply to the call that waits for it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._waiting: dict[int, _Waiting] = {}
        self._last_id = 0

    def send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        if len(data) > MAX_FRAME:
            raise ValueError(f"a message of {len(data)} bytes is over the limit of {MAX_FRAME} bytes")
        with self._lock:
            self._sock.sendall(HEADER.pack(len(data)) + data)

    def receive(self) -> dict[str, Any]:
        """The next message; raises ``EOFError`` when the harness is gone."""
        (size,) = HEADER.unpack(self._read(HEADER.size))
        message: dict[str, Any] = json.loads(self._read(size))
        return message

    def start_reader(self) -> None:
        """From here on only :meth:`call` receives."""
        threading.Thread(target=self._hand_out_replies, name="rl-harness-replies", daemon=True).start()

    def call(self, op: str, **fields: Any) -> Any:
        """Ask the harness and wait for its value; an error there is raised here."""
        waiting = _Waiting()
        with self._lock:
            self._last_id += 1
            number = self._last_id
            self._waiting[number] = waiting
        try:
            self.send({"op": op, "id": number, **fields})
            waiting.done.wait()
        finally:
            self._waiting.pop(number, None)
        if waiting.reply.get("error") is not None:
            raise _ERRORS.get(waiting.reply["kind"], RuntimeError)(waiting.reply["error"])
        return waiting.reply["value"]

    def _hand_out_replies(self) -> None:
        try:
            while True:
                reply = self.receive()
                waiting = self._waiting.get(reply["id"])
                if waiting is not None:
                    waiting.reply = reply
                    waiting.done.set()
        except (EOFError, OSError):
            return  # the harness is gone, and the supervisor is about to end this process

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = self._sock.recv(min(size - len(data), 1 << 20))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)
