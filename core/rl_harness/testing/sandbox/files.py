"""Checks of files going in and out, and of what a hostile tree can do to them (nothing)."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import secrets
import stat
import tarfile
from pathlib import Path

from rl_harness.contracts.sandbox import Sandbox
from rl_harness.errors import SandboxError, UnsafeFiles
from rl_harness.testing.sandbox.kit import (
    WORKDIR,
    Checks,
    Context,
    cancelled_midway,
    equal,
    not_isolated,
    refused,
    succeeded,
    without,
)

checks = Checks()

MB = 1_000_000


async def _root_of_its_own(sandbox: Sandbox) -> Sandbox:
    """The sandbox, once it is sure that spoiling its programs does not spoil this machine's."""
    mark = f"/usr/rl-harness-{secrets.token_hex(8)}"
    await sandbox.exec(["touch", mark])
    seen = await asyncio.to_thread(Path(mark).exists)
    await sandbox.exec(["rm", "-f", mark])
    assert not seen, "the sandbox writes to the root of this machine"
    return sandbox


@checks.check
async def a_file_comes_back_as_it_was_written(context: Context) -> None:
    sandbox = await context.sandbox()
    data = bytes(range(256)) * 20_000
    await sandbox.write_file(f"{WORKDIR}/new/deep/é file", data, mode=0o755)
    equal(await sandbox.read_file(f"{WORKDIR}/new/deep/é file"), data)
    equal(succeeded(await sandbox.exec("stat -c %a 'new/deep/é file'")), b"755\n")
    await sandbox.write_file(f"{WORKDIR}/new/deep/é file", b"")
    equal(await sandbox.read_file(f"{WORKDIR}/new/deep/é file"), b"")


@checks.check
async def a_written_program_can_be_run_at_once(context: Context) -> None:
    sandbox = await context.sandbox()
    await sandbox.write_file(f"{WORKDIR}/program", b"#!/bin/sh\necho it ran\n", mode=0o755)
    equal(succeeded(await sandbox.exec(["./program"])), b"it ran\n")


@checks.check
async def a_missing_file_is_not_found(context: Context) -> None:
    sandbox = await context.sandbox()
    await refused(sandbox.read_file(f"{WORKDIR}/none"), FileNotFoundError, "reading a missing file")
    await refused(sandbox.read_file("/no/such/path"), FileNotFoundError, "reading in a missing directory")
    await refused(sandbox.download(f"{WORKDIR}/none", context.folder / "x"), FileNotFoundError, "downloading nothing")


@checks.check
async def only_plain_files_within_the_limit_are_read(context: Context) -> None:
    sandbox = await context.sandbox()
    succeeded(await sandbox.exec("mkdir directory; mkfifo fifo; printf 12345 > five; truncate -s 1000000000000 sparse"))
    equal(await sandbox.read_file(f"{WORKDIR}/five", limit=5), b"12345")
    for name, limit in (("five", 4), ("sparse", 1000), ("directory", None), ("fifo", None)):
        await refused(sandbox.read_file(f"{WORKDIR}/{name}", limit=limit), SandboxError, f"reading {name}")


@checks.check
async def no_link_redirects_a_read_or_write(context: Context) -> None:
    secret = context.folder / "secret"
    secret.write_text("of the host")
    sandbox = await context.sandbox()
    succeeded(
        await sandbox.exec(
            f"echo mine > target; ln -s {secret} host; ln -s target link; ln -s {context.folder} directory;"
            "ln -s . here; mkfifo fifo"
        )
    )
    for name in ("host", "link", "directory/secret"):
        await refused(sandbox.read_file(f"{WORKDIR}/{name}"), SandboxError, f"reading through {name}")
    for name in ("link", "host", "fifo"):
        await sandbox.write_file(f"{WORKDIR}/{name}", b"written")
        equal(await sandbox.read_file(f"{WORKDIR}/{name}"), b"written")
    await refused(sandbox.write_file(f"{WORKDIR}/directory/planted", b""), SandboxError, "writing through a link")
    equal(await sandbox.read_file(f"{WORKDIR}/target"), b"mine\n", "the link's target")
    equal(secret.read_text(), "of the host", "a file of the host")
    equal(sorted(path.name for path in context.folder.iterdir()), ["secret"], "files of the host")


@checks.check
async def dots_do_not_climb_out(context: Context) -> None:
    sandbox = await context.sandbox()
    await refused(sandbox.read_file(f"{WORKDIR}/../../../../etc/hostname"), SandboxError, "..")
    await refused(sandbox.write_file(f"{WORKDIR}/../x", b""), SandboxError, "..")
    await refused(sandbox.download(f"{WORKDIR}/../etc", context.folder / "x"), SandboxError, "..")
    source = context.folder / "source"
    source.write_text("x")
    await refused(sandbox.upload(source, f"{WORKDIR}/../../x"), SandboxError, "..")


@checks.check_if(not_isolated)
async def archives_made_by_the_agent_write_nothing_elsewhere(context: Context) -> None:
    """An agent that replaced ``tar`` answers a download with members that climb, are absolute, or go through links."""
    absolute = Path("/tmp") / f"rl-harness-{secrets.token_hex(8)}"
    evil = io.BytesIO()
    with tarfile.open(fileobj=evil, mode="w") as archive:
        for name in ("../climbed", str(absolute), "out/../../climbed", "out/fine", "fine"):
            member = tarfile.TarInfo(name)
            member.size = 4
            archive.addfile(member, io.BytesIO(b"evil"))
        for name in ("out/link", "link"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, str(context.folder)
            archive.addfile(link)
            through = tarfile.TarInfo(f"{name}/climbed")
            through.size = 4
            archive.addfile(through, io.BytesIO(b"evil"))
    sandbox = await context.disposable()
    await sandbox.write_file("/evil.tar", evil.getvalue())
    fake = "printf '#!/bin/sh\\ncat /evil.tar\\n'"
    succeeded(
        await sandbox.exec(
            f"mkdir out; echo honest > out/file; for d in /usr/local/bin /usr/bin /bin; do"
            f" [ -d $d ] && rm -f $d/tar && {fake} > $d/tar && chmod 755 $d/tar; done; true"
        )
    )
    for lax in (False, True):
        try:
            await sandbox.download(f"{WORKDIR}/out", context.folder / f"out-{lax}", skip_unsafe=lax)
        except SandboxError:
            continue
    assert not absolute.exists(), "an absolute member was written"
    left = [path for path in context.folder.rglob("climbed") if "out-" not in str(path.relative_to(context.folder))]
    equal(left, [], "files outside the target")
    equal([path for path in context.folder.rglob("*") if path.is_symlink()], [], "links that leave the tree")


def _tree(folder: Path) -> Path:
    tree = folder / "tree"
    (tree / "sub/empty").mkdir(parents=True)
    (tree / "sub/file").write_bytes(b"\0data" * 1000)
    (tree / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (tree / "run.sh").chmod(0o755)
    (tree / "link").symlink_to("sub/file")
    return tree


def _listing(tree: Path) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for path in sorted(tree.rglob("*")):
        name = str(path.relative_to(tree))
        if path.is_symlink():
            found.append((name, str(path.readlink())))
        elif path.is_dir():
            found.append((name, "directory"))
        else:
            found.append((name, (path.stat().st_mode & 0o777, path.read_bytes())))
    return found


@checks.check
async def a_tree_survives_the_way_in_and_out(context: Context) -> None:
    tree = _tree(context.folder)
    sandbox = await context.sandbox()
    await sandbox.upload(tree, f"{WORKDIR}/given/tree")
    equal(succeeded(await sandbox.exec("./given/tree/run.sh; cat given/tree/link | wc -c")), b"ran\n5000\n")
    equal(await sandbox.download(f"{WORKDIR}/given/tree", context.folder / "out/back"), [], "what was left out")
    equal(_listing(context.folder / "out/back"), _listing(tree), "the tree")


@checks.check
async def one_file_goes_in_and_out(context: Context) -> None:
    source = _tree(context.folder) / "run.sh"
    sandbox = await context.sandbox()
    await sandbox.upload(source, f"{WORKDIR}/deep/renamed")
    equal(succeeded(await sandbox.exec("deep/renamed")), b"ran\n")
    await sandbox.download(f"{WORKDIR}/deep/renamed", context.folder / "new/file")
    equal((context.folder / "new/file").read_bytes(), source.read_bytes())


@checks.check
async def a_hundred_megabytes_go_in_and_out(context: Context) -> None:
    source, back = context.folder / "source", context.folder / "back"
    block = os.urandom(MB)
    with source.open("wb") as file:
        for number in range(100):
            file.write(number.to_bytes(4, "big") + block[4:])
    sandbox = await context.sandbox()
    await sandbox.upload(source, f"{WORKDIR}/large")
    equal(succeeded(await sandbox.exec("wc -c < large")).strip(), b"100000000")
    await sandbox.download(f"{WORKDIR}/large", back)
    equal(_digest(back), _digest(source), "digest of what came back")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@checks.check
async def modes_are_kept_both_ways(context: Context) -> None:
    tree = context.folder / "tree"
    modes = {"secret": 0o600, "shared": 0o664, "program": 0o755, "read-only": 0o444}
    (tree / "private").mkdir(parents=True)
    for name, mode in modes.items():
        (tree / "private" / name).write_text(name)
        (tree / "private" / name).chmod(mode)
    (tree / "private").chmod(0o750)
    sandbox = await context.sandbox()
    await sandbox.upload(tree, f"{WORKDIR}/tree")
    for name, mode in {**modes, ".": 0o750}.items():
        equal(succeeded(await sandbox.exec(["stat", "-c", "%a", f"tree/private/{name}"])), b"%o\n" % mode, name)
    succeeded(
        await sandbox.exec("chmod 640 tree/private/secret; chmod 700 tree/private/shared; chmod 711 tree/private")
    )
    await sandbox.download(f"{WORKDIR}/tree", context.folder / "back")
    back = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (context.folder / "back").rglob("*")}
    equal(back, {**modes, "secret": 0o640, "shared": 0o700, "private": 0o711}, "modes that came back")
    for mode in (0o600, 0o755, 0o444, 0o644):
        await sandbox.write_file(f"{WORKDIR}/written", b"x", mode=mode)
        equal(succeeded(await sandbox.exec(["stat", "-c", "%a", "written"])), b"%o\n" % mode, "mode written")


@checks.check
async def odd_names_survive(context: Context) -> None:
    names = [
        "two words",
        " lead",
        "-rf",
        "--",
        "q'uo\"te",
        "new\nline",
        "$HOME",
        "`id`",
        "*",
        "back\\slash",
        "é",
        "#",
        "~",
    ]
    tree = context.folder / "tree"
    for name in names:
        (tree / f"in {name}").mkdir(parents=True)
        (tree / f"in {name}" / name).write_text(name)
    sandbox = await context.sandbox()
    await sandbox.upload(tree, f"{WORKDIR}/-odd $tree")
    await sandbox.download(f"{WORKDIR}/-odd $tree", context.folder / "back")
    equal(_listing(context.folder / "back"), _listing(tree), "the tree")
    for name in names:
        await sandbox.write_file(f"{WORKDIR}/by name/{name}", name.encode())
        equal(await sandbox.read_file(f"{WORKDIR}/by name/{name}"), name.encode(), f"the file named {name!r}")
    equal(
        len(succeeded(await sandbox.exec("cd 'by name'; for f in * ' lead'; do echo x; done")).split()), len(names) + 1
    )


@checks.check
async def hard_links_arrive_as_files(context: Context) -> None:
    tree = context.folder / "tree"
    tree.mkdir()
    (tree / "first").write_text("in")
    (tree / "second").hardlink_to(tree / "first")
    sandbox = await context.sandbox()
    await sandbox.upload(tree, f"{WORKDIR}/tree")
    equal(succeeded(await sandbox.exec("cat tree/first tree/second")), b"inin")
    succeeded(await sandbox.exec("mkdir out; echo out > out/first; ln out/first out/second; ln out/first out/third"))
    equal(await sandbox.download(f"{WORKDIR}/out", context.folder / "back"), [], "what was left out")
    names = ("first", "second", "third")
    equal([(name, (context.folder / "back" / name).read_bytes()) for name in names], [(n, b"out\n") for n in names])


@checks.check_if(not_isolated)
async def device_files_are_refused(context: Context) -> None:
    sandbox = await context.sandbox()
    for name in ("/dev/null", "/dev/zero"):
        await refused(sandbox.read_file(name, limit=10), SandboxError, f"reading {name}")
        await refused(sandbox.download(name, context.folder / "device"), UnsafeFiles, f"downloading {name}")
    equal(list(context.folder.iterdir()), [], "files of the host")


@checks.check
async def special_files_of_the_host_are_refused(context: Context) -> None:
    tree = context.folder / "tree"
    tree.mkdir()
    (tree / "file").write_text("x")
    os.mkfifo(tree / "fifo")
    sandbox = await context.sandbox()
    await refused(sandbox.upload(tree, f"{WORKDIR}/tree"), SandboxError, "a FIFO in a tree")
    await refused(sandbox.upload(tree / "fifo", f"{WORKDIR}/fifo"), SandboxError, "a FIFO")
    equal(succeeded(await sandbox.exec("echo fine")), b"fine\n")


@checks.check
async def transfers_run_side_by_side(context: Context) -> None:
    tree = _tree(context.folder)
    sandbox = await context.sandbox()
    count = 6
    await asyncio.gather(*(sandbox.upload(tree, f"{WORKDIR}/{number}") for number in range(count)))
    await asyncio.gather(
        *(sandbox.download(f"{WORKDIR}/{number}", context.folder / f"back{number}") for number in range(count)),
        *(sandbox.write_file(f"{WORKDIR}/file{number}", b"%d" % number * 100_000) for number in range(count)),
    )
    for number in range(count):
        equal(_listing(context.folder / f"back{number}"), _listing(tree), "the tree")
        equal(await sandbox.read_file(f"{WORKDIR}/file{number}"), b"%d" % number * 100_000)


@checks.check
async def cancelling_a_transfer_leaves_the_sandbox_usable(context: Context) -> None:
    source = context.folder / "source"
    source.write_bytes(os.urandom(MB) * 30)
    sandbox = await context.sandbox()
    for after in (0.0, 0.01, 0.1):
        await cancelled_midway(lambda: sandbox.upload(source, f"{WORKDIR}/large"), after)
        equal(succeeded(await sandbox.exec("echo fine")), b"fine\n")
    await sandbox.upload(source, f"{WORKDIR}/large")
    equal(succeeded(await sandbox.exec("wc -c < large")).strip(), b"30000000")
    for after in (0.0, 0.01, 0.1):
        target = context.folder / f"target{after}"
        await cancelled_midway(lambda target=target: sandbox.download(f"{WORKDIR}/large", target), after)  # type: ignore[misc]
    await sandbox.download(f"{WORKDIR}/large", context.folder / "back")
    equal(_digest(context.folder / "back"), _digest(source), "digest of what came back")


@checks.check
async def an_upload_merges_directories_and_replaces_files(context: Context) -> None:
    tree = _tree(context.folder)
    sandbox = await context.sandbox()
    succeeded(await sandbox.exec("mkdir -p into/sub; echo old > into/sub/file; echo kept > into/sub/kept"))
    await sandbox.upload(tree, f"{WORKDIR}/into")
    equal(await sandbox.read_file(f"{WORKDIR}/into/sub/kept"), b"kept\n")
    equal(await sandbox.read_file(f"{WORKDIR}/into/sub/file"), (tree / "sub/file").read_bytes())


@checks.check
async def unsafe_files_are_refused_or_left_out(context: Context) -> None:
    sandbox = await context.sandbox()
    succeeded(
        await sandbox.exec(
            "mkdir -p out/sub; cd out; echo fine > fine; mkfifo fifo; ln -s /etc/passwd absolute;"
            "ln -s ../../x sub/up; ln -s ../fine sub/inside"
        )
    )
    await refused(sandbox.download(f"{WORKDIR}/out", context.folder / "strict"), UnsafeFiles, "an unsafe tree")
    skipped = await sandbox.download(f"{WORKDIR}/out", context.folder / "lax", skip_unsafe=True)
    equal(sorted(path.removeprefix(f"{WORKDIR}/out/") for path in skipped), ["absolute", "fifo", "sub/up"])
    names = sorted(str(path.relative_to(context.folder / "lax")) for path in (context.folder / "lax").rglob("*"))
    equal(names, ["fine", "sub", "sub/inside"])


@checks.check
async def a_download_is_bounded(context: Context) -> None:
    sandbox = await context.sandbox()
    succeeded(
        await sandbox.exec("mkdir out; truncate -s 1000000000000 out/sparse; mkdir small; printf 12345 > small/five")
    )
    await refused(sandbox.download(f"{WORKDIR}/out", context.folder / "x", limit=10_000), UnsafeFiles, "a huge file")
    await refused(
        sandbox.download(f"{WORKDIR}/small", context.folder / "y", limit=4), UnsafeFiles, "five bytes of four"
    )
    equal(await sandbox.download(f"{WORKDIR}/small", context.folder / "z", limit=5), [])


@checks.check
async def the_workspace_of_the_environment_is_there_first(context: Context) -> None:
    directory = context.folder / "environment"
    (directory / "workspace/sub").mkdir(parents=True)
    (directory / "workspace/sub/file").write_text("given")
    (directory / "other").write_text("not given")
    environment = type(context.spec().environment)(workdir=WORKDIR, directory=directory)
    sandbox = await context.sandbox(environment=environment)
    equal(succeeded(await sandbox.exec("cat sub/file; ls")), b"givensub\n")


@checks.check_if(not_isolated, without("changes"))
async def changes_name_what_differs(context: Context) -> None:
    sandbox = await context.disposable()
    clean = await sandbox.changes()
    script = (
        "set -e; echo new > /usr/bin/new-tool; mkdir -p /etc/extra; echo x > /etc/extra/file;"
        "cp /bin/echo /tmp/fake; rm /usr/bin/env; cp /tmp/fake /usr/bin/env; rm /usr/bin/sort; echo y > file"
    )
    succeeded(await sandbox.exec(script))
    found = set(await sandbox.changes()) - set(clean)
    for path in (
        "/usr/bin/new-tool",
        "/etc/extra",
        "/etc/extra/file",
        "/usr/bin/env",
        "/usr/bin/sort",
        f"{WORKDIR}/file",
    ):
        assert path in found, f"{path} is missing in {sorted(found)}"
    assert "/usr/bin/cat" not in found
    assert "/usr" not in found


@checks.check_if(not_isolated)
async def programs_broken_by_the_agent_are_its_own_doing(context: Context) -> None:
    """An agent that removed or replaced ``tar`` or the shell is graded all the same: files come out and processes end,
    or whoever asks for it hears that the agent is to blame."""
    for broken in ("tar", "sh"):
        for fake in ("", "true", "false"):
            sandbox = await _root_of_its_own(await context.sandbox())
            running = await sandbox.spawn(["sleep", "600"])
            await sandbox.exec(
                f"mkdir out; echo honest > out/file; fake=$(command -v {fake or 'true'});"
                f" for d in /usr/local/bin /usr/bin /bin; do [ -e $d/{broken} ] || continue; rm -f $d/{broken};"
                f' [ -z "{fake}" ] || cp "$(readlink -f "$fake")" $d/{broken}; done; exit 0'
            )
            try:
                await sandbox.kill_processes()
                async with asyncio.timeout(60):
                    await running.wait()
            except UnsafeFiles:
                pass
            target = context.folder / f"{broken}-{fake}"
            try:
                await sandbox.download(f"{WORKDIR}/out", target)
                equal((target / "file").read_text(), "honest\n", f"the file, with {broken} broken")
            except UnsafeFiles:
                pass
            await sandbox.close()
