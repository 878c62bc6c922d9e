"""The protocols agents speak, found by where they post to."""

from collections.abc import Mapping

from rl_harness.gateway.protocols.base import Protocol
from rl_harness.gateway.protocols.chat import Chat

__all__ = ["DEFAULT", "PROTOCOLS", "Protocol"]

DEFAULT: Protocol = Chat()
"""Whose words are used where no protocol is spoken."""

PROTOCOLS: Mapping[str, Protocol] = {protocol.path: protocol for protocol in (DEFAULT,)}
