"""Makes the program that kills processes in machines of others, after a change of its source.

Needs gcc on x86_64. The source's digest is in the program, by which a test tells that the two belong together.
"""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "core/rl_harness/sandboxes/remote"


def make(target: Path) -> None:
    source = FOLDER / "killer.c"
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    flags = "-Os -Wall -Wextra -static -nostdlib -ffreestanding -fno-pie -no-pie -fno-stack-protector"
    flags += " -fno-asynchronous-unwind-tables -fno-tree-loop-distribute-patterns -fcf-protection=none"
    flags += " -Wl,--build-id=none,-z,noseparate-code,-z,noexecstack -s"
    subprocess.run(["gcc", *flags.split(), f'-DSOURCE="{digest}"', "-o", str(target), str(source)], check=True)


if __name__ == "__main__":
    make(FOLDER / "killer.x86_64")
