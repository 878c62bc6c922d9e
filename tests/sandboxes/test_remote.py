"""A sandbox over one primitive, ``_start``: here processes of the local sandbox, whose other methods are not used."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import io
import os
import random
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rl_harness.contracts.sandbox import Process, Sandbox, SandboxCapabilities, SandboxProvider, SandboxSpec
from rl_harness.errors import SandboxError, UnsafeFiles, Unsupported
from rl_harness.records.episode import UnscoredReason
from rl_harness.sandboxes.local.provider import LocalOptions, LocalProvider
from rl_harness.sandboxes.remote import RemoteSandbox, UnknownUser, owner_alive, owner_label, pack, unpack
from rl_harness.sandboxes.remote import sandbox as remote
from rl_harness.tasks import load_task, verify
from rl_harness.testing.sandbox import CHECKS, Check

pytestmark = pytest.mark.needs("userns")


class Remote(RemoteSandbox):
    def __init__(self, machine: Sandbox, spec: SandboxSpec) -> None:
        super().__init__(machine.id, workdir=spec.environment.workdir, env=spec.environment.env)
        self._machine = machine

    async def _start(
        self, argv: Sequence[str], *, cwd: str | None, env: Mapping[str, str], user: str | None
    ) -> Process:
        try:
            return await self._machine.spawn(argv, cwd=cwd, env=env, user=user)
        except SandboxError as error:
            if user is not None and user in str(error):
                raise UnknownUser(str(error)) from None
            raise

    async def _destroy(self) -> None:
        await self._machine.close()

    async def kill_processes(self) -> None:
        await self._machine.kill_processes()  # what carries a command into the sandbox is one of its processes

    async def alive(self) -> bool:
        return await self._machine.alive()

    async def changes(self) -> list[str]:
        return await self._machine.changes()


class RemoteProvider(LocalProvider):
    async def check(self, spec: SandboxSpec) -> None:
        await super().check(spec)
        if spec.mounts:
            raise Unsupported("no directories to show")

    async def create(self, spec: SandboxSpec) -> Sandbox:
        if spec.snapshot is not None:
            raise Unsupported("no snapshots")
        await self.check(spec)
        return Remote(await super().create(spec), spec)

    @property
    def capabilities(self) -> SandboxCapabilities:
        return SandboxCapabilities(users=super().capabilities.users, changes=True, limits=super().capabilities.limits)


@pytest.fixture
async def provider(tmp_path: Path) -> AsyncIterator[SandboxProvider]:
    provider = RemoteProvider(LocalOptions(state_dir=tmp_path / "state"))
    yield provider
    await provider.close()


@pytest.mark.parametrize("check", CHECKS, ids=str)
async def test_conformance(check: Check, provider: SandboxProvider, tmp_path: Path) -> None:
    if reason := check.inapplicable(provider.capabilities):
        pytest.skip(reason)
    folder = tmp_path / "folder"
    folder.mkdir()
    await check.run(provider, folder)


async def test_output_that_shows_all_arguments_is_whole(provider: SandboxProvider) -> None:
    sandbox = await provider.create(SandboxSpec())
    result = await sandbox.exec("cat /proc/[0-9]*/cmdline; cat /proc/[0-9]*/environ; echo end")
    assert result.stdout.endswith(b"end\n")
    await sandbox.close()


@pytest.mark.parametrize("argv", [["exit", "3"], ["return"], ["set", "-e"]])
async def test_an_argv_is_a_program_never_a_word_of_the_shell(provider: SandboxProvider, argv: list[str]) -> None:
    sandbox = await provider.create(SandboxSpec())
    assert (await sandbox.exec(argv)).exit_code == 127
    await sandbox.close()


async def test_an_image_without_tar_is_named(provider: SandboxProvider, tmp_path: Path) -> None:
    sandbox = await provider.create(SandboxSpec())
    assert (await sandbox.exec("rm -f $(command -v tar)")).ok
    (tmp_path / "file").write_text("x")
    with pytest.raises(SandboxError, match="tar"):
        await sandbox.upload(tmp_path / "file", "/app/file")
    await sandbox.close()


FULL = "#!/bin/bash\necho \"mkdir: cannot create directory '/x': No space left on device\" >&2; exit 1\n"


class FullVerifiers(RemoteProvider):
    """Its verifiers have no room for one more directory."""

    async def create(self, spec: SandboxSpec) -> Sandbox:
        sandbox = await super().create(spec)
        if spec.labels.get("role") == "verifier":
            await sandbox.write_file("/opt/full", FULL.encode(), mode=0o755)
            assert (await sandbox.exec("rm -f $(command -v mkdir); cp /opt/full /usr/bin/mkdir")).ok
        return sandbox


async def test_no_room_for_a_directory_is_no_grade(tmp_path: Path) -> None:
    provider = FullVerifiers(LocalOptions(state_dir=tmp_path / "state"))
    (tmp_path / "task/tests").mkdir(parents=True)
    (tmp_path / "task/environment").mkdir()
    (tmp_path / "task/instruction.md").write_text("Nothing.")
    (tmp_path / "task/tests/test.sh").write_text("mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt")
    settings = '[verifier]\nenvironment_mode = "separate"\n[environment]\nnetwork_mode = "no-network"\n'
    (tmp_path / "task/task.toml").write_text('schema_version = "1.1"\nartifacts = ["/data/made"]\n' + settings)
    task = load_task(tmp_path / "task")
    sandbox = await provider.create(task.sandbox_spec({}, isolated=True, agent_timeout=60, setup=()))
    assert (await sandbox.exec("mkdir -p /data && echo x > /data/made")).ok
    verdict = await verify(task, sandbox, provider, None, {})
    assert (verdict.reward, verdict.unscored) == (None, UnscoredReason.SANDBOX_ERROR), verdict
    assert "No space left" in verdict.detail
    await provider.close()


class Losing(Process):
    """A command of whose stderr nothing arrives, not even its end."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def output(self) -> AsyncIterator[tuple[str, bytes]]:
        async for name, chunk in self._process.output():
            if name == "stdout":
                yield name, chunk
        await asyncio.Event().wait()

    async def write(self, data: bytes) -> None:
        await self._process.write(data)

    async def close_stdin(self) -> None:
        await self._process.close_stdin()

    async def wait(self) -> int:
        return await self._process.wait()

    async def kill(self) -> None:
        await self._process.kill()


@pytest.mark.parametrize("told", [True, False], ids=["by the command", "by the machine"])
async def test_an_end_of_output_that_is_lost_is_an_error(
    provider: SandboxProvider, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    sandbox = await provider.create(SandboxSpec())
    start = sandbox._start

    async def losing(*arguments: Any, **options: Any) -> Process:
        return Losing(await start(*arguments, **options))

    monkeypatch.setattr(sandbox, "_start", losing)
    monkeypatch.setattr(RemoteSandbox, "silence", 0.2)
    with pytest.raises(SandboxError, match="the end of its output does not come"):
        await (sandbox.exec("echo fine") if told else sandbox.run(["echo", "fine"]))
    await sandbox.close()


@pytest.mark.parametrize("program", ["grep", "sh"])
@pytest.mark.parametrize("answer", [0, 1])
async def test_programs_of_an_agent_do_not_turn_its_timeout_into_a_failure(
    provider: SandboxProvider, monkeypatch: pytest.MonkeyPatch, program: str, answer: int
) -> None:
    """They say that nothing is left to kill, or fail."""
    monkeypatch.setattr(RemoteSandbox, "dying_seconds", 0.1)
    sandbox = await provider.create(SandboxSpec())
    fake = f"#!/usr/bin/env python3\nraise SystemExit({answer})\n"
    await sandbox.write_file("/tmp/fake", fake.encode(), mode=0o755)
    script = f"at=$(command -v {program}); rm -f $at; mv /tmp/fake $at; echo replaced; exec sleep 4343"
    result = await sandbox.exec(script, timeout=2)
    assert (result.timed_out, result.stdout) == (True, b"replaced\n"), result
    assert await sandbox.alive()
    left = await sandbox.exec(["python3", "-c", _RUNNING]) if program != "sh" else None
    assert left is None or "4343" not in left.stdout.decode(), left
    await sandbox.close()


_RUNNING = "import glob; print([open(path, 'rb').read() for path in glob.glob('/proc/[0-9]*/cmdline')])"


MARK = b"\0360123456789abcdef:"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (MARK, b"x" * 100_000),
        (MARK + b"12", b"3" * 100_000),
        (MARK * 3 + b"1234\036", MARK[:-1] * 5000),
        (MARK + b"\036" + MARK + b"-1\036", b"\036" * 100_000),
        (b"", MARK * 6000),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 1 << 16])
def test_a_mark_that_a_command_prints_holds_nothing_back(before: bytes, after: bytes, size: int) -> None:
    """What may be the end of the output is kept back no longer than that can be."""
    output = remote._Output(1 << 20, MARK)
    said = before + after
    for at in range(0, len(said), size):
        output.add(said[at : at + size])
        assert len(output._tail) < len(MARK) + 4
    assert not output.ended
    output.add(MARK + b"7\036")
    assert (output.ended, output.code) == (True, 7)
    assert (output.data(), output.truncated) == (said, False)


# ------------------------------------------------------------------------------------------------------- archives


async def chunked(data: bytes, sizes: Sequence[int] = (1 << 16,)) -> AsyncIterator[bytes]:
    at, turn = 0, 0
    while at < len(data):
        yield data[at : at + sizes[turn % len(sizes)]]
        at += sizes[turn % len(sizes)]
        turn += 1


def archive(*members: tuple[str, bytes, bytes | str], form: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as file:
        for name, kind, content in members:
            info = tarfile.TarInfo(name)
            info.type = kind
            info.mode = 0o755 if kind == tarfile.DIRTYPE else 0o644
            if isinstance(content, bytes):
                info.size = len(content)
                file.addfile(info, io.BytesIO(content))
            else:
                info.linkname = content
                file.addfile(info)
    return buffer.getvalue()


names = st.text(st.characters(blacklist_characters="/\0", blacklist_categories=["Cs"]), min_size=1, max_size=60).filter(
    lambda name: name not in (".", "..") and len(name.encode()) < 200
)


@given(
    files=st.dictionaries(names, st.tuples(st.binary(max_size=2000), st.sampled_from([0o600, 0o644, 0o755]))),
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=5),
)
async def test_what_is_packed_is_unpacked(
    files: dict[str, tuple[bytes, int]], sizes: builtins.list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("pack")
    source = folder / "source"
    source.mkdir()
    for name, (data, mode) in files.items():
        (source / name).write_bytes(data)
        (source / name).chmod(mode)
    data = b"".join(pack(source, "other name"))
    assert await unpack(chunked(data, sizes), folder / "target") == []
    found = {path.name: (path.read_bytes(), path.stat().st_mode & 0o777) for path in (folder / "target").iterdir()}
    assert found == files


def test_a_tar_program_reads_what_is_packed(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / ("deep/" * 40)).mkdir(parents=True)
    (source / ("deep/" * 40) / ("n" * 150)).write_bytes(os.urandom(1000))
    (source / "link").symlink_to("x" * 300)
    (tmp_path / "out").mkdir()
    subprocess.run(["tar", "-xf", "-", "-C", tmp_path / "out"], input=b"".join(pack(source, "source")), check=True)
    assert (tmp_path / "out/source/link").readlink() == Path("x" * 300)
    name = Path("deep/" * 40) / ("n" * 150)
    assert (tmp_path / "out/source" / name).read_bytes() == (source / name).read_bytes()


async def test_hard_links_become_files_of_their_own(tmp_path: Path) -> None:
    data = archive(("t", tarfile.DIRTYPE, b""), ("t/a", tarfile.REGTYPE, b"text"), ("t/b", tarfile.LNKTYPE, "t/a"))
    await unpack(chunked(data), tmp_path / "t")
    assert (tmp_path / "t/b").read_bytes() == b"text"
    assert (tmp_path / "t/b").stat().st_ino != (tmp_path / "t/a").stat().st_ino


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
@pytest.mark.parametrize(
    "member",
    [
        ("t/../../evil", tarfile.REGTYPE, b"x"),
        ("/evil", tarfile.REGTYPE, b"x"),
        ("../evil", tarfile.REGTYPE, b"x"),
        ("t/device", tarfile.CHRTYPE, b""),
        ("t/fifo", tarfile.FIFOTYPE, b""),
        ("t/link", tarfile.SYMTYPE, "/etc/passwd"),
        ("t/link", tarfile.SYMTYPE, "../../x"),
        ("t/hard", tarfile.LNKTYPE, "../evil"),
        ("t/hard", tarfile.LNKTYPE, "/etc/passwd"),
        ("t/hard", tarfile.LNKTYPE, "t/link/x"),
        ("t/odd", b"Z", b"x"),
        ("t/large", tarfile.REGTYPE, b"x" * 2000),
    ],
)
async def test_a_hostile_member_is_refused(member: tuple[str, bytes, bytes | str], form: int, tmp_path: Path) -> None:
    (tmp_path / "evil").write_text("of the host")
    data = archive(("t", tarfile.DIRTYPE, b""), ("t/link", tarfile.SYMTYPE, "."), member, form=form)
    with pytest.raises((UnsafeFiles, FileNotFoundError)):
        await unpack(chunked(data), tmp_path / "inner" / "t", limit=1000)
    assert (tmp_path / "evil").read_text() == "of the host"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evil", "inner"]


async def test_a_header_without_end_is_refused_not_held(tmp_path: Path) -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 1 << 32

    async def endless() -> AsyncIterator[bytes]:
        yield info.tobuf()
        while True:
            yield bytes(1 << 16)

    with pytest.raises(UnsafeFiles, match="too long"):
        await unpack(endless(), tmp_path / "t")


@given(data=st.binary(max_size=3000), cut=st.integers(0, 3000), seed=st.integers())
async def test_garbage_and_cut_streams_are_refused(
    data: bytes, cut: int, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("garbage")
    whole = bytearray(archive(("t", tarfile.DIRTYPE, b""), ("t/a", tarfile.REGTYPE, data)))
    chance = random.Random(seed)
    for _ in range(3):
        whole[chance.randrange(len(whole))] = chance.randrange(256)
    try:
        await unpack(chunked(bytes(whole[:cut])), folder / "t")
    except UnsafeFiles:
        pass
    assert {path.name for path in folder.iterdir()} <= {"t"}


def header(name: str, kind: bytes = tarfile.REGTYPE, size: int = 0, link: str = "") -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname, info.mode = kind, size, link, 0o755
    return info.tobuf(tarfile.USTAR_FORMAT, "utf-8", "surrogateescape")


def extended(records: bytes, kind: bytes = tarfile.XHDTYPE) -> bytes:
    return header("pax", kind, len(records)) + records + bytes(-len(records) % 512)


def pax(key: bytes, value: bytes) -> bytes:
    length = next(n for n in range(10_000) if len(b"%d %s=%s\n" % (n, key, value)) == n)
    return b"%d %s=%s\n" % (length, key, value)


@pytest.mark.parametrize("skip_unsafe", [False, True])
@pytest.mark.parametrize(
    "member",
    [
        extended(pax(b"size", "²".encode())) + header("t/a"),
        extended(pax(b"size", b"9" * 5000)) + header("t/a"),
        extended(pax(b"size", b"-1")) + header("t/a"),
        extended(b"9" * 5000 + b" a=b\n") + header("t/a"),
        extended("²² a=b\n".encode()) + header("t/a"),
        extended(pax(b"linkpath", b"a\0b")) + header("t/l", tarfile.SYMTYPE, link="x"),
        extended(pax(b"linkpath", b"")) + header("t/l", tarfile.SYMTYPE, link="x"),
        extended(pax(b"linkpath", b"t/a\0b")) + header("t/l", tarfile.LNKTYPE, link="x"),
        extended(pax(b"path", b"t/a\0b")) + header("t/a"),
        extended(b"t/" + b"x" * 300 + b"\xff", tarfile.GNUTYPE_LONGNAME) + header("t/a"),
        extended(bytes(600_000), tarfile.XGLTYPE) * 2 + header("t/a"),
        bytes(2 << 20),
    ],
)
async def test_a_crafted_header_is_unsafe_and_nothing_else(member: bytes, skip_unsafe: bool, tmp_path: Path) -> None:
    data = header("t", tarfile.DIRTYPE) + member + bytes(1024)
    with pytest.raises(UnsafeFiles):
        await unpack(chunked(data), tmp_path / "t", limit=1000, skip_unsafe=skip_unsafe)


keys = st.sampled_from([b"path", b"linkpath", b"size", b"mtime", b"GNU.sparse.major", b"\xff"])
values = st.one_of(
    st.binary(max_size=30),
    st.text(st.sampled_from("0123456789²٣-+_ t/.\0"), max_size=30).map(str.encode),
    st.integers(0, 5000).map(lambda n: b"9" * n),
)
kinds = st.sampled_from([b"0", b"\0", b"1", b"2", b"3", b"5", b"6", b"7", b"g", b"x", b"L", b"K", b"S", b"Z"])
blocks = st.one_of(
    st.lists(st.tuples(keys, values), max_size=3).map(lambda all: extended(b"".join(pax(*one) for one in all))),
    st.tuples(values, kinds).map(lambda one: extended(*one)),
    st.tuples(st.text("t/ab.", max_size=9), kinds, st.integers(0, 600), st.text("t/ab.", max_size=9)).map(
        lambda one: header(*one) + bytes(one[2] + -one[2] % 512)
    ),
)


@given(
    members=st.lists(blocks, max_size=6), changes=st.lists(st.tuples(st.integers(0), st.integers(0, 255)), max_size=3)
)
async def test_whatever_is_made_up_is_unpacked_or_unsafe(
    members: builtins.list[bytes],
    changes: builtins.list[tuple[int, int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("made-up")
    data = bytearray(header("t", tarfile.DIRTYPE) + b"".join(members) + bytes(1024))
    for at, value in changes:
        data[at % len(data)] = value
    with contextlib.suppress(UnsafeFiles):
        await unpack(chunked(bytes(data)), folder / "t", limit=1 << 20, skip_unsafe=True)
    assert {path.name for path in folder.iterdir()} <= {"t"}


# --------------------------------------------------------------------------------------------------------- owners


def test_an_owner_is_alive_until_its_process_ends() -> None:
    assert owner_alive(owner_label()) is True
    code = "from rl_harness.sandboxes.remote import owner_label; print(owner_label())"
    label = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert owner_alive(label) is False


@pytest.mark.parametrize("label", ["", "nonsense", "0123456789abcdef-1-0123456789abcdef"])
def test_an_owner_elsewhere_cannot_be_told(label: str) -> None:
    assert owner_alive(label) is None
