"""Helpers in sandboxes of uid 65534: ``python unprivileged.py FOLDER`` prints a JSON line a check.

Started as root in a process of its own, like ``../unprivileged.py``, whose means it uses.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import site
import sys
import tempfile
import traceback
from pathlib import Path
from types import ModuleType

CHECKED = {
    "exit_code_and_separate_streams",
    "stdin_is_what_was_given_and_ends",
    "a_timeout_kills_all_descendants_and_keeps_the_output",
    "another_user_is_refused_not_ignored",
    "kill_processes_leaves_none_and_keeps_files",
    "a_slow_reader_slows_the_command",
}


def load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HERE = Path(__file__).parent
OTHERS = load("unprivileged_means", HERE.parent / "unprivileged.py")
SHARED = load("resident_conftest", HERE / "conftest.py")


async def relayed(provider: object) -> None:
    from rl_harness.contracts import SandboxSpec
    from rl_harness.sandboxes.resident import agents_view, tcp

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"got " + await reader.readline())
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    sandbox = await provider.create(SandboxSpec())  # type: ignore[attr-defined]
    target = tcp("127.0.0.1", server.sockets[0].getsockname()[1])
    async with agents_view(sandbox, commands=True, target=target) as view:
        assert view.url is not None
        code = "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1])))"
        code += "; s.sendall(b'it\\n'); print(s.makefile('rb').read())"
        done = await view.sandbox.exec(["python3", "-c", code, view.url.rpartition(":")[2]])
        assert done.stdout == b"b'got it\\n'\n", done
    server.close()


async def run(folder: Path) -> None:
    from rl_harness.sandboxes.local import LocalProvider
    from rl_harness.testing.sandbox import CHECKS

    local = LocalProvider(LocalProvider.Options(state_dir=folder / "state"))
    provider = SHARED.ResidentProvider(local)

    async def checked(name: str, work: object) -> None:
        outcome = {"check": name}
        try:
            await work  # type: ignore[misc]
        except Exception:
            outcome["failed"] = traceback.format_exc()
        print(json.dumps(outcome), flush=True)

    with tempfile.TemporaryDirectory(dir=folder) as host:
        for check in CHECKS:
            if check.name in CHECKED:
                await checked(check.name, check.run(provider, Path(host)))
        await checked("relayed", relayed(local))
    await provider.close()


def main() -> None:
    folder = Path(sys.argv[1])
    os.chown(folder, OTHERS.NOBODY, OTHERS.NOBODY)
    packages = [Path(path) for path in {*sys.path, *site.getsitepackages()} if Path(path).is_dir()]
    OTHERS.expose([*packages, Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).resolve().parent])
    os.setgroups([])
    os.setresgid(*[OTHERS.NOBODY] * 3)
    os.setresuid(*[OTHERS.NOBODY] * 3)
    os.environ["HOME"] = "/nonexistent"
    os.chdir("/")
    asyncio.run(run(folder))


if __name__ == "__main__":
    main()
