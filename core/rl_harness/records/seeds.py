"""Seeds made of seeds: reproducible, and different for everything that must not draw the same noise."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *parts: bytes | int) -> int:
    """A 62-bit seed for what ``parts`` name, of the seed of what it is part of."""
    text = b"\0".join(part if isinstance(part, bytes) else str(part).encode() for part in (seed, *parts))
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 2
