"""Messages between the host, the helper and each sandbox's init: one JSON object a packet, with descriptors.

The transport is a ``SOCK_SEQPACKET`` socket pair. A large message travels in a memfd, as the first descriptor.
The host treats what an init sends as hostile: a packet is at most ``MAX_PACKET`` bytes and must be a JSON object.
"""

from __future__ import annotations

import array
import json
import os
import socket
from collections.abc import Sequence
from typing import Any

MAX_PACKET = 60_000
MAX_DESCRIPTORS = 8
MAX_LARGE = 64 << 20


class ProtocolError(Exception):
    """The other side sent something that is not a message."""


def send(sock: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send one message; the descriptors are duplicated into the receiver, the caller keeps its own."""
    data = json.dumps(message).encode()
    large = -1
    try:
        if len(data) > MAX_PACKET:
            large = os.memfd_create("message")
            view = memoryview(data)
            while view:
                view = view[os.write(large, view) :]
            descriptors = (large, *descriptors)
            data = b"{}"
        rights = array.array("i", descriptors)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if descriptors else []
        sock.sendmsg([data if large < 0 else b"L"], ancillary, socket.MSG_NOSIGNAL)
    finally:
        if large >= 0:
            os.close(large)


def receive(sock: socket.socket, *, trusted: bool) -> tuple[dict[str, Any], list[int]] | None:
    """The next message and its descriptors (close-on-exec); None when the other side is gone.

    Only a ``trusted`` sender may use large messages. Raises BlockingIOError on a non-blocking socket.
    """
    space = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
    try:
        data, ancillary, flags, _ = sock.recvmsg(MAX_PACKET + 1, space, socket.MSG_CMSG_CLOEXEC)
    except ConnectionError:
        return None
    descriptors = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
    received = list(descriptors)
    if not data:
        close_all(received)
        return None
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ProtocolError("message too large")
        if data == b"L" and trusted and received:
            data = _read_large(received[0])
            os.close(received.pop(0))
        message = json.loads(data)
        if not isinstance(message, dict):
            raise ProtocolError("message is not an object")
    except (ValueError, RecursionError, ProtocolError) as error:
        close_all(received)
        raise ProtocolError(str(error)) from None
    return message, received


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _read_large(descriptor: int) -> bytes:
    size = os.fstat(descriptor).st_size
    if size > MAX_LARGE:
        raise ProtocolError("message too large")
    data = bytearray()
    while len(data) < size:
        chunk = os.pread(descriptor, size - len(data), len(data))
        if not chunk:
            break
        data += chunk
    return bytes(data)
