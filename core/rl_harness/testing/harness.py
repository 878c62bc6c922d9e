"""Conformance checks for harnesses: the core's own pass them, and a plugin's tests run the same.

A plugin describes its harness once, as a :class:`HarnessKit`, and runs every check that applies to it::

    KIT = HarnessKit(create=lambda: MyHarness(MyHarness.Options()), script=["the answer is 4"], answer="4")

    @pytest.mark.parametrize("check", harness_checks(KIT), ids=lambda check: check.__name__)
    async def test_conforms(check):
        await check(KIT)

The model is a real chat-completions server on loopback. A check fails with ``AssertionError`` and a sentence.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from rl_harness.contracts.common import API, Options
from rl_harness.contracts.harness import AgentTask, Endpoint, Harness, HarnessContext, HarnessResult
from rl_harness.contracts.sandbox import ExecResult, Sandbox, SetupStep
from rl_harness.errors import EngineError, SandboxError
from rl_harness.records.episode import Termination
from rl_harness.testing.chat_server import Script, ScriptedChat, ScriptedReply

_INSTRUCTION = "Say how much two and two is."
#: What one event may add to a run's database.
_EVENT_BYTES = 64 * 1024
#: No check needs this long; a harness that takes longer hangs.
_HANG = 60.0


class HarnessKit(msgspec.Struct, frozen=True, kw_only=True):
    """A harness and what the checks need to know about it.

    ``create`` makes a new instance. ``script`` is what the model replies so that the agent ends by itself, and
    ``answer`` the answer it then gives (None: it is not compared). ``sandbox`` opens a fresh sandbox, for a harness
    that needs one; ``acts`` is a script whose first reply makes the agent run a command in it. ``solution`` is a
    solution directory, for a harness that needs one.
    """

    create: Callable[[], Harness]
    script: Script = ()
    answer: str | None = None
    sandbox: Callable[[], AbstractAsyncContextManager[Sandbox]] | None = None
    acts: Script = ()
    solution: Path | None = None


Check = Callable[[HarnessKit], Awaitable[None]]


def harness_checks(kit: HarnessKit) -> list[Check]:
    """The checks that apply, by what the harness says it is capable of."""
    capabilities = kit.create().capabilities
    checks: list[Check] = [check_declaration, check_preflight, check_ends_by_itself, check_concurrent_runs]
    if capabilities.protocols:
        checks += [
            check_model_calls,
            check_engine_failure,
            check_turn_limit,
            check_deadline,
            check_cancellation,
        ]
    if kit.acts:
        checks.append(check_dead_sandbox)
    return checks


async def check_declaration(kit: HarnessKit) -> None:
    """It states the contract's version, an options model with documented options, and what it needs."""
    harness = kit.create()
    assert harness.api == API, f"api is {harness.api!r}; this core accepts {API}"
    assert issubclass(harness.Options, Options), "Options is not a subclass of rl_harness.contracts.Options"
    undocumented = [name for name, field in harness.Options.model_fields.items() if not field.description]
    assert not undocumented, f"options without a description: {', '.join(undocumented)}"
    if harness.capabilities.needs_sandbox:
        assert kit.sandbox is not None, "the harness needs a sandbox, and the kit has none"
    if harness.capabilities.needs_solution:
        assert kit.solution is not None, "the harness needs a solution, and the kit has none"
    steps = harness.setup
    assert isinstance(steps, tuple), f"setup is {steps!r}, not a tuple"
    assert all(isinstance(step, SetupStep) for step in steps), f"setup is {steps!r}, not all of it SetupStep"
    assert kit.create().setup == steps, (
        "setup differs between two instances with the same options: nothing is prepared once"
    )


async def check_preflight(kit: HarnessKit) -> None:
    """``preflight``, ``start`` and ``close`` work without an episode."""
    harness = kit.create()
    await harness.preflight()
    await harness.start()
    await harness.close()


async def check_ends_by_itself(kit: HarnessKit) -> None:
    """The agent ends with ``answer``, and its events are small and serialisable."""
    async with _run(kit, kit.script) as attempt:
        result = await attempt.task
    assert result.termination == Termination.ANSWER, f"it ended with {result.termination}: {result.detail}"
    assert kit.answer is None or result.answer == kit.answer, f"it answered {result.answer!r}"
    for kind, data in attempt.events:
        size = len(msgspec.json.encode({"kind": kind, "data": data}))
        assert size <= _EVENT_BYTES, f"event {kind!r} is of {size} bytes, more than {_EVENT_BYTES}"


async def check_concurrent_runs(kit: HarnessKit) -> None:
    """One instance attempts several tasks at once, each with its own model and sandbox."""
    harness = kit.create()
    await harness.start()
    try:
        results = await asyncio.gather(*(_result(kit, harness) for _ in range(4)))
    finally:
        await harness.close()
    ends = [result.termination for result in results]
    assert ends == [Termination.ANSWER] * 4, f"four attempts at once ended with {', '.join(ends)}"


async def check_model_calls(kit: HarnessKit) -> None:
    """Every call goes to the endpoint with the session's key and model, and the instruction reaches the model."""
    async with _run(kit, kit.script) as attempt:
        await attempt.task
    chat = attempt.chat
    assert chat.requests, "the agent never called its model"
    assert chat.refused == 0, f"{chat.refused} calls came without the session's key"
    models = {request.get("model") for request in chat.requests}
    assert models == {chat.endpoint.model}, f"it asked for models {models}, not for {chat.endpoint.model!r}"
    said = msgspec.json.encode(chat.requests[0]["messages"]).decode()
    assert _INSTRUCTION in said, "the first call does not contain the task's instruction"


async def check_engine_failure(kit: HarnessKit) -> None:
    """A failing engine is never taken for the agent's answer."""
    async with _run(kit, lambda body: ScriptedReply(status=500, error="server_error")) as attempt:
        try:
            result = await attempt.task
        except EngineError:
            return
    assert result.termination != Termination.ANSWER, "it took a failure of the engine for an answer"


async def check_turn_limit(kit: HarnessKit) -> None:
    """A session that allows no further turn ends the agent with ``turn_limit``."""
    async with _run(kit, lambda body: ScriptedReply(status=403, error="turn_limit")) as attempt:
        result = await attempt.task
    assert result.termination == Termination.TURN_LIMIT, f"it ended with {result.termination}: {result.detail}"


async def check_deadline(kit: HarnessKit) -> None:
    """At its deadline the agent is stopped, with ``time_limit``, although the model has not answered."""
    async with _run(kit, lambda body: ScriptedReply(text="late", delay=_HANG), seconds=1.0) as attempt:
        result = await attempt.task
        assert result.termination == Termination.TIME_LIMIT, f"it ended with {result.termination}: {result.detail}"
        await _until(lambda: attempt.chat.abandoned == len(attempt.chat.requests), "it left a model call behind")


async def check_cancellation(kit: HarnessKit) -> None:
    """Cancelled in a model call, it ends at once and drops the call."""
    async with _run(kit, lambda body: ScriptedReply(text="late", delay=_HANG)) as attempt:
        await _until(lambda: bool(attempt.chat.requests), "the agent never called its model")
        attempt.task.cancel()
        await asyncio.wait([attempt.task], timeout=_HANG / 2)
        assert attempt.task.cancelled(), "a cancelled run did not raise CancelledError"
        await _until(lambda: attempt.chat.abandoned == len(attempt.chat.requests), "it left a model call behind")


async def check_dead_sandbox(kit: HarnessKit) -> None:
    """A sandbox that died ends the attempt with ``SandboxError``; it is not the agent's failure."""
    async with _run(kit, kit.acts, broken_sandbox=True) as attempt:
        try:
            result = await attempt.task
        except SandboxError:
            return
    raise AssertionError(f"the sandbox died, and the harness returned {result.termination}: {result.detail}")


class _Attempt:
    """A run of the harness in progress, and what can be seen of it from outside."""

    def __init__(self, chat: ScriptedChat, task: asyncio.Task[HarnessResult], events: list[tuple[str, Any]]) -> None:
        self.chat = chat
        self.task = task
        self.events = events


@asynccontextmanager
async def _run(
    kit: HarnessKit,
    script: Script,
    *,
    harness: Harness | None = None,
    seconds: float = _HANG,
    broken_sandbox: bool = False,
) -> AsyncIterator[_Attempt]:
    subject = harness if harness is not None else kit.create()
    events: list[tuple[str, Any]] = []
    async with ScriptedChat(script) as chat, _sandbox(kit) as sandbox:
        if broken_sandbox and sandbox is not None:
            _break(sandbox)
        context = _context(kit, chat.endpoint if subject.capabilities.protocols else None, sandbox, seconds, events)
        if harness is None:
            await subject.start()
        task = asyncio.create_task(subject.run(context))
        try:
            yield _Attempt(chat, task, events)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if harness is None:
                await subject.close()


async def _result(kit: HarnessKit, harness: Harness) -> HarnessResult:
    async with _run(kit, kit.script, harness=harness) as attempt:
        return await attempt.task


@asynccontextmanager
async def _sandbox(kit: HarnessKit) -> AsyncIterator[Sandbox | None]:
    if kit.sandbox is None:
        yield None
        return
    async with kit.sandbox() as sandbox:
        yield sandbox


def _break(sandbox: Sandbox) -> None:
    """From here on every operation of the sandbox but ``close`` fails as it does once the machine has died."""

    async def dead(*arguments: Any, **options: Any) -> ExecResult:
        raise SandboxError("the sandbox is gone")

    async def not_alive() -> bool:
        return False

    for name, _ in inspect.getmembers(Sandbox, inspect.iscoroutinefunction):
        if name not in ("close", "alive"):
            setattr(sandbox, name, dead)
    sandbox.alive = not_alive  # type: ignore[method-assign]  # this one sandbox is to look dead


def _context(
    kit: HarnessKit,
    endpoint: Endpoint | None,
    sandbox: Sandbox | None,
    seconds: float,
    events: list[tuple[str, Any]],
) -> HarnessContext:
    def on_event(kind: str, data: Mapping[str, Any]) -> None:
        events.append((kind, dict(data)))

    return HarnessContext(
        task=AgentTask(name="conformance", instruction=_INSTRUCTION, time_limit=seconds),
        sandbox=sandbox,
        endpoint=endpoint,
        deadline=time.monotonic() + seconds,
        solution=kit.solution,
        on_event=on_event,
    )


async def _until(condition: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + _HANG / 2
    while not condition():
        assert time.monotonic() < deadline, otherwise
        await asyncio.sleep(0.01)
