"""Checks of ``exec``: results, output, environment, timeouts, descendants."""

from __future__ import annotations

import asyncio
import os

from rl_harness.errors import Unsupported
from rl_harness.testing.sandbox.kit import (
    WORKDIR,
    Checks,
    Context,
    counter,
    equal,
    runs,
    size,
    succeeded,
    until,
    within,
    without,
)

MB = 1_000_000

checks = Checks()


@checks.check
async def exit_code_and_separate_streams(context: Context) -> None:
    sandbox = await context.sandbox()
    result = await sandbox.exec("echo out; echo err >&2; exit 7")
    equal((result.exit_code, result.stdout, result.stderr), (7, b"out\n", b"err\n"))
    assert not result.ok
    assert result.seconds > 0


@checks.check
async def silence_is_empty_output(context: Context) -> None:
    sandbox = await context.sandbox()
    result = await sandbox.exec("true")
    equal((result.exit_code, result.stdout, result.stderr), (0, b"", b""))
    equal((result.stdout_truncated, result.stderr_truncated, result.timed_out, result.signal), (False,) * 3 + (None,))


@checks.check
async def a_signal_is_128_plus_its_number(context: Context) -> None:
    sandbox = await context.sandbox()
    result = await sandbox.exec(["sh", "-c", "kill -TERM $$"])
    equal((result.exit_code, result.signal, result.timed_out), (143, 15, False))


@checks.check
async def a_quick_death_by_signal_is_not_a_timeout(context: Context) -> None:
    sandbox = await context.sandbox()
    for command in ("echo partial; kill -KILL $$", ["sh", "-c", "echo partial; kill -KILL $$"]):
        result = await sandbox.exec(command, timeout=600)
        equal((result.exit_code, result.signal, result.timed_out), (137, 9, False))
        equal(result.stdout, b"partial\n")


@checks.check
async def argv_is_literal_and_a_string_goes_through_a_shell(context: Context) -> None:
    sandbox = await context.sandbox()
    equal(succeeded(await sandbox.exec(["printf", "%s|", "$HOME", "a b", "*", "é\n"])), "$HOME|a b|*|é\n|".encode())
    equal(succeeded(await sandbox.exec("printf 'b\\na\\n' | sort")), b"a\nb\n")


@checks.check
async def argv_keeps_quotes_newlines_and_empty_arguments(context: Context) -> None:
    sandbox = await context.sandbox()
    arguments = [
        "",
        "'",
        '"',
        "\\",
        "a\nb",
        "\t",
        "`id`",
        "$(id)",
        "-n",
        "--",
        "!x",
        "a'b\"c\\d",
        "{a,b}",
        "~",
        ";",
        "\r",
    ]
    printed = succeeded(await sandbox.exec(["printf", "<%s>\\0", *arguments]))
    equal(printed.decode().split("\0"), [*(f"<{argument}>" for argument in arguments), ""])


@checks.check
async def a_shell_string_keeps_quotes_newlines_and_comments(context: Context) -> None:
    sandbox = await context.sandbox()
    script = """# a comment
name="it's \\"quoted\\""
cat <<'END'
$name `as it is` 'and' "so" \\ on
END
printf '%s\\n' "$name"
"""
    wanted = b'$name `as it is` \'and\' "so" \\ on\nit\'s "quoted"\n'
    equal(succeeded(await sandbox.exec(script)), wanted)


@checks.check
async def output_is_bytes_whatever_they_are(context: Context) -> None:
    sandbox = await context.sandbox()
    equal(succeeded(await sandbox.exec(r"printf '\377\376\000ok\303'")), b"\xff\xfe\x00ok\xc3")


@checks.check
async def a_missing_program_is_127(context: Context) -> None:
    sandbox = await context.sandbox()
    equal((await sandbox.exec(["no-such-program-anywhere"])).exit_code, 127, "exit code")
    equal((await sandbox.exec("no-such-program-anywhere")).exit_code, 127, "exit code")


@checks.check
async def an_unknown_directory_is_126_with_the_reason(context: Context) -> None:
    sandbox = await context.sandbox()
    result = await sandbox.exec("true", cwd="/no/such/directory")
    equal(result.exit_code, 126, "exit code")
    assert b"/no/such/directory" in result.stderr, result.stderr


@checks.check
async def a_long_command_arrives_whole(context: Context) -> None:
    sandbox = await context.sandbox()
    text = "0123456789abcdef" * 7_000
    equal(len(succeeded(await sandbox.exec(f"printf %s {text}"))), len(text), "length")
    equal(len(succeeded(await sandbox.exec(["printf", "%s%s", text, text]))), 2 * len(text), "length")


@checks.check
async def the_working_directory_is_the_default(context: Context) -> None:
    sandbox = await context.sandbox()
    succeeded(await sandbox.exec("mkdir sub && echo here > sub/file"))
    equal(await sandbox.read_file(f"{WORKDIR}/sub/file"), b"here\n")
    equal(succeeded(await sandbox.exec("cat file", cwd=f"{WORKDIR}/sub")), b"here\n")


@checks.check
async def environment_variables_add_up(context: Context) -> None:
    environment = context.spec().environment
    environment = type(environment)(workdir=WORKDIR, env={"ALWAYS": "spec", "BOTH": "spec"})
    sandbox = await context.sandbox(environment=environment)
    show = 'echo "$ALWAYS $BOTH $ONCE"'
    equal(succeeded(await sandbox.exec(show, env={"BOTH": "exec", "ONCE": "a b$"})), b"spec exec a b$\n")
    equal(succeeded(await sandbox.exec(show)), b"spec spec \n")


@checks.check
async def values_of_variables_are_literal(context: Context) -> None:
    sandbox = await context.sandbox()
    values = {"Q": 'it\'s "so"', "N": "a\nb", "D": "$HOME `id`", "E": "", "S": " x ", "B": "a\\b=c"}
    show = ["sh", "-c", 'printf "%s|" "$Q" "$N" "$D" "$E" "$S" "$B"; echo "${E-unset}"']
    equal(succeeded(await sandbox.exec(show, env=values)).decode(), "|".join(values.values()) + "|\n")


@checks.check
async def the_host_environment_stays_outside(context: Context) -> None:
    os.environ["RL_HARNESS_KIT_SECRET"] = "secret"
    try:
        sandbox = await context.sandbox()
        assert b"RL_HARNESS_KIT_SECRET" not in succeeded(await sandbox.exec("env"))
    finally:
        del os.environ["RL_HARNESS_KIT_SECRET"]


@checks.check
async def stdin_is_what_was_given_and_ends(context: Context) -> None:
    sandbox = await context.sandbox()
    data = bytes(range(256)) * 4_000
    equal(succeeded(await sandbox.exec(["cat"], stdin=data, output_limit=len(data))), data)
    equal(succeeded(await sandbox.exec(["cat"])), b"")


@checks.check
async def ten_megabytes_of_stdin_arrive_and_come_back(context: Context) -> None:
    sandbox = await context.sandbox()
    data = os.urandom(MB) * 10
    result = await sandbox.exec("tee copy", stdin=data, output_limit=len(data))
    assert succeeded(result) == data, "the output is not the input"
    equal((result.stdout_truncated, await size(sandbox, "copy")), (False, len(data)))


@checks.check
async def a_program_need_not_read_its_stdin(context: Context) -> None:
    sandbox = await context.sandbox()
    equal(succeeded(await sandbox.exec("echo done", stdin=b"x" * 3_000_000)), b"done\n")


@checks.check
async def output_beyond_the_limit_is_flagged(context: Context) -> None:
    sandbox = await context.sandbox()
    result = await sandbox.exec("printf 12345; printf 123456 >&2", output_limit=5)
    equal((result.stdout, result.stdout_truncated), (b"12345", False))
    equal((result.stderr, result.stderr_truncated), (b"12345", True))


@checks.check
async def a_hundred_megabytes_of_output_are_cut_and_flagged(context: Context) -> None:
    sandbox = await context.sandbox()
    result = await sandbox.exec("head -c 100000000 /dev/zero; echo end >&2", output_limit=1_000)
    equal((result.exit_code, len(result.stdout), result.stdout_truncated), (0, 1_000, True))
    equal((result.stderr, result.stderr_truncated), (b"end\n", False))


@checks.check
async def a_timeout_kills_all_descendants_and_keeps_the_output(context: Context) -> None:
    sandbox = await context.sandbox()
    script = (
        f"rm -f *.pid; echo first; echo error >&2; (sh -c '{counter('child')}' &);"
        f"(setsid sh -c '({counter('daemon')}) &' &); sleep 600"
    )
    for timeout in (1.0, 5.0, 30.0):  # the longer ones where a machine is too busy to get that far
        result = await sandbox.exec(script, timeout=timeout)
        if await size(sandbox, "child.pid") and await size(sandbox, "daemon.pid"):
            break
    equal((result.timed_out, result.stdout, result.ok), (True, b"first\n", False))
    assert result.stderr.startswith(b"error\n"), result.stderr  # a shell whose child is killed may add "Killed"
    assert result.exit_code != 0
    assert not await runs(sandbox, "child"), "a child outlived the timeout"
    assert not await runs(sandbox, "daemon"), "a daemon outlived the timeout"
    equal(succeeded(await sandbox.exec("echo fine")), b"fine\n")


@checks.check
async def a_timeout_ends_what_ignores_signals(context: Context) -> None:
    sandbox = await context.sandbox()
    script = f"trap '' TERM INT HUP QUIT; {counter('stubborn')}"
    result = await sandbox.exec(script, timeout=1.0)
    equal(result.timed_out, True, "timed_out")
    assert not await runs(sandbox, "stubborn"), "a command outlived its timeout"


@checks.check
async def only_our_own_timeout_is_reported_as_one(context: Context) -> None:
    sandbox = await context.sandbox()
    result = await sandbox.exec(["sh", "-c", "exit 124"], timeout=600)
    equal((result.exit_code, result.timed_out), (124, False))


@checks.check
async def background_children_do_not_hold_up_the_result(context: Context) -> None:
    sandbox = await context.sandbox()
    result = await sandbox.exec(f"({counter('background')}) & echo started", timeout=600)
    equal(succeeded(result), b"started\n")
    await until(lambda: runs(sandbox, "background"), "the background child runs on")


@checks.check
async def a_background_child_may_go_on_writing(context: Context) -> None:
    """What it writes to the output of a command long finished neither blocks nor kills it."""
    sandbox = await context.sandbox()
    succeeded(await sandbox.exec("(while :; do echo noise; echo >> noisy; done) & sleep 0.1"))
    enough = await size(sandbox, "noisy") + 20_000  # more lines than a pipe holds

    async def went_on() -> bool:
        return await size(sandbox, "noisy") > enough

    await until(went_on, "the noisy child runs on")


@checks.check
async def commands_run_side_by_side(context: Context) -> None:
    sandbox = await context.sandbox()
    succeeded(await sandbox.exec("mkfifo pipe"))
    reader = sandbox.exec("cat pipe", timeout=60)
    writer = sandbox.exec("echo through > pipe", timeout=60)
    results = await asyncio.gather(reader, writer, *(sandbox.exec(f"echo {n}") for n in range(10)))
    equal([succeeded(result) for result in results], [b"through\n", b"", *(b"%d\n" % n for n in range(10))])


@checks.check
async def a_cancelled_command_dies_and_the_sandbox_lives(context: Context) -> None:
    sandbox = await context.sandbox()
    running = asyncio.create_task(sandbox.exec(f"(setsid sh -c '({counter('daemon')}) &' &); {counter('cancelled')}"))
    await until(lambda: runs(sandbox, "cancelled"), "the command runs")
    await until(lambda: runs(sandbox, "daemon"), "its daemon runs")
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()

    async def dead() -> bool:
        return not await runs(sandbox, "cancelled") and not await runs(sandbox, "daemon")

    await until(dead, "the command and its daemon are dead")
    equal(succeeded(await sandbox.exec("echo fine")), b"fine\n")


@checks.check_if(without("users"))
async def a_user_is_switched_to(context: Context) -> None:
    sandbox = await context.sandbox()
    equal(succeeded(await sandbox.exec("id -un; id -u", user="nobody")), b"nobody\n65534\n")
    equal(succeeded(await sandbox.exec("id -u", user="1234")), b"1234\n")
    result = await sandbox.exec("true", user="no-such-user")
    equal(result.exit_code, 126, "exit code")
    assert b"no-such-user" in result.stderr, result.stderr


@checks.check_if(lambda capabilities, _: "has users" if capabilities.users else None)
async def another_user_is_refused_not_ignored(context: Context) -> None:
    sandbox = await context.sandbox()
    try:
        result = await sandbox.exec("id -u", user="nobody")
    except Unsupported:
        return
    equal(result.exit_code, 126, "exit code")
    assert result.stderr


@checks.check
async def kill_processes_at_once_do_not_kill_each_other(context: Context) -> None:
    """As when the agent is done while commands that were given up on are still being killed."""
    sandbox = await context.sandbox()
    for _ in range(3):
        await asyncio.gather(*(sandbox.kill_processes() for _ in range(4)))
        equal(succeeded(await sandbox.exec("echo fine")), b"fine\n")


@checks.check
async def kill_processes_leaves_none_and_keeps_files(context: Context) -> None:
    sandbox = await context.sandbox()
    succeeded(await sandbox.exec(f"echo kept > file; (setsid sh -c '({counter('daemon')}) &' &)"))
    running = asyncio.create_task(sandbox.exec(counter("foreground"), timeout=600))
    for name in ("daemon", "foreground"):
        await until(lambda name=name: runs(sandbox, name), f"the {name} runs")  # type: ignore[misc]
    await sandbox.kill_processes()
    for name in ("daemon", "foreground"):
        assert not await runs(sandbox, name), f"the {name} is still alive"
    async with within("a killed command has a result"):
        result = await running
    assert not result.ok
    equal(result.timed_out, False, "timed_out")
    equal(await sandbox.read_file(f"{WORKDIR}/file"), b"kept\n")
    equal(succeeded(await sandbox.exec("echo fine")), b"fine\n")
