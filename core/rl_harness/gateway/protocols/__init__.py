"""The protocols agents speak, found by where they post to."""

from collections.abc import Mapping

from rl_harness.gateway.protocols.base import Protocol
from rl_harness.gateway.protocols.chat import Chat
from rl_harness.gateway.protocols.messages import CountTokens, Messages
from rl_harness.gateway.protocols.responses import CountInput, Responses

__all__ = ["BY_HEADER", "DEFAULT", "PROTOCOLS", "Protocol"]

DEFAULT: Protocol = Chat()
"""Whose words are used where no protocol is spoken."""

_MESSAGES = Messages()

PROTOCOLS: Mapping[str, Protocol] = {
    protocol.path: protocol for protocol in (DEFAULT, _MESSAGES, CountTokens(), Responses(), CountInput())
}

BY_HEADER: Mapping[bytes, Protocol] = {b"anthropic-version": _MESSAGES}
"""Clients of these send a header of their own wherever they ask."""
