"""Checks of agents that broke or replaced the programs of their machine, which a provider may need: whatever they did,
they are graded on what they left, and no process of theirs outlives a kill."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable

from rl_harness.contracts.sandbox import NetworkPolicy, Sandbox
from rl_harness.errors import UnsafeFiles
from rl_harness.records.episode import UnscoredReason
from rl_harness.sandboxes.remote import RemoteSandbox
from rl_harness.tasks import Task, Verdict, load_task, verify
from rl_harness.testing.sandbox.kit import Check, Checks, Context, equal, not_given, not_isolated, succeeded, until

checks = Checks()

_TASK = """
schema_version = "1.1"
[verifier]
timeout_sec = 60
environment_mode = "separate"
[environment]
"""
_TEST = """
mkdir -p /logs/verifier
{ [ "$(cat done)" = done ] && [ "$(cat deep/er/file)" = deep ] && [ -x deep/er/file ] && [ ! -s deep/empty ]; } \
  && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
"""
_WORK = "echo done > done; mkdir -p deep/er; echo deep > deep/er/file; chmod 755 deep/er/file; : > deep/empty;"

_MARKS_AND_HOLDS = r"""#!/usr/bin/python3 -IS
import os, sys, time
for word in sys.argv:
    if len(word) == 16:
        for stream in (1, 2):
            os.write(stream, f"\036{word} 0\036\036{word}:0\036".encode())
if os.fork() == 0:
    time.sleep(100000)
"""
_SAYS_WHAT_IS_WANTED = "#!/bin/bash\necho every process was signalled; exit 0\n"

#: Programs by what an agent did to them: an empty one is removed.
FAKES = {
    "gone": "",
    "says_nothing": "#!/bin/bash\nexit 0\n",
    "fails": "#!/bin/bash\necho no >&2; exit 1\n",
    "never_ends": "#!/bin/bash\nexec sleep 100000\n",
    "says_what_it_should_not": "#!/bin/bash\nprintf '\\xff%.0s' {1..2000}\n",
    "never_stops": "#!/bin/bash\nexec cat /dev/zero\n",
    "marks_the_end_and_holds_its_output": _MARKS_AND_HOLDS,
    "says_what_is_wanted": _SAYS_WHAT_IS_WANTED,
}
#: Which program was broken, and how.
BROKEN = [
    *(("sh", how) for how in FAKES),
    *(("tar", how) for how in ("gone", "says_nothing", "fails", "never_ends", "says_what_it_should_not")),
    ("cat", "gone"),
]
#: What a provider may ask to kill, or to find what to kill.
_KILLERS = ("sh", "grep", "kill", "pkill", "ps")


def _replacing(programs: str) -> str:
    """A command for bash that puts /opt/fake in their places; an empty one removes them."""
    return (
        f"for d in /usr/local/bin /usr/bin /bin; do for p in {programs}; do [ -e $d/$p ] || continue;"
        " rm -f $d/$p; [ ! -s /opt/fake ] || cp /opt/fake $d/$p; done; done; exit 0"
    )


def _hurried(sandbox: Sandbox) -> Sandbox:
    """For what never comes, and is waited for in vain."""
    if isinstance(sandbox, RemoteSandbox):
        sandbox.patience = sandbox.silence = sandbox.dying_seconds = 1.0
        sandbox.kill_seconds = 3.0
    return sandbox


def _task(context: Context, test: str) -> Task:
    directory = context.folder / f"task-{secrets.token_hex(4)}"
    (directory / "tests").mkdir(parents=True)
    (directory / "environment").mkdir()
    without = NetworkPolicy.NONE in context.provider.capabilities.network
    (directory / "task.toml").write_text(_TASK + ('network_mode = "no-network"\n' if without else ""))
    (directory / "instruction.md").write_text("Write done into the file done, and more.")
    (directory / "tests/test.sh").write_text(test)
    return load_task(directory)


async def _verdict(context: Context, program: str, how: str, work: str) -> Verdict:
    task = _task(context, _TEST)
    spec = task.sandbox_spec(context.labels, isolated=True, agent_timeout=60, setup=())
    sandbox = _hurried(context.keep(await context.provider.create(spec)))
    await sandbox.write_file("/opt/fake", FAKES[how].encode(), mode=0o755)
    await sandbox.exec(["bash", "-c", f"{work} {_replacing(program)}"])
    return await verify(task, sandbox, context.provider, None, context.labels)


def _graded(program: str, how: str) -> Check:
    async def body(context: Context) -> None:
        await context.disposable()  # has shown that its root is not this machine's
        idle, done = [await _verdict(context, program, how, work) for work in ("", _WORK)]
        equal((idle.reward, idle.unscored), (0.0, None), f"the grade of who did nothing ({idle.detail})")
        equal((done.reward, done.unscored), (1.0, None), f"the grade of who did the task ({done.detail})")

    body.__name__ = f"an_agent_is_graded_on_what_it_left_when_{program}_{how}"
    return Check(body, (not_isolated,))


checks.extend(_graded(program, how) for program, how in BROKEN)

_COUNTING = "while :; do echo; sleep 0.05; done >> /app/counted"


async def _counted(context: Context, sandbox: Sandbox) -> int:
    """The size of the file that grows as long as the process runs, without a program of the machine's."""
    target = context.folder / "counted"
    target.unlink(missing_ok=True)
    await sandbox.download("/app/counted", target)
    return target.stat().st_size


async def _stands_still(context: Context, sandbox: Sandbox) -> None:
    before = await _counted(context, sandbox)
    await asyncio.sleep(0.5)
    equal(await _counted(context, sandbox), before, "what a killed process had written half a second later")


async def _lie(sandbox: Sandbox) -> None:
    await sandbox.write_file("/opt/fake", _SAYS_WHAT_IS_WANTED.encode(), mode=0o755)
    succeeded(await sandbox.exec(["bash", "-c", _replacing(" ".join(_KILLERS))]))


@checks.check_if(not_isolated)
async def no_process_outlives_a_kill_that_the_programs_of_its_machine_only_claim(context: Context) -> None:
    sandbox = _hurried(await context.disposable())
    succeeded(await sandbox.exec(["bash", "-c", f"setsid bash -c '{_COUNTING}' >/dev/null 2>&1 &"]))

    async def counting() -> bool:
        return (await sandbox.exec(["test", "-s", "/app/counted"])).ok

    await until(counting, "the process counts")
    await _lie(sandbox)
    await sandbox.kill_processes()
    await _stands_still(context, sandbox)


@checks.check_if(not_isolated)
async def no_command_outlives_its_kill_that_the_programs_of_its_machine_only_claim(context: Context) -> None:
    sandbox = _hurried(await context.disposable())
    process = await sandbox.spawn(["bash", "-c", f"setsid bash -c '{_COUNTING}' & wait"])

    async def counting() -> bool:
        return (await sandbox.exec(["test", "-s", "/app/counted"])).ok

    await until(counting, "the process counts")
    await _lie(sandbox)
    await process.kill()
    await _stands_still(context, sandbox)


_SMALL = 24 << 20


@checks.check_if(not_isolated, not_given("disk"))
async def a_process_is_killed_on_a_disk_that_is_full(context: Context) -> None:
    assert context.rig.disk is not None
    await context.rig.disk(_SMALL)
    sandbox = _hurried(await context.disposable())
    succeeded(await sandbox.exec("setsid sleep 100000 >/dev/null 2>&1 & echo $! > pid"))
    await sandbox.exec("cat /dev/zero > /app/filler; cat /dev/zero > /app/filled", timeout=60)
    assert not (await sandbox.exec("echo more > more")).ok, "the disk is not full"
    await sandbox.kill_processes()
    assert not (await sandbox.exec('kill -0 "$(cat pid)"')).ok, "a process outlived the kill"


@checks.check_if(not_isolated, not_given("disk"))
async def what_there_is_no_room_for_is_refused_as_such(context: Context) -> None:
    assert context.rig.disk is not None
    await context.rig.disk(_SMALL)
    sandbox = await context.sandbox()
    source = context.folder / "tree"
    (source / "deep").mkdir(parents=True)
    (source / "deep/file").write_bytes(bytes(1 << 20))
    await sandbox.exec("cat /dev/zero > /app/filler; cat /dev/zero > /app/filled", timeout=60)
    await _refused_for_room(sandbox.upload(source, "/app/new/tree"))
    await _refused_for_room(sandbox.write_file("/new/file", bytes(1 << 20)))


async def _refused_for_room(operation: Awaitable[None]) -> None:
    full = None
    try:
        await operation
    except UnsafeFiles as error:
        full = error.full
    equal(full, True, "whether want of room was the reason")


@checks.check_if(not_isolated, not_given("disk"))
async def a_verifier_without_room_is_no_grade(context: Context) -> None:
    assert context.rig.disk is not None
    task = _task(context, _TEST)
    spec = task.sandbox_spec(context.labels, isolated=True, agent_timeout=60, setup=())
    sandbox = context.keep(await context.provider.create(spec))
    succeeded(await sandbox.exec(f"{_WORK} head -c {2 * _SMALL} /dev/zero > data"))
    await context.rig.disk(_SMALL)
    verdict = await verify(task, sandbox, context.provider, None, context.labels)
    equal((verdict.reward, verdict.unscored), (None, UnscoredReason.SANDBOX_ERROR), f"the grade ({verdict.detail})")


@checks.check_if(not_isolated, not_given("disk"))
async def a_verifier_whose_tests_fill_its_disk_is_no_grade(context: Context) -> None:
    assert context.rig.disk is not None
    task = _task(context, "cat /dev/zero > /filler; cat /dev/zero > /filled; " + _TEST)
    spec = task.sandbox_spec(context.labels, isolated=True, agent_timeout=60, setup=())
    sandbox = context.keep(await context.provider.create(spec))
    succeeded(await sandbox.exec(_WORK))
    await context.rig.disk(_SMALL)
    verdict = await verify(task, sandbox, context.provider, None, context.labels)
    assert verdict.reward is None, f"graded {verdict.reward} by tests that had no room for a grade"
