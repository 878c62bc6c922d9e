"""What goes wrong at Modal: each fault on demand, and what the harness makes of it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from rl_harness.contracts.sandbox import SandboxSpec
from rl_harness.errors import SandboxError, Unavailable
from rl_harness_modal import provider as provider_module
from rl_harness_modal.provider import ModalProvider

pytestmark = pytest.mark.needs("userns", "modal")

SPEC = SandboxSpec(labels={"run": "faults"})


@pytest.fixture
async def make(stand_in) -> AsyncIterator[Callable[..., ModalProvider]]:
    """Makes providers with options."""
    made: list[ModalProvider] = []

    def make(**options: object) -> ModalProvider:
        made.append(ModalProvider(ModalProvider.Options(**{"patience": 20, **options})))
        return made[-1]

    yield make
    for provider in made:
        await provider.close()


# ------------------------------------------------------------------------------------------------------- preflight


async def test_preflight_passes(make) -> None:
    await make().preflight()


async def test_without_a_token_the_remedy_is_named(make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MODAL_TOKEN_ID")
    with pytest.raises(Unavailable, match="no token for Modal: Token missing") as caught:
        await make().preflight()
    assert "modal token new" in str(caught.value)


async def test_a_refused_token_is_said_in_modals_words(make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODAL_TOKEN_SECRET", "as-wrong")
    with pytest.raises(Unavailable, match="refuses the token: Token validation failed") as caught:
        await make().preflight()
    assert "modal token new" in str(caught.value)


@pytest.mark.parametrize("listens", [False, True], ids=["refused", "silent"])
async def test_preflight_does_not_hang_on_a_server_out_of_reach(
    listens: bool, make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider_module, "_PREFLIGHT_SECONDS", 1.0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        if listens:
            taken.listen()
        monkeypatch.setenv("MODAL_SERVER_URL", f"http://127.0.0.1:{taken.getsockname()[1]}")
        provider = make()
        started = time.monotonic()
        with pytest.raises(Unavailable, match="did not answer"):
            await provider.preflight()
        await provider.close()
        assert time.monotonic() - started < 10


async def test_a_missing_sdk_is_said_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modal", None)
    with pytest.raises(Unavailable, match="needs Modal's SDK") as caught:
        await ModalProvider(ModalProvider.Options()).preflight()
    assert "pip install rl-harness-modal" in str(caught.value)


# ---------------------------------------------------------------------------------------------------------- making


async def test_a_rate_limit_is_waited_out_for_as_long_as_modal_asks(make, stand_in) -> None:
    stand_in.ask(
        "fault", method="SandboxCreateV2", times=2, status="RESOURCE_EXHAUSTED", message="slow down", retry_after=0.3
    )
    started = time.monotonic()
    sandbox = await make().create(SPEC)
    assert time.monotonic() - started >= 0.6
    assert (await sandbox.exec("echo fine")).stdout == b"fine\n"


async def test_a_rate_limit_without_a_time_is_retried_with_growing_pauses(make, stand_in) -> None:
    stand_in.ask("fault", method="SandboxCreateV2", times=2, status="RESOURCE_EXHAUSTED", message="too many requests")
    await make().create(SPEC)
    assert stand_in.ask("calls")["SandboxCreateV2"] == 3


@pytest.mark.parametrize("retry_after", [None, 60.0])
async def test_patience_ends_with_modals_own_words(retry_after: float | None, make, stand_in) -> None:
    stand_in.ask(
        "fault",
        method="SandboxCreateV2",
        times=100,
        status="RESOURCE_EXHAUSTED",
        message="function call rate limit exceeded",
        retry_after=retry_after,
    )
    started = time.monotonic()
    with pytest.raises(SandboxError, match="function call rate limit exceeded"):
        await make(patience=1).create(SPEC)
    assert time.monotonic() - started < 10


async def test_a_reached_quota_is_said_and_the_other_sandbox_lives(make, stand_in) -> None:
    stand_in.ask("quota", sandboxes=1)
    provider = make(patience=1)
    sandbox = await provider.create(SPEC)
    with pytest.raises(SandboxError, match="limited to 1 concurrent") as caught:
        await provider.create(SPEC)
    assert "fewer episodes" in str(caught.value)
    assert (await sandbox.exec("echo fine")).stdout == b"fine\n"


async def test_a_quota_that_frees_up_is_waited_for(make, stand_in) -> None:
    stand_in.ask("quota", sandboxes=1)
    provider = make()
    first = await provider.create(SPEC)
    second = asyncio.create_task(provider.create(SPEC))
    await asyncio.sleep(0.3)
    await first.close()
    assert (await (await second).exec("echo fine")).stdout == b"fine\n"


async def test_a_service_in_trouble_is_asked_again(make, stand_in) -> None:
    stand_in.ask("fault", method="SandboxCreateV2", times=5, status="UNAVAILABLE", message="try later")
    await make().create(SPEC)
    assert stand_in.ask("calls")["SandboxCreateV2"] == 6


@pytest.mark.parametrize("times", [1, 5], ids=["repeated by the SDK", "repeated by us"])
async def test_a_lost_answer_makes_no_second_sandbox(times: int, make, stand_in) -> None:
    stand_in.ask("fault", method="SandboxCreateV2", times=times, status="UNAVAILABLE", answer_lost=True)
    sandbox = await make().create(SPEC)
    assert [found["id"] for found in stand_in.running()] == [sandbox.id]


async def test_what_was_made_without_an_answer_is_ended_at_the_end_of_patience(make, stand_in) -> None:
    stand_in.ask("fault", method="SandboxCreateV2", times=100, status="INTERNAL", message="oops", answer_lost=True)
    stand_in.ask("fault", method="SandboxGetFromNameV2", times=8, status="UNAVAILABLE")
    provider = make(patience=2)
    with pytest.raises(SandboxError, match="create a sandbox"):
        await provider.create(SPEC)
    await provider.close()
    assert stand_in.running() == []


async def test_giving_up_while_it_is_made_leaves_nothing(make, stand_in) -> None:
    stand_in.ask("fault", method="SandboxCreateV2", latency=0.5)
    provider = make()
    creating = asyncio.create_task(provider.create(SPEC))
    await asyncio.sleep(0.3)
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    await provider.close()
    assert stand_in.running() == []


async def test_a_token_that_expires_is_said_with_the_remedy(make, stand_in) -> None:
    provider = make()
    sandbox = await provider.create(SPEC)
    stand_in.ask("refuse_tokens", message="Token ak-standin has expired")
    with pytest.raises(SandboxError, match="Token ak-standin has expired") as caught:
        await provider.create(SPEC)
    assert "modal token new" in str(caught.value)
    with pytest.raises(SandboxError, match="has expired"):
        await sandbox.close()
    stand_in.ask("refuse_tokens", message="")
    assert await provider.reap({"run": "faults"}, force=True) == 1


# --------------------------------------------------------------------------------------------------------- running


async def test_a_cut_stream_loses_and_repeats_nothing(make, stand_in) -> None:
    sandbox = await make().create(SPEC)
    stand_in.ask("fault", method="TaskExecStdioRead", times=3, cut_after=100_000)
    result = await sandbox.exec("seq 1 200000", output_limit=1 << 24)
    assert result.stdout == b"".join(b"%d\n" % n for n in range(1, 200_001))


@pytest.mark.parametrize("status", ["UNAVAILABLE", "INTERNAL", "UNAUTHENTICATED"])
@pytest.mark.parametrize("method", ["TaskExecStart", "TaskExecStdioRead", "TaskExecStdinWrite", "TaskExecWait"])
async def test_a_failing_call_does_not_fail_the_command(method: str, status: str, make, stand_in) -> None:
    sandbox = await make().create(SPEC)
    stand_in.ask("fault", method=method, status=status)
    result = await sandbox.exec("echo ran >> once; cat; exit 3", stdin=b"input")
    assert (result.exit_code, result.stdout) == (3, b"input")
    assert (await sandbox.read_file("/app/once")) == b"ran\n"


REFUSED = [
    *((method, 0.2) for method in ("TaskExecStart", "TaskExecStdioRead", "TaskExecStdinWrite", "TaskExecWait")),
    *((method, None) for method in ("TaskExecStdioRead", "TaskExecStdinWrite", "TaskExecWait")),
]


@pytest.mark.parametrize(("method", "retry_after"), REFUSED)
async def test_a_rate_limit_is_waited_out_by_a_command(method: str, retry_after: float | None, make, stand_in) -> None:
    sandbox = await make().create(SPEC)
    refusal = {"status": "RESOURCE_EXHAUSTED", "message": "slow down", "retry_after": retry_after}
    stand_in.ask("fault", method=method, times=2, **refusal)
    result = await sandbox.exec("echo ran >> once; cat; exit 3", stdin=b"input")
    assert (result.exit_code, result.stdout) == (3, b"input")
    assert (await sandbox.read_file("/app/once")) == b"ran\n"


async def test_a_command_never_runs_twice(make, stand_in) -> None:
    """The answer to its start gets lost, and the SDK's repetition, under the same number, is turned down."""
    sandbox = await make().create(SPEC)
    stand_in.ask("fault", method="TaskExecStart", status="UNAVAILABLE", answer_lost=True)
    stand_in.ask("fault", method="TaskExecStart", status="RESOURCE_EXHAUSTED", message="slow down")
    with pytest.raises(SandboxError, match="cannot start a command: slow down"):
        await sandbox.exec("echo ran >> runs; sleep 600", timeout=5)
    running = ["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -q 'sleep 60[0]'"]
    while (await sandbox.exec(running)).ok:  # noqa: ASYNC110 -- ended in the background, which tells nobody
        await asyncio.sleep(0.05)
    assert (await sandbox.exec("cat runs")).stdout in (b"ran\n", b"")


async def test_a_command_that_was_only_just_starting_when_it_was_to_be_killed_is_killed(make) -> None:
    sandbox = await make().create(SPEC)
    process = await sandbox.spawn(["sleep", "600"])
    inner, missed = process._process, []
    kill = inner._kill

    async def miss_once() -> None:
        if missed:
            await kill()
        missed.append(True)

    inner._kill = miss_once
    await inner.kill()
    async with asyncio.timeout(60):
        assert await process.wait() == 137


@pytest.mark.parametrize("when", ["while it is made", "later"])
async def test_a_start_that_is_never_answered_holds_up_nobody(when: str, make, stand_in) -> None:
    provider = make()
    sandbox = await provider.create(SPEC)
    stand_in.ask("fault", method="TaskExecStart", times=1000, latency=600.0)
    before = stand_in.ask("calls")["TaskExecStart"]
    running = asyncio.create_task(provider.create(SPEC) if when == "while it is made" else sandbox.exec("true"))
    while stand_in.ask("calls")["TaskExecStart"] == before:  # noqa: ASYNC110 -- another process's count
        await asyncio.sleep(0.05)
    running.cancel()
    await asyncio.wait({running})
    async with asyncio.timeout(60):
        await provider.close()
    assert not stand_in.running()


async def test_a_rate_limit_without_a_time_is_waited_out_by_commands_of_our_own(make, stand_in) -> None:
    sandbox = await make().create(SPEC)
    stand_in.ask("fault", method="TaskExecStart", times=2, status="RESOURCE_EXHAUSTED", message="slow down")
    await sandbox.write_file("/app/file", b"content")
    assert await sandbox.read_file("/app/file") == b"content"


@pytest.mark.parametrize("data", [b"input", b""], ids=["writing", "closing"])
async def test_a_write_that_fails_for_good_ends_the_command(data: bytes, make, stand_in) -> None:
    sandbox = await make().create(SPEC)
    assert (await sandbox.exec("cp $(command -v cat) /tmp/reader")).ok
    refusal = {"status": "PERMISSION_DENIED", "message": "no more of that"}
    stand_in.ask("fault", method="TaskExecStdinWrite", times=1000, **refusal)
    async with asyncio.timeout(60):
        with pytest.raises(SandboxError, match="cannot write to a command: no more of that"):
            await sandbox.exec("exec /tmp/reader", stdin=data)
    stand_in.ask("mend")
    assert (await sandbox.exec("grep -lsx reader /proc/[0-9]*/comm")).stdout == b""


async def test_a_command_that_never_gets_its_turn_is_an_error_in_modals_words(make, stand_in) -> None:
    sandbox = await make(patience=1).create(SPEC)
    stand_in.ask("fault", method="TaskExecStart", times=1000, status="RESOURCE_EXHAUSTED", message="slow down")
    with pytest.raises(SandboxError, match="cannot start a command: slow down") as caught:
        await sandbox.exec("true")
    assert "fewer episodes" in str(caught.value.remedy)


async def test_a_late_answer_is_waited_for(make, stand_in) -> None:
    sandbox = await make().create(SPEC)
    stand_in.ask("fault", method="TaskExec*", times=4, latency=0.3)
    assert (await sandbox.exec("echo fine")).stdout == b"fine\n"


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ("GENERIC_STATUS_FAILURE", "exit code 9"),
        ("GENERIC_STATUS_TERMINATED", "terminated"),
        ("GENERIC_STATUS_TIMEOUT", "lifetime"),
    ],
)
async def test_a_sandbox_that_dies_is_noticed_at_once(status: str, reason: str, make, stand_in) -> None:
    sandbox = await make().create(SPEC)
    running = asyncio.create_task(sandbox.exec("echo started; sleep 600"))
    died = asyncio.create_task(sandbox.died())
    await asyncio.sleep(0.3)
    assert not died.done()
    stand_in.ask("end", sandbox=sandbox.id, status=status, exitcode=9)
    async with asyncio.timeout(10):  # not only when something next asks for it
        assert reason in await died
    with pytest.raises(SandboxError):
        await running
    assert not await sandbox.alive()
    with pytest.raises(SandboxError, match=reason):
        await sandbox.exec("true")
    with pytest.raises(SandboxError, match=reason):
        await sandbox.read_file("/etc/hostname")
    await sandbox.close()


async def test_a_lifetime_is_asked_of_modal_and_ends_the_sandbox(make, stand_in) -> None:
    sandbox = await make().create(SandboxSpec(labels={"run": "faults"}, lifetime=1.0))
    assert "lifetime of 1 s is over" in await sandbox.died()


async def test_the_watch_on_a_sandbox_outlives_trouble_at_modal(make, stand_in, monkeypatch) -> None:
    monkeypatch.setattr("rl_harness_modal.sandbox._WATCH_PAUSE", 0.05)
    sandbox = await make().create(SPEC)
    stand_in.ask("fault", method="SandboxWaitV2", times=10, status="UNAVAILABLE")
    died = asyncio.create_task(sandbox.died())
    await asyncio.sleep(0.5)
    assert not died.done()
    stand_in.ask("end", sandbox=sandbox.id, status="GENERIC_STATUS_TERMINATED")
    assert "terminated" in await died


async def test_a_command_whose_machine_is_gone_without_a_trace_ends(make, stand_in, monkeypatch) -> None:
    monkeypatch.setattr("rl_harness_modal.sandbox._LOOK_SECONDS", 0.2)
    sandbox = await make().create(SPEC)
    stand_in.ask("fault", method="TaskExecWait", times=1000, status="UNAVAILABLE", message="no such host")
    running = asyncio.create_task(sandbox.exec("sleep 600"))
    await asyncio.sleep(0.5)
    assert not running.done()
    stand_in.ask("end", sandbox=sandbox.id, status="GENERIC_STATUS_INTERNAL_FAILURE", exitcode=1)
    with pytest.raises(SandboxError, match="ended by itself with exit code 1"):
        await running


@pytest.mark.parametrize("method", ["TaskExecStart", "TaskExecStdioRead", "TaskExecWait", "TaskSnapshotFilesystem"])
async def test_an_empty_answer_is_an_error_of_the_sandbox(make, stand_in, method: str, tmp_path: Path) -> None:
    sandbox = await make(patience=0.1).create(SPEC)
    for operation in (
        sandbox.exec("echo hi", timeout=1),
        sandbox.exec("sleep 100", timeout=1),
        sandbox.download("/etc/hostname", tmp_path / "out"),
        sandbox.snapshot(key="k"),
        sandbox.alive(),
    ):
        stand_in.ask("fault", method=method, times=1, empty=True)
        with contextlib.suppress(SandboxError):
            await operation
        stand_in.ask("mend")
    assert (await sandbox.exec("echo fine")).stdout == b"fine\n"


async def test_empty_answers_make_no_sandbox_and_leave_none(make, stand_in) -> None:
    provider = make(patience=0.1)
    await provider.preflight()
    for method in ("ImageGetOrCreate", "SandboxCreateV2", "TaskExecStdioRead", "TaskExecStart"):
        stand_in.ask("fault", method=method, times=1, empty=True)
        with contextlib.suppress(SandboxError):
            await (await provider.create(SPEC)).close()
        stand_in.ask("mend")
    await provider.close()
    assert stand_in.running() == []
