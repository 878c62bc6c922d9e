"""One attempt at one task: session, sandbox, agent, verifier, record. Knows nothing of training.

Whatever an agent, a task or a machine does, :meth:`EpisodeRunner.attempt` returns an :class:`Episode`: scored, or
unscored with its reason. Only cancellation passes through, and then nothing is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from rl_harness.contracts import (
    DEFAULT_MAX_TURNS,
    AgentTask,
    Endpoint,
    Harness,
    HarnessContext,
    HarnessResult,
    Prompts,
    Sandbox,
    SandboxSource,
    SandboxSpec,
)
from rl_harness.errors import (
    EngineError,
    HarnessError,
    RlHarnessError,
    SandboxError,
    TaskError,
    UnsafeFiles,
    Unsupported,
)
from rl_harness.excerpts import excerpt
from rl_harness.gateway import Gateway, Session
from rl_harness.records import (
    Episode,
    EpisodeKey,
    Event,
    SamplingParams,
    TaskRef,
    Termination,
    Turn,
    UnscoredReason,
    Usage,
)
from rl_harness.records.episode import WAITING
from rl_harness.redaction import Secrets
from rl_harness.sandboxes.flights import finished
from rl_harness.sandboxes.resident import agents_view
from rl_harness.tasks import Task, Verdict, verify

_log = logging.getLogger(__name__)

#: Of one agent; what its verifier printed is kept besides.
MAX_EVENTS = 200
#: Characters of what an episode says about its end.
MAX_DETAIL = 2000
#: An agent that ignores its deadline is cancelled this long after it, so that it may end by itself first.
GRACE_SECONDS = 2.0


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """What to attempt: a planned key, its task, and how the model is sampled for it."""

    key: EpisodeKey
    task: Task
    split: str
    sampling: SamplingParams
    number: int = 1


class EpisodeRunner:
    """Runs attempts with one harness, one source of sandboxes and one gateway. Safe for concurrent attempts."""

    def __init__(
        self,
        *,
        harness: Harness,
        provider: SandboxSource | None,
        gateway: Gateway | None,
        policy: str,
        benchmark: str,
        prompts: Prompts,
        labels: Mapping[str, str],
        max_turns: int | None = None,
        agent_timeout: float | None = None,
        http: Any = None,
    ) -> None:
        self.harness = harness
        self.provider = provider
        self.gateway = gateway
        self.policy = policy
        self.benchmark = benchmark
        self.prompts = prompts
        self.labels = dict(labels)
        self.max_turns = max_turns
        self.agent_timeout = agent_timeout
        self.http = http

    async def attempt(self, attempt: Attempt) -> tuple[Episode, list[Turn]]:
        """Run one attempt to its recorded end. Raises only :class:`asyncio.CancelledError`."""
        record = _Record(attempt, self.benchmark, self.gateway.secrets if self.gateway else Secrets.of_environment())
        try:
            async with self._sandbox(attempt.task, record) as sandbox:
                async with (
                    self._session(attempt, record) as endpoint,
                    self._view(sandbox, endpoint, record) as (agents_sandbox, agents_endpoint),
                ):
                    await self._agent(attempt, agents_sandbox, agents_endpoint, record)
                await self._verify(attempt.task, sandbox, record)
        except (SandboxError, TaskError, Unsupported) as error:
            record.unscored(UnscoredReason.SANDBOX_ERROR, str(error), Termination.SANDBOX_ERROR)
        except EngineError as error:
            record.unscored(UnscoredReason.ENGINE_ERROR, str(error), Termination.ENGINE_ERROR)
        except HarnessError as error:
            record.unscored(UnscoredReason.HARNESS_ERROR, str(error), Termination.HARNESS_ERROR)
        except Exception as error:
            # A plugin's mistake, or one of ours: this attempt is lost, the others go on.
            _log.exception("an attempt at %s", attempt.task.name)
            detail = f"{type(error).__name__}: {error}"
            if record.phase in ("sandbox", "teardown", "verify"):
                record.unscored(UnscoredReason.SANDBOX_ERROR, detail, Termination.SANDBOX_ERROR)
            else:
                record.unscored(UnscoredReason.HARNESS_ERROR, detail, Termination.HARNESS_ERROR)
        return record.episode(), record.turns

    def sandbox_specs(self, task: Task) -> list[SandboxSpec]:
        """What an attempt at ``task`` will ask its source of sandboxes for, one after the other."""
        agent = self._agent_spec(task)
        specs = [agent] if agent is not None else []
        if self.provider is not None and task.needs_sandbox and task.verifier.mode == "separate":
            specs.append(task.verifier_spec(self.labels, isolated=self.provider.capabilities.isolated))
        return specs

    def _agent_spec(self, task: Task) -> SandboxSpec | None:
        if self.provider is None or not (task.needs_sandbox or self.harness.capabilities.needs_sandbox):
            return None
        return task.sandbox_spec(
            self.labels,
            isolated=self.provider.capabilities.isolated,
            agent_timeout=self._time_limit(task),
            setup=self.harness.setup,
            mounts=self.harness.mounts,
        )

    @contextlib.asynccontextmanager
    async def _sandbox(self, task: Task, record: _Record) -> AsyncIterator[Sandbox | None]:
        spec = self._agent_spec(task)
        if self.provider is None or spec is None:
            yield None
            return
        if not self.provider.capabilities.isolated:
            record.flags.append("unisolated")
        with record.timed("sandbox"):
            labels = {**self.labels, "episode": record.id}
            sandbox = await _created(self.provider, msgspec.structs.replace(spec, labels=labels))
        try:
            yield sandbox
        finally:
            with record.timed("teardown"):
                await asyncio.shield(sandbox.close())

    @contextlib.asynccontextmanager
    async def _session(self, attempt: Attempt, record: _Record) -> AsyncIterator[Endpoint | None]:
        """A session at the gateway for the time the agent runs; its turns end up in ``record``."""
        if self.gateway is None or not self.harness.capabilities.protocols:
            yield None
            return
        session = self.gateway.open_session(
            record.id,
            policy=self.policy,
            sampling=attempt.sampling,
            max_turns=self._max_turns(attempt.task),
            cache_key=attempt.key.group(),
        )
        record.session = session
        try:
            yield Endpoint(
                base_url=self.gateway.base_url,
                api_key=session.api_key,
                model=self.policy,
                keyless_url=self.gateway.root_url + session.secret_path,
            )
        finally:
            record.turns = await asyncio.shield(self.gateway.close_session(record.id))
            record.seconds[WAITING] = session.seconds

    @contextlib.asynccontextmanager
    async def _view(
        self, sandbox: Sandbox | None, endpoint: Endpoint | None, record: _Record
    ) -> AsyncIterator[tuple[Sandbox | None, Endpoint | None]]:
        """Sandbox and endpoint as the agent gets them: commands through a helper inside where the provider's own are
        slow, the model at an address inside for an agent that runs there. The verifier gets neither."""
        slow = self.provider is not None and self.provider.capabilities.slow_exec
        inside = self.harness.capabilities.inside and endpoint is not None
        if sandbox is None or not (slow or inside):
            yield sandbox, endpoint
            return
        target = self.gateway.inference_protocol if self.gateway is not None and inside else None
        async with contextlib.AsyncExitStack() as stack:
            with record.timed("sandbox"):
                view = await stack.enter_async_context(agents_view(sandbox, commands=slow, target=target))
            if endpoint is not None and view.url is not None:
                keyless = view.url + urlsplit(endpoint.keyless_url).path
                endpoint = msgspec.structs.replace(endpoint, base_url=f"{view.url}/v1", keyless_url=keyless)
            yield view.sandbox, endpoint
            if view.lost is not None:
                record.event("helper_lost", {"reason": view.lost})

    async def _agent(
        self, attempt: Attempt, sandbox: Sandbox | None, endpoint: Endpoint | None, record: _Record
    ) -> None:
        task = attempt.task
        limit = self._time_limit(task)
        context = HarnessContext(
            task=AgentTask(
                name=task.name,
                instruction=task.instruction,
                workdir=task.environment.workdir,
                system=self.prompts.system,
                examples=self.prompts.examples,
                max_turns=self._max_turns(task),
                time_limit=limit,
            ),
            sandbox=sandbox,
            endpoint=endpoint,
            deadline=time.monotonic() + limit,
            solution=task.solution if self.harness.capabilities.needs_solution else None,
            solution_env=task.solution_env if self.harness.capabilities.needs_solution else {},
            on_event=record.event,
            http=self.http,
        )
        with record.timed("agent"):
            try:
                async with asyncio.timeout(limit + GRACE_SECONDS):
                    result = await _while_alive(self.harness.run(context), sandbox)
            except TimeoutError:
                result = HarnessResult(termination=Termination.TIME_LIMIT, detail=f"stopped after {limit:g} s")
            except (SandboxError, EngineError, HarnessError) as error:
                if not isinstance(error, UnsafeFiles):
                    raise
                # Its own doing, such as a sandbox without a shell: graded by what it left.
                result = HarnessResult(termination=Termination.AGENT_ERROR, detail=str(error))
            except Exception as error:
                detail = f"{type(error).__name__}: {error}"
                result = HarnessResult(termination=Termination.AGENT_ERROR, detail=detail)
        record.result = _seen_from_the_gateway(result, record.session, self.harness.capabilities.inside)

    async def _verify(self, task: Task, sandbox: Sandbox | None, record: _Record) -> None:
        with record.timed("verify"):
            record.verdict = await verify(
                task, sandbox, self.provider, record.result.answer if record.result else None, self.labels
            )
        if record.verdict.output:
            record.event("verifier", {"output": record.verdict.output})

    def _max_turns(self, task: Task) -> int:
        return self.max_turns or task.max_turns or self.prompts.max_turns or DEFAULT_MAX_TURNS

    def _time_limit(self, task: Task) -> float:
        return self.agent_timeout or task.agent_timeout


def _seen_from_the_gateway(result: HarnessResult, session: Session | None, inside: bool) -> HarnessResult:
    """An agent that fails because its model did is not to blame, whatever client it calls the model with. One that is a
    program inside may also end as if all were well, or try again until its time is over. Raises ``EngineError``."""
    if session is None:
        return result
    if session.engine_error and (inside or result.termination is Termination.AGENT_ERROR):
        raise EngineError(f"{session.engine_error} (the agent then ended with {result.termination}: {result.detail})")
    if inside and result.termination in (Termination.ANSWER, Termination.AGENT_ERROR):
        if session.exhausted:
            return msgspec.structs.replace(result, termination=Termination.TURN_LIMIT)
        if session.too_long is not None:
            detail = f"{session.too_long} {result.detail}".strip()
            return msgspec.structs.replace(result, termination=Termination.TOKEN_LIMIT, detail=detail)
    return result


async def _created(source: SandboxSource, spec: SandboxSpec) -> Sandbox:
    """A task's own files decide much of what happens here: whatever is wrong with them costs its episode only."""
    try:
        return await source.create(spec)
    except RlHarnessError:
        raise
    except Exception as error:
        _log.exception("creating a sandbox")
        raise SandboxError(f"the sandbox could not be created: {type(error).__name__}: {error}") from error


async def _while_alive(work: Coroutine[Any, Any, HarnessResult], sandbox: Sandbox | None) -> HarnessResult:
    """What an agent comes to, unless its sandbox dies under it: then it is stopped at once, with the reason raised."""
    if sandbox is None:
        return await work
    agent, death = asyncio.ensure_future(work), asyncio.ensure_future(sandbox.died())
    try:
        await asyncio.wait((agent, death), return_when=asyncio.FIRST_COMPLETED)
        if death.done():
            error = death.exception()
            raise SandboxError(death.result() if error is None else f"the sandbox is lost: {error}")
        return await agent
    finally:
        for task in (agent, death):
            task.cancel()
        await finished(asyncio.wait((agent, death)))
        for task in (agent, death):
            if not task.cancelled():
                task.exception()  # told by now, or of no interest any more


class _Record:
    """What is known about an attempt so far; becomes an :class:`Episode` once, at its end."""

    def __init__(self, attempt: Attempt, benchmark: str, secrets: Secrets) -> None:
        self.secrets = secrets
        self.id = uuid.uuid4().hex
        self.attempt = attempt
        self.benchmark = benchmark
        self.started_at = time.time()
        self.seconds: dict[str, float] = {}
        self.phase = ""
        self.events: list[Event] = []
        self.flags: list[str] = []
        self.turns: list[Turn] = []
        self.session: Session | None = None
        self.result: HarnessResult | None = None
        self.verdict: Verdict | None = None
        self._failure: tuple[UnscoredReason, str, Termination] | None = None

    def event(self, kind: str, data: Mapping[str, Any]) -> None:
        if len(self.events) < MAX_EVENTS or kind == "verifier":
            self.events.append(Event(at=time.time(), kind=kind, data=self.secrets.clean(dict(data))))

    @contextlib.contextmanager
    def timed(self, phase: str) -> Any:
        start = time.perf_counter()
        self.phase = phase
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def unscored(self, reason: UnscoredReason, detail: str, termination: Termination) -> None:
        self._failure = (reason, detail, termination)

    def episode(self) -> Episode:
        turns = self.turns
        result = self.result or HarnessResult(termination=Termination.SANDBOX_ERROR)
        reward, rewards, unscored, detail = None, None, None, result.detail
        termination = result.termination
        flags = list(self.flags)
        if self._failure is not None:
            unscored, detail, failed = self._failure
            termination = self.result.termination if self.result else failed
        elif self.verdict is not None:
            verdict = self.verdict
            reward, rewards, unscored = verdict.reward, verdict.rewards, verdict.unscored
            detail = verdict.detail or detail
            flags += [flag for flag in verdict.flags if flag not in flags]
        if any(turn.quarantined for turn in turns):
            flags.append("secrets")
        versions = {int(turn.versions[0]) for turn in turns if len(turn.versions)}
        task = self.attempt.task
        return Episode(
            id=self.id,
            key=self.attempt.key,
            task=TaskRef(benchmark=self.benchmark, name=task.name, split=self.attempt.split, digest=task.digest),
            attempt=self.attempt.number,
            policy_version=min(versions, default=0),
            termination=termination,
            reward=reward,
            rewards=rewards,
            unscored=unscored,
            detail=excerpt(self.secrets.redact(detail), MAX_DETAIL),
            answer=None if result.answer is None else self.secrets.redact(result.answer),
            flags=tuple(flags),
            usage=Usage(
                turns=len(turns),
                prompt_tokens=sum(t.prompt_tokens for t in turns),
                cached_tokens=sum(t.cached_tokens for t in turns),
                completion_tokens=sum(t.completion_tokens for t in turns),
            ),
            started_at=self.started_at,
            seconds=self.seconds,
            events=tuple(self.events),
        )
