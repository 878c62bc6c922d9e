"""Runs conformance checks as uid 65534: ``python unprivileged.py FOLDER [NAME...]`` prints a JSON line a check.

Started as root in a process of its own, whose mount namespace it changes so that this interpreter and its packages
can be read even where they lie below somebody's private home.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import site
import sys
import tempfile
import traceback
from pathlib import Path

NOBODY = 65534
AT_ONCE = 4  # checks mostly wait


def expose(paths: list[Path]) -> None:
    """Make ``paths`` reachable for everybody, in a private mount namespace, by replacing closed parents."""
    libc = ctypes.CDLL(None, use_errno=True)

    def mount(source: str | None, target: Path, kind: str | None, flags: int) -> None:
        arguments = [None if text is None else text.encode() for text in (source, str(target), kind)]
        if libc.mount(*arguments, ctypes.c_ulong(flags), None):
            raise OSError(ctypes.get_errno(), f"mount {target}")

    newns, rec, private, bind = 0x20000, 0x4000, 0x40000, 0x1000
    if libc.unshare(newns):
        raise OSError(ctypes.get_errno(), "unshare")
    mount(None, Path("/"), None, rec | private)
    closed: dict[Path, dict[Path, int]] = {}
    for path in paths:
        for parent in reversed(path.parents):
            if not parent.stat().st_mode & 0o001:
                closed.setdefault(parent, {})[path] = os.open(path, os.O_PATH)
                break
    for parent, inner in closed.items():
        mount("open", parent, "tmpfs", 0)
        parent.chmod(0o755)
        for path, descriptor in inner.items():
            path.mkdir(parents=True, exist_ok=True)
            mount(f"/proc/self/fd/{descriptor}", path, None, bind | rec)


async def run(names: list[str], folder: Path) -> None:
    from rl_harness.contracts.sandbox import Sandbox
    from rl_harness.sandboxes.local import LocalProvider
    from rl_harness.testing.sandbox import CHECKS, Check, Rig

    options = LocalProvider.Options(state_dir=folder / "state")
    provider = LocalProvider(options)

    async def crash(sandbox: Sandbox) -> None:
        os.kill(json.loads((folder / "state" / sandbox.id / "init.json").read_text())["pid"], signal.SIGKILL)

    rig = Rig(options=options, crash=crash)
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(check: Check) -> None:
        outcome = {"check": check.name}
        if reason := check.inapplicable(provider.capabilities, rig):
            outcome["skipped"] = reason
        else:
            async with turns:
                try:
                    with tempfile.TemporaryDirectory(dir=folder) as host:
                        await check.run(provider, Path(host), rig)
                except Exception:
                    outcome["failed"] = traceback.format_exc()
        print(json.dumps(outcome), flush=True)

    await asyncio.gather(*(one(check) for check in CHECKS if not names or check.name in names))
    await provider.close()
    left = [path.name for path in (folder / "state").iterdir()]
    print(json.dumps({"check": "nothing_is_left", **({"failed": f"left: {left}"} if left else {})}), flush=True)


def main() -> None:
    folder = Path(sys.argv[1])
    os.chown(folder, NOBODY, NOBODY)
    packages = [Path(path) for path in {*sys.path, *site.getsitepackages()} if Path(path).is_dir()]
    interpreter = [Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).resolve().parent]
    expose([*packages, *interpreter])
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    os.environ["HOME"] = "/nonexistent"
    os.chdir("/")
    asyncio.run(run(sys.argv[2:], folder))


if __name__ == "__main__":
    main()
