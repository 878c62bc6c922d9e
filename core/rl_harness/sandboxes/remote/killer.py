"""The program that kills processes in machines whose shell may be an agent's (``killer.c``): its bytes, where it goes,
and what it says."""

from __future__ import annotations

import functools
from pathlib import Path

#: Where it goes: files that are made executable before any task runs, since services' own ways to write a file keep the
#: mode of one that is there and make no other executable. More than one, for while one is running; each begins as
#: 64 KiB, which are room for the program on a disk that was filled since.
PLACES = tuple(f"/usr/libexec/rl-harness/end-{number}" for number in (1, 2, 3))

# Shell statements.
MAKE_PLACES = f"""
mkdir -p -- {PLACES[0].rpartition("/")[0]} && for place in {" ".join(PLACES)}; do
  [ -x "$place" ] || {{ printf '%65536s' '' > "$place" && chmod 0755 -- "$place"; }}
done 2>/dev/null
"""


@functools.cache
def program() -> bytes:
    return Path(__file__).with_name("killer.x86_64").read_bytes()


def killed(output: bytes) -> bool:
    """Whether what it printed says that no process is left that it was to kill."""
    return output == b"every process was killed\n"
