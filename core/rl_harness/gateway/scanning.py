"""Looks for secrets in conversations, in each message once: a conversation is sent anew with every call."""

from __future__ import annotations

import msgspec

from rl_harness.gateway.tree import Conversation
from rl_harness.records.turn import Message
from rl_harness.redaction import Secrets

#: Messages of a session that lives for long.
_REMEMBERED = 10_000


class Scanner:
    """Of one session."""

    def __init__(self, secrets: Secrets) -> None:
        self.secrets = secrets
        self._seen: dict[tuple[bytes, int], tuple[str, ...]] = {}

    def in_call(self, conversation: Conversation, reply: Message) -> tuple[str, ...]:
        """The names of the secrets that a call holds: in its tools, its messages or its reply."""
        found: dict[str, None] = {}
        tools = (conversation.links[0], 0)
        names = self._seen.get(tools)
        if names is None:
            text = msgspec.json.encode(conversation.tools).decode()
            names = self._seen[tools] = tuple(self.secrets.find(text))
        found.update(dict.fromkeys(names))
        for message, digest in zip(conversation.messages, conversation.digests, strict=True):
            known = (digest, hash(message.reasoning))  # which the digest leaves out
            names = self._seen.get(known)
            if names is None:
                if len(self._seen) >= _REMEMBERED:
                    self._seen.clear()
                names = self._seen[known] = self._in_message(message)
            if names:
                found.update(dict.fromkeys(names))
        found.update(dict.fromkeys(self._in_message(reply)))
        return tuple(found)

    def _in_message(self, message: Message) -> tuple[str, ...]:
        texts = [message.content, message.reasoning or "", message.name or "", message.tool_call_id or ""]
        for call in message.tool_calls:
            texts += [call.name, call.arguments, call.id]
        return tuple(self.secrets.find("\n".join(texts)))
