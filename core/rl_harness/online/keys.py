"""Keys of online sessions: made at random, told once, kept as digests only."""

from __future__ import annotations

import hashlib
import secrets

import msgspec

from rl_harness.redaction import KEY_MARK, PATH_MARK


class Keys(msgspec.Struct, frozen=True, kw_only=True):
    """What a session is reached with: ``api`` to call the model, ``reward`` to reward, ``secret`` as a path prefix that
    needs no key. ``reward`` is the same as ``api`` only where AReaL's routes made the session."""

    api: str
    reward: str
    secret: str

    @classmethod
    def new(cls) -> Keys:
        return cls(
            api=f"{KEY_MARK}{secrets.token_urlsafe(24)}",
            reward=f"{KEY_MARK}reward-{secrets.token_urlsafe(24)}",
            secret=PATH_MARK + secrets.token_urlsafe(24),
        )


def new_admin_key() -> str:
    return f"{KEY_MARK}admin-{secrets.token_urlsafe(24)}"


def digest(key: str | bytes) -> bytes:
    """What is kept of a key. Looking a digest up takes the same time whatever the key is."""
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).digest()
