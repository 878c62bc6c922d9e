"""A task with an allow-list is run by the command line in a sandbox that has none of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FETCH = """
import sys, urllib.error, urllib.request
try: print(urllib.request.urlopen(sys.argv[1], timeout=60).read().decode())
except urllib.error.HTTPError as error: print(error.code)
"""


@pytest.fixture
def port() -> Iterator[int]:
    """Of servers at 127.0.0.2 and 127.0.0.3 that say which one they are, and 127.0.0.3 keeps what it was asked."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(EOFError, OSError):
            await reader.readuntil(b"\r\n\r\n")
            body = writer.get_extra_info("sockname")[0].encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(body), body))
            await writer.drain()
        writer.close()

    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(answer, "0.0.0.0", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield server.sockets[0].getsockname()[1]
    loop.call_soon_threadsafe(server.close)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def task(folder: Path, port: int, *, network: str, verifier: str = "separate", tests_network: str = "") -> Path:
    """Its solution and its tests fetch from 127.0.0.2 and 127.0.0.3 and write down what they got."""
    fetches = f"python3 $FETCH http://127.0.0.2:{port}/ > $1; python3 $FETCH http://127.0.0.3:{port}/ >> $1"
    for name, content in {
        "task.toml": f'schema_version = "1.4"\n[verifier]\n{tests_network}\n[environment]\n{network}\n'
        f'[rl_harness]\nverifier = "{verifier}"\n',
        "instruction.md": "Fetch.\n",
        "environment/workspace/fetch.py": FETCH,
        "solution/solve.sh": f"FETCH=/app/fetch.py; set -- /app/got; {fetches}\n",
        "tests/fetch.py": FETCH,
        "tests/test.sh": f"FETCH=/tests/fetch.py; set -- /tmp/got; {fetches}\n"
        "printf '127.0.0.2\\n403\\n' | tee /tmp/wanted; cat /app/got /tmp/got\n"
        "r=0; cmp /app/got /tmp/wanted && cmp /tmp/got /tmp/wanted && r=1; echo $r > /logs/verifier/reward.txt\n",
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


LISTED = 'network_mode = "allowlist"\nallowed_hosts = ["127.0.0.2"]'


@pytest.mark.needs("userns")
@pytest.mark.parametrize("verifier", ["separate", "shared"])
def test_agent_and_verifier_reach_the_listed_host_only(world: Any, port: int, verifier: str) -> None:
    folder = task(world.directory / "fetching", port, network=LISTED, verifier=verifier)
    report = world.json("run", str(folder), "--harness", "oracle", "--sandbox", "local")
    summary = report["evaluations"][0]["summary"]
    assert (summary["passed"], summary["scored"], summary["flags"]) == (1, 1, {}), world.stderr
    world.run("tasks", "check", str(folder), "--sandbox", "local")


@pytest.mark.needs("userns")
def test_a_verifier_has_a_list_of_its_own(world: Any, port: int) -> None:
    """Here it may reach what the agent may not, so that its fetches differ from what the tests want."""
    folder = task(
        world.directory / "fetching", port, network=LISTED, tests_network=LISTED.replace("127.0.0.2", "127.0.0.3")
    )
    (folder / "tests/test.sh").write_text(
        f"python3 /tests/fetch.py http://127.0.0.3:{port}/ > /tmp/got; cat /app/got >> /tmp/got\n"
        "printf '127.0.0.3\\n127.0.0.2\\n403\\n' | cmp - /tmp/got && r=1; echo ${r:-0} > /logs/verifier/reward.txt\n"
    )
    report = world.json("run", str(folder), "--harness", "oracle", "--sandbox", "local")
    assert report["evaluations"][0]["summary"]["passed"] == 1, world.stderr


@pytest.mark.needs("userns")
def test_what_can_be_known_is_refused_before_the_run(world: Any, port: int) -> None:
    folder = task(world.directory / "fetching", port, network=LISTED)
    arguments = ("run", str(folder), "--harness", "oracle", "--sandbox")
    world.run(*arguments, "process", expect=2)
    assert "needs the network policy 'allow_list' and the sandbox offers full" in world.stderr
    assert "sandboxes that can: local" in world.stderr
    file = folder / "task.toml"
    for entry in ("127.0.0.2:80", "http://example.org", "*", "2130706433"):
        file.write_text(file.read_text().replace("127.0.0.2", entry))
        world.run(*arguments, "local", expect=2)
        for words in (str(file), "allowed_hosts", repr(entry)):
            assert words in world.stderr
        file.write_text(file.read_text().replace(entry, "127.0.0.2"))
    file.write_text(file.read_text().replace("127.0.0.2", "169.254.169.254"))
    world.run(*arguments, "local", expect=2)
    assert "allowed_hosts: '169.254.169.254': addresses of metadata services" in world.stderr
    assert not (world.directory / "runs").exists()
