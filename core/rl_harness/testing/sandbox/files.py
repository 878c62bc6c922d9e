"""Checks of files going in and out, and of what a hostile tree can do to them (nothing)."""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path

from rl_harness.errors import SandboxError, UnsafeFiles
from rl_harness.testing.sandbox.kit import WORKDIR, Checks, Context, equal, succeeded, without

checks = Checks()


async def refused(operation: Awaitable[object], error: type[Exception], what: str) -> None:
    try:
        await operation
    except error:
        return
    raise AssertionError(f"not refused: {what}")


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
async def a_missing_file_is_not_found(context: Context) -> None:
    sandbox = await context.sandbox()
    await refused(sandbox.read_file(f"{WORKDIR}/none"), FileNotFoundError, "reading a missing file")
    await refused(sandbox.read_file("/no/such/path"), FileNotFoundError, "reading in a missing directory")
    await refused(sandbox.download(f"{WORKDIR}/none", context.folder / "x"), FileNotFoundError, "downloading nothing")


@checks.check
async def only_plain_files_within_the_limit_are_read(context: Context) -> None:
    sandbox = await context.sandbox()
    succeeded(await sandbox.exec("mkdir directory; mkfifo fifo; printf 12345 > five; truncate -s 1T sparse"))
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
    succeeded(await sandbox.exec("mkdir out; truncate -s 1T out/sparse; mkdir small; printf 12345 > small/five"))
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


@checks.check_if(without("changes"))
async def changes_name_what_differs(context: Context) -> None:
    sandbox = await context.sandbox()
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
