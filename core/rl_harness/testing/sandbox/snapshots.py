"""Checks of snapshots and forks: what they hold, who sees whose changes (nobody), what outlives what."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from rl_harness.contracts.sandbox import EnvironmentSpec, Sandbox, SnapshotInfo, SnapshotLevel
from rl_harness.errors import SandboxError, Unsupported
from rl_harness.testing.sandbox.kit import (
    WORKDIR,
    Checks,
    Context,
    cancelled_midway,
    counter,
    equal,
    not_given,
    not_isolated,
    refused,
    runs,
    size,
    succeeded,
    until,
    without,
    without_snapshots,
)

checks = Checks()

REFUSED = (SandboxError, Unsupported)

#: A tree with everything that a copy may lose, and what describes it.
MAKE = """
set -e
mkdir -p tree/empty tree/private tree/sub
echo content > tree/file; printf '\\0\\377' > tree/binary; : > tree/nothing
echo program > tree/program; chmod 755 tree/program; chmod 600 tree/file; chmod 444 tree/binary; chmod 700 tree/private
ln -s file tree/link; ln -s ../nowhere tree/dangling; ln -s /etc tree/absolute; ln tree/file tree/sub/hard
mkfifo tree/fifo; echo s > 'tree/with space'; echo u > tree/é
touch -d '2001-02-03 04:05:06' tree/program
"""
DESCRIBE = """
cd tree
find . | sort | while read -r name; do
  if [ -L "$name" ]; then echo "$name -> $(readlink "$name")"; else stat -c '%n %a %u %g %F' "$name"; fi
done
cat file sub/hard | cksum; cksum binary nothing program 'with space'; stat -c %Y program
[ file -ef sub/hard ] && echo linked
"""


async def started_from(context: Context, snapshot: str, **fields: Any) -> Sandbox:
    return await context.sandbox(snapshot=snapshot, **fields)


@checks.check_if(without_snapshots)
async def a_snapshot_holds_files_modes_and_links(context: Context) -> None:
    parent = await context.sandbox()
    succeeded(await parent.exec(MAKE))
    wanted = succeeded(await parent.exec(DESCRIBE)).decode()
    child = await started_from(context, await context.snapshot(parent))
    equal(succeeded(await child.exec(DESCRIBE)).decode(), wanted, "the tree")
    succeeded(await child.exec("echo more >> tree/file; chmod 711 tree/private; rm tree/link; echo x > tree/link"))
    equal(succeeded(await parent.exec(DESCRIBE)).decode(), wanted, "the parent's tree, after the child changed its own")


@checks.check_if(without_snapshots)
async def a_snapshot_holds_deletions_and_replacements(context: Context) -> None:
    environment = context.folder / "environment"
    for name in ("gone", "dir/inner", "emptied/inner", "refilled/inner", "file-to-dir", "dir-to-file/inner", "kept"):
        (environment / "workspace" / name).parent.mkdir(parents=True, exist_ok=True)
        (environment / "workspace" / name).write_text(name)
    parent = await context.sandbox(environment=EnvironmentSpec(workdir=WORKDIR, directory=environment))
    script = (
        "set -e; rm gone; rm -r dir; rm emptied/inner; rm -r refilled; mkdir refilled; echo new > refilled/new;"
        "rm file-to-dir; mkdir file-to-dir; echo i > file-to-dir/i; rm -r dir-to-file; echo f > dir-to-file;"
        "mv kept moved"
    )
    succeeded(await parent.exec(script))
    listing = "find . | sort; cat moved dir-to-file file-to-dir/i refilled/new"
    wanted = succeeded(await parent.exec(listing))
    child = await started_from(context, await context.snapshot(parent))
    equal(succeeded(await child.exec(listing)), wanted, "the listing")


@checks.check_if(not_isolated, without_snapshots)
async def a_snapshot_holds_what_was_done_to_the_system(context: Context) -> None:
    """Not only the working directory: programs added, replaced and removed, and settings."""
    parent = await context.disposable()
    script = (
        "set -e; mkdir -p /opt/tool/bin /usr/local/bin; printf '#!/bin/sh\\necho tool\\n' > /usr/local/bin/tool;"
        "chmod 755 /usr/local/bin/tool; echo set > /etc/setting; echo home > /root/file;"
        "cp /etc/passwd /tmp/p; rm /etc/passwd; cp /tmp/p /etc/passwd; rm -f /usr/bin/env; rm /tmp/p"
    )
    succeeded(await parent.exec(script))
    child = await started_from(context, await context.snapshot(parent))
    shown = await child.exec("tool; cat /etc/setting /root/file; ls -d /opt/tool/bin; [ -e /usr/bin/env ] || echo none")
    equal(succeeded(shown), b"tool\nset\nhome\n/opt/tool/bin\nnone\n")


@checks.check_if(not_isolated, without_snapshots, without("users"))
async def a_snapshot_holds_owners(context: Context) -> None:
    parent = await context.sandbox()
    succeeded(await parent.exec("mkdir d; echo x > f; chown 1234:2345 f; chown nobody d"))
    child = await started_from(context, await context.snapshot(parent))
    equal(succeeded(await child.exec(["stat", "-c", "%u %g", "f"])), b"1234 2345\n", "owner of a file")
    equal(succeeded(await child.exec(["stat", "-c", "%u", "d"])), b"65534\n", "owner of a directory")
    succeeded(await child.exec("echo y > d/mine", user="nobody"))


@checks.check_if(without_snapshots)
async def what_the_parent_does_later_stays_out_of_the_snapshot(context: Context) -> None:
    parent = await context.sandbox()
    succeeded(await parent.exec("echo before > file; echo before > removed; mkdir dir"))
    snapshot = await context.snapshot(parent)
    succeeded(await parent.exec("echo after > file; rm removed; echo x > new; echo x > dir/new"))
    child = await started_from(context, snapshot)
    equal(
        succeeded(await child.exec("cat file removed; ls; ls dir")).split(),
        [
            *(b"before", b"before", b"dir", b"file", b"removed"),
        ],
    )
    equal(succeeded(await parent.exec("cat file")), b"after\n", "the parent's file")


@checks.check_if(without_snapshots)
async def sandboxes_from_one_snapshot_do_not_see_each_other(context: Context) -> None:
    parent = await context.sandbox()
    succeeded(await parent.exec("echo shared > file"))
    snapshot = await context.snapshot(parent)
    children = await asyncio.gather(*(started_from(context, snapshot) for _ in range(5)))
    for number, child in enumerate(children):
        succeeded(await child.exec(f"echo {number} >> file; echo x > only{number}"))
    for number, child in enumerate(children):
        equal(
            succeeded(await child.exec("cat file; ls")).decode().split(),
            ["shared", str(number), "file", f"only{number}"],
        )
    equal(succeeded(await parent.exec("cat file; ls")), b"shared\nfile\n", "the parent's files")
    later = await started_from(context, snapshot)
    equal(succeeded(await later.exec("cat file; ls")), b"shared\nfile\n", "files of a later one")


@checks.check_if(without_snapshots)
async def snapshots_are_listed_with_key_and_labels(context: Context) -> None:
    parent = await context.sandbox()
    before = time.time()
    first = await context.snapshot(parent, key="sha256:abc", labels={**context.labels, "benchmark": "b"})
    second = await context.snapshot(parent)
    assert first != second
    found = {info.id: info for info in await context.provider.snapshots(context.labels)}
    equal(set(found), {first, second}, "snapshots of this check")
    info = found[first]
    equal((info.key, dict(info.labels)), ("sha256:abc", {**context.labels, "benchmark": "b"}), "key and labels")
    equal(found[second].key, "", "key")
    assert abs(info.created_at - before) < 3600, f"created_at is {info.created_at}, now is {before}"
    assert info.provider
    assert info.size is None or info.size >= 0
    equal([i.id for i in await context.provider.snapshots({**context.labels, "benchmark": "b"})], [first])
    equal(await context.provider.snapshots({**context.labels, "benchmark": "other"}), [])
    assert first in {info.id for info in await context.provider.snapshots()}


@checks.check_if(without_snapshots)
async def a_deleted_snapshot_is_gone_and_its_sandboxes_go_on(context: Context) -> None:
    parent = await context.sandbox()
    succeeded(await parent.exec("echo kept > file; mkdir dir; echo inner > dir/inner"))
    snapshot = await parent.snapshot(labels=context.labels)
    child = await started_from(context, snapshot)
    await context.provider.delete_snapshot(snapshot)
    equal(await context.provider.snapshots(context.labels), [], "snapshots")
    await refused(context.provider.create(context.spec(snapshot=snapshot)), REFUSED, "starting from a deleted snapshot")
    await context.provider.delete_snapshot(snapshot)
    await parent.close()
    equal(succeeded(await child.exec("cat file dir/inner; echo more >> file; cat file")), b"kept\ninner\nkept\nmore\n")
    again = await context.snapshot(child)
    await child.close()
    grandchild = await started_from(context, again)
    equal(succeeded(await grandchild.exec("cat file dir/inner")), b"kept\nmore\ninner\n")


@checks.check_if(without_snapshots)
async def an_unknown_snapshot_is_refused(context: Context) -> None:
    for name in ("no-such-snapshot", "../x", "", "a/b"):
        await refused(context.provider.create(context.spec(snapshot=name)), REFUSED, f"the snapshot {name!r}")
    await context.provider.delete_snapshot("no-such-snapshot")
    equal(await context.provider.list(context.labels), [], "sandboxes left")


@checks.check_if(lambda capabilities, _: None if capabilities.snapshot is SnapshotLevel.NONE else "has snapshots")
async def without_snapshots_they_are_refused(context: Context) -> None:
    sandbox = await context.sandbox()
    await refused(sandbox.snapshot(), Unsupported, "snapshot")
    await refused(context.provider.create(context.spec(snapshot="x")), Unsupported, "starting from a snapshot")
    equal(await context.provider.snapshots(), [], "snapshots")


@checks.check_if(without_snapshots)
async def snapshots_of_snapshots_add_up(context: Context) -> None:
    sandbox = await context.sandbox()
    generations = 10
    for number in range(generations):
        script = (
            f"set -e; echo {number} > file{number}; echo {number} >> log; rm -f file{number - 2};"
            f"rm -rf dir; mkdir dir; echo {number} > dir/inner{number};"
            f"mkdir -p deep/a; echo {number} > deep/a/{number};"
            "if [ -d turn ]; then rmdir turn; echo > turn; else rm -f turn; mkdir turn; fi"
        )
        succeeded(await sandbox.exec(script))
        snapshot = await sandbox.snapshot(labels=context.labels)
        await sandbox.close()
        sandbox = await started_from(context, snapshot)
        await context.provider.delete_snapshot(snapshot)
    last = generations - 1
    equal(
        succeeded(await sandbox.exec("ls; ls dir deep/a; cat log | tr '\\n' ' '; [ -d turn ] || echo file"))
        .decode()
        .split(),
        [
            *("deep", "dir", f"file{last - 1}", f"file{last}", "log", "turn", "deep/a:"),
            *(*map(str, range(generations)), "dir:", f"inner{last}", *map(str, range(generations)), "file"),
        ],
    )


@checks.check_if(without_snapshots)
async def a_sandbox_on_record_tells_its_snapshot(context: Context) -> None:
    parent = await context.sandbox()
    snapshot = await context.snapshot(parent)
    child = await started_from(context, snapshot)
    found = {info.id: info.snapshot for info in await context.provider.list(context.labels)}
    equal(found, {parent.id: None, child.id: snapshot}, "snapshots that sandboxes started from")


@checks.check_if(without_snapshots)
async def the_rest_of_the_spec_holds_with_a_snapshot(context: Context) -> None:
    environment = context.folder / "environment"
    (environment / "workspace").mkdir(parents=True)
    (environment / "workspace/given").write_text("given\n")
    spec = EnvironmentSpec(workdir=WORKDIR, directory=environment, env={"NAME": "first"})
    parent = await context.sandbox(environment=spec)
    succeeded(await parent.exec("echo prepared >> given"))
    snapshot = await context.snapshot(parent)
    spec = EnvironmentSpec(workdir=f"{WORKDIR}/other", directory=environment, env={"NAME": "second"})
    child = await started_from(context, snapshot, environment=spec, labels={**context.labels, "who": "child"})
    equal(
        succeeded(await child.exec("pwd; echo $NAME; ls; cat ../given")).decode(),
        f"{child.native_path(f'{WORKDIR}/other')}\nsecond\ngiven\nprepared\n",
    )
    equal([info.id for info in await context.provider.list({**context.labels, "who": "child"})], [child.id])


@checks.check_if(without_snapshots)
async def a_snapshot_leaves_what_runs_running(context: Context) -> None:
    parent = await context.sandbox()
    running = asyncio.create_task(parent.exec("echo begun > begun; sleep 1; echo done", timeout=600))
    succeeded(await parent.exec(f"({counter('daemon')}) &"))
    await until(lambda: runs(parent, "daemon"), "the daemon runs")
    snapshot = await context.snapshot(parent)
    assert await runs(parent, "daemon"), "the snapshot ended a process"
    equal(succeeded(await running), b"done\n")
    child = await started_from(context, snapshot)
    at = await size(child, "daemon")
    written = await size(parent, "daemon")

    async def grows() -> bool:
        return await size(parent, "daemon") > written

    await until(grows, "a process goes on writing")
    equal(await size(child, "daemon"), at, "size of a file that only a process of the parent writes")


@checks.check_if(not_isolated, without_snapshots, without("changes"))
async def changes_are_counted_from_the_snapshot(context: Context) -> None:
    parent = await context.disposable()
    succeeded(await parent.exec("echo x > prepared; echo x > touched; rm -f /usr/bin/env; mkdir -p /opt/old /opt/kept"))
    child = await started_from(context, await context.snapshot(parent))
    clean = set(await child.changes())
    for path in (f"{WORKDIR}/prepared", f"{WORKDIR}/touched", "/usr/bin/env", "/opt/old"):
        assert path not in clean, f"{path} differs, which is part of the snapshot"
    succeeded(await child.exec("echo y >> touched; echo z > new; rmdir /opt/old; rm /usr/bin/sort"))
    found = set(await child.changes()) - clean
    wanted = {f"{WORKDIR}/touched", f"{WORKDIR}/new", "/opt/old", "/usr/bin/sort"}
    equal(found & (wanted | {f"{WORKDIR}/prepared", "/usr/bin/env", "/opt/kept"}), wanted, "what differs")


@checks.check_if(without_snapshots)
async def a_closed_sandbox_has_no_snapshot(context: Context) -> None:
    sandbox = await context.sandbox()
    await sandbox.close()
    await refused(sandbox.snapshot(labels=context.labels), SandboxError, "a snapshot after close")
    equal(await context.provider.snapshots(context.labels), [], "snapshots")


@checks.check_if(without_snapshots)
async def cancelling_a_snapshot_leaves_none(context: Context) -> None:
    sandbox = await context.sandbox()
    succeeded(
        await sandbox.exec(
            "mkdir d; for n in $(seq 300); do echo $n > d/$n; done; head -c 20000000 /dev/zero > d/large"
        )
    )
    started = time.monotonic()
    await context.provider.delete_snapshot(await sandbox.snapshot(labels=context.labels))
    usual = time.monotonic() - started
    for part in (0.0, 0.1, 0.25, 0.5, 0.75, 0.9):
        late = await cancelled_midway(lambda: sandbox.snapshot(labels=context.labels), part * usual)
        if isinstance(late, str):
            await context.provider.delete_snapshot(late)

    async def none() -> bool:
        return not await context.provider.snapshots(context.labels)

    await until(none, "no snapshot is left")
    equal(succeeded(await sandbox.exec("cat d/300")), b"300\n")
    child = await started_from(context, await context.snapshot(sandbox))
    equal(succeeded(await child.exec("ls d | wc -l")).strip(), b"301", "files in a snapshot made after cancelled ones")


@checks.check_if(without_snapshots, not_given("options"))
async def a_snapshot_outlives_its_provider_and_serves_others(context: Context) -> None:
    maker = await context.another_provider()
    parent = await maker.create(context.spec())
    succeeded(await parent.exec("echo prepared > file"))
    snapshot = await context.snapshot(parent, key="kept")
    await maker.close()
    await context.provider.reap(context.labels)
    found: list[SnapshotInfo] = await context.provider.snapshots(context.labels)
    equal([(info.id, info.key) for info in found], [(snapshot, "kept")], "snapshots")
    for provider in (context.provider, await context.another_provider()):
        child = context.keep(await provider.create(context.spec(snapshot=snapshot)))
        equal(succeeded(await child.exec("cat file")), b"prepared\n")


@checks.check_if(without("fork"))
async def forks_do_not_see_each_other_nor_their_parent(context: Context) -> None:
    parent = await context.sandbox()
    succeeded(await parent.exec("echo common > file; echo x > removed; rm removed"))
    forks = [context.keep(fork) for fork in await parent.fork(4)]
    equal(len({parent.id, *(fork.id for fork in forks)}), 5, "number of ids")
    succeeded(await parent.exec("echo parent >> file; echo x > only-parent"))
    for number, fork in enumerate(forks):
        succeeded(await fork.exec(f"echo {number} >> file; echo x > only{number}"))
    for number, fork in enumerate(forks):
        shown = succeeded(await fork.exec("cat file; ls")).decode().split()
        equal(shown, ["common", str(number), "file", f"only{number}"])
    equal(succeeded(await parent.exec("cat file; ls")).split(), [b"common", b"parent", b"file", b"only-parent"])


@checks.check_if(without("fork"))
async def a_fork_has_the_spec_and_the_labels_of_its_parent(context: Context) -> None:
    environment = EnvironmentSpec(workdir=f"{WORKDIR}/here", env={"NAME": "value"})
    parent = await context.sandbox(environment=environment, labels={**context.labels, "episode": "e1"})
    (fork,) = await parent.fork(1)
    context.keep(fork)
    equal(succeeded(await fork.exec("pwd; echo $NAME")).decode(), f"{fork.native_path(f'{WORKDIR}/here')}\nvalue\n")
    found = {info.id for info in await context.provider.list({**context.labels, "episode": "e1"})}
    equal(found, {parent.id, fork.id}, "sandboxes with the parent's labels")


@checks.check_if(without("fork"))
async def a_fork_outlives_its_parent_and_forks_again(context: Context) -> None:
    parent = await context.sandbox()
    succeeded(await parent.exec("echo kept > file"))
    (fork,) = await parent.fork(1)
    context.keep(fork)
    await parent.close()
    equal(succeeded(await fork.exec("cat file; echo more >> file")), b"kept\n")
    grandchildren = [context.keep(sandbox) for sandbox in await fork.fork(2)]
    await fork.close()
    for sandbox in grandchildren:
        equal(succeeded(await sandbox.exec("cat file")), b"kept\nmore\n")
        await sandbox.close()
    await until(context.none_left, "nothing is left")


@checks.check_if(without("fork"))
async def cancelling_a_fork_leaves_nothing(context: Context) -> None:
    parent = await context.sandbox()
    started = time.monotonic()
    for fork in await parent.fork(3):
        await fork.close()
    usual = time.monotonic() - started
    for part in (0.0, 0.1, 0.3, 0.5, 0.8):
        late = await cancelled_midway(lambda: parent.fork(3), part * usual)
        for fork in late if isinstance(late, list) else []:
            await fork.close()

    async def only_the_parent() -> bool:
        found = [info.id for info in await context.provider.list(context.labels)]
        return found == [parent.id] and not await context.provider.snapshots(context.labels)

    await until(only_the_parent, "only the parent is left")
    equal(succeeded(await parent.exec("echo fine")), b"fine\n")


@checks.check_if(lambda capabilities, _: "can fork" if capabilities.fork else None)
async def without_forks_they_are_refused(context: Context) -> None:
    sandbox = await context.sandbox()
    await refused(sandbox.fork(1), Unsupported, "fork")
