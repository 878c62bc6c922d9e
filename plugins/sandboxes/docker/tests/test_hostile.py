"""What an agent does to its container, or from inside to the engine, is its own doing: it costs no other sandbox, no
run, and does not save it from its grade."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import Any

import pytest
from rl_harness.contracts import SandboxSpec
from rl_harness.errors import UnsafeFiles
from rl_harness_docker.engine import EngineError
from rl_harness_docker.options import DockerOptions
from rl_harness_docker.provider import DockerProvider
from rl_harness_docker.sandbox import DockerSandbox

pytestmark = pytest.mark.needs("docker")


async def made(provider: DockerProvider, **more: Any) -> DockerSandbox:
    sandbox = await provider.create(SandboxSpec(**more))
    assert isinstance(sandbox, DockerSandbox)
    return sandbox


@pytest.mark.parametrize(
    "script",
    [
        "mkfifo /etc/passwd /etc/group",
        "mkfifo /etc/pipe; ln -s pipe /etc/passwd; ln -s /etc/pipe /etc/group",
        "mkdir /etc/passwd /etc/group",
        "mkfifo /app/passwd; ln -s /proc/self/cwd/app/passwd /etc/passwd",
        "ln -s passwd /etc/passwd; ln -s /dev/zero /etc/group",
        "truncate -s 1T /etc/passwd",
        "true",
    ],
)
async def test_accounts_that_would_hold_up_the_engine(provider: DockerProvider, script: str) -> None:
    sandbox = await made(provider)
    async with asyncio.timeout(60):
        assert (await sandbox.exec(f"echo kept > kept; rm -f /etc/passwd /etc/group; {script}")).ok
        assert (await sandbox.exec("true")).ok
        await sandbox.kill_processes()
        result = await sandbox.exec("cat kept", user="root")
        assert (result.exit_code, result.stdout) == (0, b"kept\n"), result
        await sandbox.close()


@pytest.mark.parametrize(
    ("script", "path", "error"),
    [
        ("echo x > file", "/app/file/x", FileNotFoundError),
        ("ln -s loop loop", "/app/loop", UnsafeFiles),
        ("ln -s loop loop", "/app/loop/x", (UnsafeFiles, FileNotFoundError)),
        ("true", f"/app/{'n' * 300}", FileNotFoundError),
        ("rm -rf /app; ln -s app /app", "/app/x", (UnsafeFiles, FileNotFoundError)),
        ("rm -rf /app; mkfifo /app", "/app/x", FileNotFoundError),
    ],
)
async def test_paths_an_agent_broke(
    provider: DockerProvider, tmp_path: Path, script: str, path: str, error: type[Exception]
) -> None:
    """Never a failure of the sandbox, and the engine's own paths are nobody's business."""
    sandbox = await made(provider)
    assert (await sandbox.exec(script)).ok
    for _ in range(2):
        with pytest.raises(error) as reading:
            await sandbox.read_file(path)
        with pytest.raises(error) as copying:
            await sandbox.download(path, tmp_path / "copy")
        with pytest.raises(UnsafeFiles) as writing:
            await sandbox.write_file(path + "/y", b"")
        for caught in (reading, copying, writing):
            assert "overlay" not in str(caught.value)
            assert "merged" not in str(caught.value)
        await sandbox.kill_processes()
    await sandbox.close()


@pytest.mark.parametrize("script", ["kill -9 -1", "kill -TERM 1", "kill -9 6 7 8 9 10"])
async def test_an_agent_that_ends_its_container_goes_on_with_its_files(provider: DockerProvider, script: str) -> None:
    sandbox = await made(provider)
    dying = asyncio.create_task(sandbox.died())
    assert (await sandbox.exec("echo kept > kept")).ok
    for _ in range(2):
        result = await sandbox.exec(f"{script}; sleep 60", timeout=30)
        assert (result.exit_code, result.timed_out) == (137, False), result
        assert (await sandbox.exec("cat kept")).stdout == b"kept\n"
    await sandbox.exec(f"{script}; sleep 60", timeout=30)
    assert await sandbox.read_file("/app/kept") == b"kept\n"
    await sandbox.kill_processes()
    assert (await sandbox.exec("cat kept")).stdout == b"kept\n"
    assert not dying.done()
    assert await sandbox.alive()
    dying.cancel()
    await sandbox.close()


@pytest.mark.parametrize("script", ["mkfifo /app", "echo x > /app", "ln -s app /app"])
async def test_a_container_starts_again_whatever_became_of_its_workdir(provider: DockerProvider, script: str) -> None:
    sandbox = await made(provider)
    assert (await sandbox.exec(f"cd /; rm -rf /app; {script}")).ok
    await sandbox.kill_processes()
    assert (await sandbox.exec("echo fine", cwd="/")).stdout == b"fine\n"
    assert (await sandbox.exec("true")).exit_code == 126
    await sandbox.close()


@pytest.mark.parametrize("script", ["rm -f /bin/sh", "rm /bin/sh; mkfifo /bin/sh"])
async def test_without_a_shell_it_is_the_agents_doing(provider: DockerProvider, script: str) -> None:
    sandbox = await made(provider)
    await sandbox.exec(["bash", "-c", script])
    await sandbox.kill_processes()
    with contextlib.suppress(UnsafeFiles):  # or the shell's own failure, when it is quick enough to be run
        assert not (await sandbox.exec("true")).ok
    assert await sandbox.changes()
    assert await sandbox.alive()
    await sandbox.close()


async def test_what_cannot_be_removed_is_named_once_and_ends_nothing(
    provider: DockerProvider, options: DockerOptions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A stuck container (the engine answers too late, or refuses) is left to the reaper, which passes over it too."""
    stuck, fine = await made(provider, labels={"run": "stuck"}), await made(provider, labels={"run": "stuck"})
    request = type(provider._engine).request

    async def too_late(engine: Any, method: str, path: str, **more: Any) -> Any:
        if method == "DELETE" and stuck.container in path:
            await asyncio.Event().wait()
        return await request(engine, method, path, **more)

    async def refusing(engine: Any, method: str, path: str, **more: Any) -> Any:
        if method == "DELETE" and stuck.container in path:
            raise EngineError("device or resource busy", 500)
        return await request(engine, method, path, **more)

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        with monkeypatch.context() as impatient:
            impatient.setattr(type(provider._engine), "request", too_late)
            impatient.setattr("rl_harness_docker.sandbox.REMOVE", 0.1)
            await stuck.close()
        assert caplog.text.count(stuck.id) == 1
        patched.setattr(type(provider._engine), "request", refusing)
        assert await provider.reap({"run": "stuck"}, force=True) == 1
    assert caplog.text.count(stuck.id) == 2
    assert [info.id for info in await provider.list({"run": "stuck"})] == [stuck.id]
    assert await provider.reap({"run": "stuck"}, force=True) == 1
    await fine.close()


BEHIND = "(setsid sh -c '{}' > /dev/null 2>&1 &)"
FLOODED = "; ".join(
    # Megabytes are taken from it at once, and it goes on.
    f"head -c 20m /dev/zero > {stream}; {BEHIND.format(f'cat /dev/zero > {stream}')}"
    for stream in ("/proc/1/fd/1", "/proc/1/fd/2")
)
FORGED = BEHIND.format("while echo 0; do :; done > /proc/1/fd/1")
STOLEN = f"{BEHIND.format('cat /proc/1/fd/0')}; sleep 0.2"
STOPPED = "for p in /proc/[0-9]*; do grep -q 'whil[e] read -r count' $p/cmdline && kill -STOP ${p#/proc/}; done; true"


@pytest.mark.parametrize(
    ("script", "ending"),
    [
        (FLOODED, "kill_processes"),
        (FLOODED, "kill -9 -1"),
        (FLOODED, "close"),
        (FORGED, "kill_processes"),
        (STOLEN, "kill_processes"),
        (STOPPED, "kill_processes"),
    ],
    ids=["flooded-kill_processes", "flooded-kill", "flooded-close", "forged", "stolen", "stopped"],
)
async def test_what_becomes_of_the_first_process_holds_up_nothing(
    provider: DockerProvider, script: str, ending: str
) -> None:
    sandbox = await made(provider)
    async with asyncio.timeout(60):
        result = await sandbox.exec(f"echo kept > kept; {script}", timeout=30)
        assert (result.exit_code, result.timed_out) == (0, False), result
        await sandbox.write_file("/app/given", b"given")
        if script != FORGED:  # which says that it has unpacked the file
            assert await sandbox.read_file("/app/given") == b"given"
        if ending == "kill_processes":
            await sandbox.kill_processes()
        elif ending == "kill -9 -1":
            await sandbox.exec("kill -9 -1; sleep 60")
        if ending != "close":
            assert (await sandbox.exec("cat kept")).stdout == b"kept\n"
        await sandbox.close()
    assert [info for info in await provider.list() if info.id == sandbox.id] == []


@pytest.mark.parametrize("ending", ["kill_processes", "close"])
async def test_output_that_nobody_reads_holds_up_nothing(provider: DockerProvider, ending: str) -> None:
    sandbox = await made(provider)
    processes = [await sandbox.spawn(f"echo $$ > {n}; exec cat /dev/zero") for n in range(2)]
    async with asyncio.timeout(60):
        # Until both are held up.
        waiting = "for n in 0 1; do until [ -f $n ] && grep -q pipe_w /proc/$(cat $n)/wchan; do sleep 0.1; done; done"
        assert (await sandbox.exec(waiting, timeout=30)).exit_code == 0
        await getattr(sandbox, ending)()
        assert all(await asyncio.gather(*(process.wait() for process in processes)))
        assert [len(chunk) async for _, chunk in processes[0].output()]  # what had arrived is still to be had
        if ending != "close":
            assert (await sandbox.exec("echo fine")).stdout == b"fine\n"
            await sandbox.close()
    assert [info for info in await provider.list() if info.id == sandbox.id] == []
