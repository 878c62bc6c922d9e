"""The helper under every Python that this machine has, from 3.6 on; an older one is refused by name."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest
from rl_harness.contracts import EnvironmentSpec, NetworkPolicy, SandboxSpec
from rl_harness.sandboxes.process import ProcessProvider
from rl_harness.sandboxes.resident import HelperUnavailable, ResidentSandbox, tcp

FOLDERS = ["/usr/bin", "/usr/local/bin", *map(str, Path.home().glob(".pyenv/versions/*/bin"))]


def versions() -> dict[str, str]:
    """The folder of a ``python3`` of each version found."""
    found = {}
    for folder in FOLDERS:
        ask = [f"{folder}/python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        try:
            found[subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()] = folder
        except (OSError, subprocess.CalledProcessError):
            continue
    return found


VERSIONS = versions()


@pytest.mark.parametrize("version", sorted(VERSIONS, key=lambda version: int(version.split(".")[1])))
async def test_commands_and_connections(version: str, process: ProcessProvider) -> None:
    environment = EnvironmentSpec(env={"PATH": f"{VERSIONS[version]}:{os.environ['PATH']}"})
    view = await ResidentSandbox.start(
        await process.create(SandboxSpec(environment=environment, network=NetworkPolicy.FULL))
    )
    helper = await view.inner.exec("for p in $(pgrep -f 'rl-harness helpe[r]'); do readlink /proc/$p/exe; done")
    assert os.path.realpath(f"{VERSIONS[version]}/python3").encode() in helper.stdout.splitlines()

    result = await view.exec("cat; echo err >&2; exit 3", stdin=b"x" * 300_000, env={"A": "b"})
    assert (result.exit_code, len(result.stdout), result.stderr) == (3, 300_000, b"err\n")
    assert (await view.exec(["no-such-program"])).exit_code == 127
    sleep = f"sleep 6{os.getpid()}"  # nobody else's
    result = await view.exec(f"echo kept; (setsid {sleep} &); sleep 600", timeout=0.3)
    assert (result.timed_out, result.stdout) == (True, b"kept\n")
    assert (await view.exec(f"pgrep -fx '{sleep}'")).exit_code == 1

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read())
        writer.close()

    async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
        relay = await view.resident.relay(tcp("127.0.0.1", server.sockets[0].getsockname()[1]))
        reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
        writer.write(b"y" * 1_000_000)
        writer.write_eof()
        assert len(await reader.read()) == 1_000_000
        writer.close()
        await view.close()


async def test_a_python_that_is_too_old_is_named(process: ProcessProvider, tmp_path: Path) -> None:
    """An old interpreter runs what starts the helper; here one that says it is old, so that any machine has it."""
    old = tmp_path / "bin" / "python3"
    old.parent.mkdir()
    script = '#!/bin/sh\nwhile test "$1" != -c; do shift; done\n'
    script += 'exec /usr/bin/python3 -c "import sys; sys.version_info = (3, 5, 2); exec(sys.argv[1])" "$2"\n'
    old.write_text(script)
    old.chmod(0o755)
    environment = EnvironmentSpec(env={"PATH": f"{old.parent}:{os.environ['PATH']}"})
    sandbox = await process.create(SandboxSpec(environment=environment, network=NetworkPolicy.FULL))
    with pytest.raises(HelperUnavailable, match=r"Python 3\.5") as refused:
        await ResidentSandbox.start(sandbox)
    assert "Python 3.6" in (refused.value.remedy or "")
