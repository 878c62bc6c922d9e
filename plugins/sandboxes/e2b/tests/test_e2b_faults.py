"""What goes wrong at E2B: each fault on demand, and what the harness makes of it."""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from rl_harness.contracts.sandbox import SandboxSpec
from rl_harness.errors import SandboxError, Unavailable
from rl_harness_e2b import provider as provider_module
from rl_harness_e2b.provider import E2BProvider

pytestmark = pytest.mark.needs("userns", "e2b")

SPEC = SandboxSpec(labels={"run": "faults"})
CREATE = "POST /v2/sandboxes"
START = "POST /process.Process/Start"


@pytest.fixture
async def make(stand_in) -> AsyncIterator[Callable[..., E2BProvider]]:
    """Makes providers with options."""
    made: list[E2BProvider] = []

    def make(**options: object) -> E2BProvider:
        made.append(E2BProvider(E2BProvider.Options(**{"patience": 20, **options})))
        return made[-1]

    yield make
    stand_in.ask("refuse_keys", message="")
    for provider in made:
        await provider.close()


# ------------------------------------------------------------------------------------------------------- preflight


async def test_preflight_passes(make) -> None:
    await make().preflight()


async def test_without_a_key_the_remedy_is_named(make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("E2B_API_KEY")
    with pytest.raises(Unavailable, match="E2B_API_KEY is not set") as caught:
        await make().preflight()
    assert "dashboard" in str(caught.value.remedy)


async def test_what_makes_the_sdk_do_nothing_is_refused(make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_DEBUG", "true")
    with pytest.raises(Unavailable, match="E2B_DEBUG"):
        await make().preflight()


async def test_without_the_sdk_the_remedy_is_named(make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match="SDK") as caught:
        await make().preflight()
    assert caught.value.remedy == "pip install rl-harness-e2b"


async def test_a_refused_key_is_said_in_e2bs_words(make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_API_KEY", "e2b_wrong")
    with pytest.raises(Unavailable, match=r"refuses the API key: .*Invalid API key") as caught:
        await make().preflight()
    assert "E2B_API_KEY" in str(caught.value.remedy)


@pytest.mark.parametrize("listens", [False, True], ids=["refused", "silent"])
async def test_preflight_does_not_hang_on_a_server_out_of_reach(
    listens: bool, make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider_module, "_PREFLIGHT_SECONDS", 1.0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        if listens:
            taken.listen()
        monkeypatch.setenv("E2B_API_URL", f"http://127.0.0.1:{taken.getsockname()[1]}")
        started = time.monotonic()
        with pytest.raises(Unavailable, match=r"did not answer|cannot be reached") as caught:
            await make().preflight()
        assert "status.e2b.dev" in str(caught.value.remedy)
        assert time.monotonic() - started < 10


async def test_the_sdks_connections_go_with_the_last_provider_that_uses_them(make, stand_in) -> None:
    from e2b.api import client_async

    first, second = make(), make()
    sandbox = await first.create(SPEC)
    await second.preflight()
    await second.close()
    assert client_async._pools
    assert (await sandbox.exec("echo fine")).stdout == b"fine\n"
    await first.close()
    assert client_async._pools == client_async._transports == client_async._httpx_transports == {}
    await make().preflight()  # and come again when they are needed


async def test_closing_waits_for_threads_of_the_sdk_that_are_in_python(make, stand_in) -> None:
    """One that is there when the interpreter ends aborts the process. Such threads are not of Python's making."""
    provider = make()
    await provider.preflight()
    leave, left = threading.Event(), threading.Event()

    def foreign() -> None:
        leave.wait(60)
        left.set()

    _thread.start_new_thread(foreign, ())
    closing = asyncio.create_task(provider.close())
    await asyncio.wait({closing}, timeout=0.3)
    assert not closing.done()
    leave.set()
    await closing
    assert left.is_set()


# ---------------------------------------------------------------------------------------------------------- making


async def test_a_rate_limit_is_waited_out_for_as_long_as_e2b_asks(make, stand_in) -> None:
    stand_in.ask("fault", request=CREATE, status=429, message="slow down", retry_after=1)
    started = time.monotonic()
    sandbox = await make().create(SPEC)
    assert time.monotonic() - started >= 1
    assert (await sandbox.exec("echo fine")).stdout == b"fine\n"


async def test_a_rate_limit_without_a_time_is_retried_with_growing_pauses(make, stand_in) -> None:
    stand_in.ask("fault", request=CREATE, times=4, status=429, message="too many requests")
    await make().create(SPEC)
    assert stand_in.ask("calls")[CREATE] == 5


@pytest.mark.parametrize("retry_after", [None, 60])
async def test_patience_ends_with_e2bs_own_words(retry_after: int | None, make, stand_in) -> None:
    stand_in.ask(
        "fault", request=CREATE, times=1000, status=429, message="team rate limit exceeded", retry_after=retry_after
    )
    started = time.monotonic()
    with pytest.raises(SandboxError, match="team rate limit exceeded") as caught:
        await make(patience=1).create(SPEC)
    assert "fewer episodes" in str(caught.value.remedy)
    assert time.monotonic() - started < 10


async def test_a_reached_quota_is_said_and_the_other_sandbox_lives(make, stand_in) -> None:
    stand_in.ask("quota", sandboxes=1)
    provider = make(patience=1)
    sandbox = await provider.create(SPEC)
    with pytest.raises(SandboxError, match=r"maximum number of concurrent E2B sandboxes \(1\)") as caught:
        await provider.create(SPEC)
    assert "fewer episodes" in str(caught.value.remedy)
    assert (await sandbox.exec("echo fine")).stdout == b"fine\n"


async def test_a_quota_that_frees_up_is_waited_for(make, stand_in) -> None:
    stand_in.ask("quota", sandboxes=1)
    provider = make()
    first = await provider.create(SPEC)
    second = asyncio.create_task(provider.create(SPEC))
    await asyncio.sleep(0.3)
    await first.close()
    assert (await (await second).exec("echo fine")).stdout == b"fine\n"


@pytest.mark.parametrize("status", [500, 502, 503, 504])
async def test_a_service_in_trouble_is_asked_again(status: int, make, stand_in) -> None:
    stand_in.ask("fault", request=CREATE, times=2, status=status, message="try later")
    await make().create(SPEC)
    assert stand_in.ask("calls")[CREATE] == 3


async def test_a_request_that_can_never_succeed_is_not_repeated(make, stand_in) -> None:
    stand_in.ask("fault", request=CREATE, times=10, status=400, message="Timeout cannot be greater than 1 hours")
    with pytest.raises(SandboxError, match="Timeout cannot be greater than 1 hours"):
        await make().create(SPEC)
    assert stand_in.ask("calls")[CREATE] == 1


async def test_a_lost_answer_makes_no_second_sandbox(make, stand_in) -> None:
    stand_in.ask("fault", request=CREATE, times=2, answer_lost=True)
    sandbox = await make().create(SPEC)
    assert [found["id"] for found in stand_in.running()] == [sandbox.id]


async def test_what_was_made_without_an_answer_is_ended_at_the_end_of_patience(make, stand_in) -> None:
    stand_in.ask("fault", request=CREATE, times=100, answer_lost=True)
    with pytest.raises(SandboxError, match="create a sandbox"):
        await make(patience=1).create(SPEC)
    assert stand_in.running() == []


async def test_giving_up_while_it_is_made_leaves_nothing(make, stand_in) -> None:
    stand_in.ask("fault", request=CREATE, latency=0.5)
    provider = make()
    await provider.preflight()
    creating = asyncio.create_task(provider.create(SPEC))
    await asyncio.sleep(0.2)
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    await provider.close()
    assert stand_in.running() == []


async def test_a_key_that_expires_is_said_with_the_remedy(make, stand_in) -> None:
    provider = make()
    sandbox = await provider.create(SPEC)
    stand_in.ask("refuse_keys", message="API key expired")
    with pytest.raises(SandboxError, match="API key expired") as caught:
        await provider.create(SPEC)
    assert "E2B_API_KEY" in str(caught.value.remedy)
    with pytest.raises(SandboxError, match="API key expired"):
        await sandbox.close()
    stand_in.ask("refuse_keys", message="")
    assert await provider.reap({"run": "faults"}, force=True) == 1


async def test_a_fork_whose_answer_is_lost_leaves_nothing(make, stand_in) -> None:
    sandbox = await make().create(SPEC)
    stand_in.ask("fault", request="POST /sandboxes/*/fork", answer_lost=True)
    with pytest.raises(SandboxError, match="fork sandbox"):
        await sandbox.fork(3)
    assert [found["id"] for found in stand_in.running()] == [sandbox.id]
    assert (await sandbox.exec("echo fine")).stdout == b"fine\n"


async def test_one_fork_that_fails_ends_the_others(make, stand_in) -> None:
    stand_in.ask("quota", sandboxes=3)
    sandbox = await make(patience=1).create(SPEC)
    with pytest.raises(SandboxError, match="maximum number"):
        await sandbox.fork(3)
    assert [found["id"] for found in stand_in.running()] == [sandbox.id]
    assert len(await sandbox.fork(2)) == 2


async def test_a_node_that_is_busy_is_asked_again_to_fork_and_to_freeze(make, stand_in) -> None:
    provider = make()
    sandbox = await provider.create(SPEC)
    stand_in.ask("fault", request="POST /sandboxes/*/fork", times=2, status=503, message="its node is busy")
    stand_in.ask("fault", request="POST /sandboxes/*/snapshots", times=2, status=503, message="its node is busy")
    assert len(await sandbox.fork(1)) == 1
    await provider.delete_snapshot(await sandbox.snapshot())


# --------------------------------------------------------------------------------------------------------- running


async def test_a_cut_stream_is_an_error_and_ends_the_command(make, stand_in) -> None:
    """E2B does not keep output for whoever comes back: a result with a hole in it is none."""
    sandbox = await make().create(SPEC)
    stand_in.ask("fault", request=START, cut_after=100_000)
    with pytest.raises(SandboxError, match="read the output of a command"):
        await sandbox.exec('echo "$$" > pid; seq 1 200000; sleep 600', output_limit=1 << 24)
    assert not (await sandbox.exec('kill -0 "$(cat pid)"')).ok


async def test_a_stream_that_falls_silent_is_an_error(make, stand_in, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_harness_e2b import process

    monkeypatch.setattr(process, "_SILENT_SECONDS", 0.5)
    sandbox = await make().create(SPEC)
    with pytest.raises(SandboxError, match=r"nothing was heard for 0\.5 s"):
        await sandbox.exec("sleep 600")


async def test_a_command_that_cannot_be_started_is_an_error(make, stand_in) -> None:
    sandbox = await make().create(SPEC)
    before = stand_in.ask("calls")[START]
    stand_in.ask("fault", request=START, status=503, message="out of order")
    with pytest.raises(SandboxError, match="start a command: out of order"):
        await sandbox.exec("true")
    assert stand_in.ask("calls")[START] == before + 1, "nobody knows whether the first one runs"


@pytest.mark.parametrize("request_", ["Start", "SendInput", "CloseStdin"])
async def test_a_rate_limit_is_waited_out_by_a_command(request_: str, make, stand_in) -> None:
    sandbox = await make().create(SPEC)
    stand_in.ask("fault", request=f"POST /process.Process/{request_}", times=2, status=429, message="slow down")
    result = await sandbox.exec("echo ran >> once; cat; exit 3", stdin=b"input")
    assert (result.exit_code, result.stdout) == (3, b"input")
    assert (await sandbox.read_file("/app/once")) == b"ran\n"


async def test_a_command_waits_for_as_long_as_e2b_asks(make, stand_in) -> None:
    sandbox = await make().create(SPEC)
    stand_in.ask("fault", request=START, status=429, message="slow down", retry_after=1)
    started = time.monotonic()
    assert (await sandbox.exec("echo fine")).stdout == b"fine\n"
    assert time.monotonic() - started >= 1


@pytest.mark.parametrize("retry_after", [None, 60])
async def test_a_command_that_never_gets_its_turn_is_an_error_in_e2bs_words(
    retry_after: int | None, make, stand_in
) -> None:
    sandbox = await make(patience=1).create(SPEC)
    stand_in.ask("fault", request=START, times=1000, status=429, message="too many", retry_after=retry_after)
    with pytest.raises(SandboxError, match="start a command: too many") as caught:
        await sandbox.exec("true")
    assert "fewer episodes" in str(caught.value.remedy)


async def test_a_late_answer_is_waited_for(make, stand_in) -> None:
    sandbox = await make().create(SPEC)
    stand_in.ask("fault", request="POST /process.Process/*", times=4, latency=0.3)
    assert (await sandbox.exec("cat", stdin=b"fine")).stdout == b"fine"


async def test_a_sandbox_that_dies_is_noticed_at_once(make, stand_in) -> None:
    sandbox = await make().create(SPEC)
    running = asyncio.create_task(sandbox.exec("echo started; sleep 600"))
    died = asyncio.create_task(sandbox.died())
    await asyncio.sleep(0.3)
    assert not died.done()
    stand_in.ask("end", sandbox=sandbox.id)
    async with asyncio.timeout(10):  # not only when something next asks for it
        assert "not found" in await died
    with pytest.raises(SandboxError, match="not found"):
        await running
    assert not await sandbox.alive()
    with pytest.raises(SandboxError, match=f"sandbox {sandbox.id} ended"):
        await sandbox.exec("true")
    with pytest.raises(SandboxError, match="ended"):
        await sandbox.read_file("/etc/hostname")
    await sandbox.close()


async def test_streams_that_break_do_not_make_a_sandbox_dead(make, stand_in) -> None:
    sandbox = await make().create(SPEC)
    died = asyncio.create_task(sandbox.died())
    await asyncio.sleep(0.2)
    stand_in.ask("fault", request="GET /sandboxes/*", times=2, status=500, message="oops")
    stand_in.ask("interrupt", sandbox=sandbox.id)
    await asyncio.sleep(0.3)
    assert not died.done()
    assert (await sandbox.exec("echo fine")).stdout == b"fine\n"
    stand_in.ask("end", sandbox=sandbox.id)
    assert "not found" in await died


async def test_a_lifetime_is_asked_of_e2b_and_ends_the_sandbox(make, stand_in) -> None:
    sandbox = await make().create(SandboxSpec(labels={"run": "faults"}, lifetime=1.0))
    assert "lifetime of 1 s is over" in await sandbox.died()


async def test_a_command_that_was_given_up_on_takes_no_later_one_along(make, stand_in) -> None:
    """Its end in the background meets the end of everything, as when an agent is done at once."""
    sandbox = await make().create(SPEC)
    for turn in range(8):
        starting = asyncio.create_task(sandbox.exec("sleep 600"))
        await asyncio.sleep(0.01 * turn)
        starting.cancel()
        await asyncio.wait([starting])
        await sandbox.kill_processes()
        assert (await sandbox.exec("sleep 0.2; echo fine")).stdout == b"fine\n"


# ------------------------------------------------------------------------------------------------- nonsense of E2B's

NONSENSE = {
    "object": "{}",
    "null": "null",
    "list": "[]",
    "text": '"x"',
    "nulls": "[null]",
    "objects": "[{}]",
    "page": "<html>oops</html>",
    "deep": "[" * 100_000,
    "types": '{"sandboxID": 1, "templateID": [], "clientID": {}, "envdVersion": "x.y", "state": "zzz", '
    '"startedAt": "never", "endAt": 5, "cpuCount": "a", "memoryMB": null, "metadata": 7}',
}


@pytest.mark.parametrize("body", NONSENSE.values(), ids=NONSENSE)
async def test_an_answer_that_makes_no_sense_is_an_error_and_leaves_nothing(make, stand_in, body: str) -> None:
    async def asked(request: str, operation: Any, status: int = 200) -> None:
        stand_in.ask("fault", request=request, times=1000, status=status, body=body)
        with contextlib.suppress(SandboxError, Unavailable):
            await operation
        stand_in.ask("mend")

    await asked("GET /v2/sandboxes", make(patience=0.1).preflight())
    provider = make(patience=0.1)
    await asked(CREATE, provider.create(SPEC), 201)
    assert stand_in.running() == []
    sandbox = await provider.create(SPEC)
    await asked("GET /sandboxes/*", sandbox.alive())
    asking = f"GET /sandboxes/{sandbox.id}"
    before = stand_in.ask("calls")[asking]
    stand_in.ask("fault", request="GET /sandboxes/*", times=1000, body=body)
    died = asyncio.create_task(sandbox.died())
    while stand_in.ask("calls")[asking] == before:
        stand_in.ask("interrupt", sandbox=sandbox.id)
        await asyncio.sleep(0.01)
    stand_in.ask("mend")
    assert (await sandbox.exec("echo fine")).stdout == b"fine\n"
    assert not died.done()
    died.cancel()
    await asked("POST /sandboxes/*/snapshots", sandbox.snapshot(key="k"), 201)
    await asked("POST /sandboxes/*/fork", sandbox.fork(1), 201)
    await asked("GET /v2/sandboxes", provider.list())
    await asked("GET /snapshots", provider.snapshots())
    assert (await sandbox.exec("echo fine")).stdout == b"fine\n"
    assert [one["id"] for one in stand_in.running()] == [sandbox.id]
