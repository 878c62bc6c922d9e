"""Where the gateway listens, and whether a request that arrives there was meant for it."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Iterable

from rl_harness.errors import Unavailable


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ``Unavailable`` when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio sets TCP_NODELAY on what is accepted; without, each answer waits 40 ms.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a client that is no more is noticed
        listening.bind((host, port))
        listening.listen(2048)
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise Unavailable(
                f"port {port} on {host} is in use", remedy="choose another port, or 0 for any free one"
            ) from error
        raise Unavailable(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
    return listening


class Hosts:
    """Which host headers are this machine's. Names that anybody can point here are not, addresses are."""

    def __init__(self, host: str, further: Iterable[str]) -> None:
        self._any = not _is_loopback(host)
        self._names = {"localhost", host.lower(), *(name.lower() for name in further)}
        self._known: set[bytes] = set()

    def allow(self, header: bytes) -> bool:
        """Whether a request with this host header is meant for here; any is where not only loopback is listened on."""
        if self._any or header in self._known:
            return True
        if not self._is_ours(header.decode("latin-1").lower()):
            return False
        if len(self._known) < 64:
            self._known.add(header)
        return True

    def _is_ours(self, header: str) -> bool:
        name = header.partition("]")[0].removeprefix("[") if header.startswith("[") else header.partition(":")[0]
        if name in self._names or name.endswith(".localhost") or not name:
            return True  # without a name there is nothing to point here: HTTP/1.0
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
