"""How the end of a command is told, which E2B tells only when everybody has let go of its output."""

from __future__ import annotations

import importlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rl_harness.contracts.sandbox import Process, SandboxSpec
from rl_harness.errors import SandboxError
from rl_harness_e2b.process import _exit_code, _Stream
from rl_harness_e2b.provider import E2BProvider

on_e2b = pytest.mark.needs("userns", "e2b")

# Finds the word that its supervisor marks the end with, and writes a mark of its own.
FORGE = r"""
for pid in /proc/[0-9]*; do
  [ "$(tr '\0' '\n' < $pid/cmdline 2>/dev/null | sed -n 1,2p | tr '\n' ' ')" = "/bin/sh -c " ] || continue
  mark=$(tr '\0' '\n' < $pid/cmdline | grep -x '[0-9a-f]\{16\}' | head -n 1)
  [ -z "$mark" ] || { echo "$mark" >> marks; printf '\036%s 0\036' "$mark"; printf '\036%s 0\036' "$mark" >&2; }
done
sleep 0.5; exit 5
"""


@on_e2b
async def test_a_command_cannot_forge_its_exit_code(provider: E2BProvider) -> None:
    sandbox = await provider.create(SandboxSpec())
    assert (await sandbox.exec(FORGE)).exit_code == 5
    process = await sandbox.spawn(FORGE)
    assert await process.wait() == 5
    assert len((await sandbox.read_file("/app/marks")).split()) >= 2


@on_e2b
async def test_the_end_is_told_at_once_though_others_hold_the_output(provider: E2BProvider) -> None:
    sandbox = await provider.create(SandboxSpec())
    started = time.monotonic()
    result = await sandbox.exec("sleep 600 & echo done; exit 3")
    assert (result.exit_code, result.stdout, result.stderr) == (3, b"done\n", b"")
    assert time.monotonic() - started < 10
    process = await sandbox.spawn("sleep 600 & exit 4")
    assert await process.wait() == 4
    await process.kill()
    assert [chunk async for chunk in process.output()] == []


@on_e2b
async def test_text_that_is_not_unicode_is_an_error_that_says_so(provider: E2BProvider) -> None:
    sandbox = await provider.create(SandboxSpec())
    result = await sandbox.exec(["printf", "%s", "é\U0001f600"])
    assert result.stdout == "é\U0001f600".encode()
    with pytest.raises(SandboxError, match="no text"):
        await sandbox.exec(["printf", "\udcff"])


@given(st.lists(st.binary(max_size=30)), st.integers(0, 255), st.lists(st.binary(max_size=30)), st.data())
def test_the_mark_is_taken_out_however_the_stream_is_cut(
    before: list[bytes], code: int, after: list[bytes], data: st.DataObject
) -> None:
    mark = "0123456789abcdef"
    plain = b"".join(before), b"".join(after)
    whole = plain[0] + b"\036%s %d\036" % (mark.encode(), code) + plain[1]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)))))
    stream = _Stream(mark)
    pieces = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert b"".join(map(stream.add, pieces)) + stream.rest() == b"".join(plain)
    assert stream.code == code


def test_a_flood_of_false_marks_is_output_and_takes_no_time() -> None:
    mark = "0123456789abcdef"
    false = b"\036%s x" % mark.encode() * 50_000
    stream = _Stream(mark)
    started = time.thread_time()
    text = b"".join(stream.add(false[start : start + 32_768]) for start in range(0, len(false), 32_768))
    assert text + stream.rest() == false
    assert stream.code is None
    stream.add(b"\036%s 1\036\036%s 2\036" % (mark.encode(), mark.encode()))
    assert stream.code == 2
    assert time.thread_time() - started < 5


@pytest.mark.parametrize(("status", "code"), [(0, 0), (3 << 8, 3), (9, 137), (15 | 0x80, 143)])
def test_a_status_of_the_kernel_is_an_exit_code(status: int, code: int) -> None:
    assert _exit_code(status) == code


class OutOfStep(Process):
    """A command whose stderr gets here before the first line of its stdout, as either stream may."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def output(self) -> AsyncIterator[tuple[str, bytes]]:
        for name, chunk in sorted([part async for part in self._process.output()]):
            yield name, chunk

    async def write(self, data: bytes) -> None:
        await self._process.write(data)

    async def close_stdin(self) -> None:
        await self._process.close_stdin()

    async def wait(self) -> int:
        return await self._process.wait()

    async def kill(self) -> None:
        await self._process.kill()


@on_e2b
async def test_the_stand_in_loses_nothing_of_a_stream_that_is_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    machines = importlib.import_module("e2b_standin.machines")
    fleet = machines.Fleet(tmp_path)
    try:
        machine = await fleet.create({"timeout": 300}, machines.Content(), "base", None)
        spawn = machine.box.spawn

        async def out_of_step(*arguments: object, **options: object) -> Process:
            return OutOfStep(await spawn(*arguments, **options))

        monkeypatch.setattr(machine.box, "spawn", out_of_step)
        command = await machine.start("/bin/sh", ["-c", "echo out; echo err >&2; exit 3"], "/", {})
        with command.listening() as queue:
            command.begin()
            told = []
            while not told or told[-1][0] != "end":
                told.append(await queue.get())
        assert sorted(told[:-1]) == [("stderr", b"err\n"), ("stdout", b"out\n")]
        assert told[-1][1]["exit_code"] == 3
    finally:
        await fleet.close()
