"""Puts the parts of a job together from a configuration, and takes them down again.

Everything that can be known before the first episode is checked here: names, options, capabilities, preflights.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import cast

import aiohttp
import msgspec

from rl_harness.contracts import Harness, Prompts, SandboxProvider, SandboxSpec
from rl_harness.errors import SandboxError, TaskError, Unsupported, UsageError
from rl_harness.gateway import Gateway
from rl_harness.jobs.alternatives import sandboxes_that_can
from rl_harness.jobs.model import ModelParts, create, known_secrets
from rl_harness.jobs.supply import Supply, make_provider, make_supply
from rl_harness.plugins import Registry
from rl_harness.rollout import EpisodeRunner
from rl_harness.runs import Run
from rl_harness.runs.config import RunConfig
from rl_harness.runs.info import SANDBOXES
from rl_harness.tasks import (
    UNISOLATED,
    BenchmarkHandle,
    Task,
    in_seeded_order,
    open_benchmark,
    tasks_from_directories,
    unsupported,
)

#: The name in records of what task directories are instead of a split.
NO_SPLIT = "tasks"


class TaskSource:
    """The tasks a run may draw from: a benchmark with splits, or bare directories, which have none."""

    def __init__(self, benchmark: BenchmarkHandle | None, tasks: Sequence[Task] = ()) -> None:
        self._benchmark = benchmark
        self._tasks = list(tasks)
        self.name = benchmark.name if benchmark else NO_SPLIT
        self.prompts: Prompts = benchmark.prompts if benchmark else Prompts()

    @classmethod
    def of(cls, registry: Registry, config: RunConfig) -> TaskSource:
        if config.tasks:
            return cls(None, tasks_from_directories(config.tasks))
        if config.benchmark is None:
            raise UsageError("nothing to run", remedy="name a benchmark (rl-harness tasks list) or a task directory")
        choice = config.benchmark
        return cls(open_benchmark(registry, choice.name, options=choice.plugin_options))

    async def preflight(self) -> None:
        if self._benchmark is not None:
            await self._benchmark.preflight()

    def split(self, asked: str | None) -> str:
        """The name of the split that is meant."""
        return NO_SPLIT if self._benchmark is None else asked or self._benchmark.default_split()

    async def tasks(self, split: str, *, limit: int | None, seed: int) -> list[Task]:
        """The first ``limit`` tasks of a split in an order that ``seed`` decides."""
        if self._benchmark is None:
            return in_seeded_order(self._tasks, f"{NO_SPLIT}/{seed}")[:limit]
        return await asyncio.to_thread(self._benchmark.tasks, split, limit, seed)


class Assembly(ModelParts):
    """The parts of one job that runs agents. Made by :func:`assembled`."""

    def __init__(
        self, config: RunConfig, registry: Registry, source: TaskSource, stack: contextlib.AsyncExitStack
    ) -> None:
        super().__init__(config, registry, stack)
        self.source = source
        self._http: aiohttp.ClientSession | None = None
        self.harness = cast(Harness, create(registry, "harnesses", config.harness))
        self.provider: SandboxProvider | None = None
        self.supply: Supply | None = None
        self._process: int | None = None
        self.gateway: Gateway | None = None

    async def start(self, run: Run, note: Callable[[str], None]) -> None:
        """Remove what dead runs left, load the model, open the gateway. ``note`` is for people."""
        if self.provider is not None:
            if not self.provider.capabilities.isolated:
                note(f"sandbox {self.config.sandbox.name}: {UNISOLATED}")
            await self.provider.reap()
            self.supply = make_supply(self.config, self.registry, self.provider, {"run": run.id}, note)
            self._stack.push_async_callback(self.supply.close)
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )
        self._stack.push_async_callback(self._http.close)
        if self.engine is not None:
            policy = await self.load(calls_tools=self.harness.capabilities.calls_tools)
            self.gateway = Gateway({policy.name: policy}, secrets=known_secrets(self.config))
            await self.gateway.start()
            self._stack.push_async_callback(self.gateway.close)
        await self.harness.start()
        self._stack.push_async_callback(self.harness.close)

    def expect(self, runner: EpisodeRunner, tasks: Sequence[Task]) -> None:
        """Let sandboxes be made ready for an attempt at each of these tasks in order, and for no others."""
        if self.supply is not None:
            self.supply.expect([runner.sandbox_specs(task) for task in tasks], self.config.concurrency)

    def record_supply(self, run: Run) -> None:
        """Store what sandboxes cost this process so far; a resumed run has such a record for each process."""
        if self.supply is not None:
            if self._process is None:
                self._process = len(run.store.metrics(SANDBOXES))
            run.store.add_metrics(SANDBOXES, self._process, self.supply.metrics())

    def runner(self, run: Run) -> EpisodeRunner:
        """An episode runner over these parts, whose sandboxes are labelled with the run."""
        return EpisodeRunner(
            harness=self.harness,
            provider=self.supply,
            gateway=self.gateway,
            policy=self.model.name if self.model else "none",
            benchmark=self.source.name,
            prompts=self.source.prompts,
            labels={"run": run.id},
            max_turns=self.config.max_turns,
            agent_timeout=self.config.agent_timeout,
            http=self._http,
        )


@contextlib.asynccontextmanager
async def assembled(
    config: RunConfig, registry: Registry, source: TaskSource, tasks: Sequence[Task]
) -> AsyncIterator[Assembly]:
    """Create and check every part that these tasks need; on leaving, close all of them in reverse order.

    Nothing costly is started yet: :meth:`Assembly.start` does that, once the run's directory is open.
    """
    async with contextlib.AsyncExitStack() as stack:
        parts = Assembly(config, registry, source, stack)
        if any(task.needs_sandbox for task in tasks) or parts.harness.capabilities.needs_sandbox:
            parts.provider = make_provider(registry, config.sandbox.name, config.sandbox.plugin_options)
            stack.push_async_callback(parts.provider.close)
            await parts.provider.preflight()
            _check_isolation(config, parts.provider)
            parts.harness.adapt(parts.provider.capabilities)
            _check_mounts(parts, parts.provider)
        await _check_tasks(parts, tasks)
        _check_protocols(parts)
        await parts.harness.preflight()
        if parts.harness.capabilities.protocols:
            await parts.create()
        elif config.trains:
            raise UsageError(f"harness {config.harness.name!r} calls no model, so there is nothing to train")
        yield parts


def _check_isolation(config: RunConfig, provider: SandboxProvider) -> None:
    if config.trains and not provider.capabilities.isolated and not config.training.allow_unisolated:
        raise UsageError(
            f"sandbox {config.sandbox.name!r} does not isolate the agent, so it could reach its own grade",
            remedy="use an isolating sandbox, or accept that with -o training.allow_unisolated=true",
        )


def _check_mounts(parts: Assembly, provider: SandboxProvider) -> None:
    if parts.harness.mounts and not provider.capabilities.mounts:
        raise Unsupported(
            f"harness {parts.config.harness.name!r} shows its agent directories of this machine, which sandbox "
            f"{parts.config.sandbox.name!r} cannot"
        )


def _check_protocols(parts: Assembly) -> None:
    spoken = parts.harness.capabilities.protocols
    if spoken and not spoken & Gateway.protocols:
        raise Unsupported(
            f"harness {parts.config.harness.name!r} calls its model by {', '.join(sorted(spoken))}, and the gateway "
            f"answers to {', '.join(sorted(Gateway.protocols))}"
        )


async def _check_tasks(parts: Assembly, tasks: Sequence[Task]) -> None:
    """Refuse tasks that this sandbox or harness cannot honour. Raises ``Unsupported`` naming every reason."""
    if not tasks:
        raise UsageError("there is no task to run", remedy="check the split and the limit")
    reasons: dict[str, str] = {}
    lacking: list[Task] = []
    checked: set[bytes] = set()
    isolated = parts.provider is None or parts.provider.capabilities.isolated
    for task in tasks:
        if parts.harness.capabilities.needs_solution and task.solution is None:
            reasons.setdefault("it has no solution/, which this harness runs", task.name)
        if task.needs_sandbox and not parts.harness.capabilities.acts:
            reasons.setdefault(
                "it is graded on what is left in the sandbox, where this harness does nothing", task.name
            )
        if parts.provider is not None and (task.needs_sandbox or parts.harness.capabilities.needs_sandbox):
            specs = [
                task.sandbox_spec(
                    {},
                    isolated=isolated,
                    agent_timeout=parts.config.agent_timeout,
                    setup=parts.harness.setup,
                    mounts=parts.harness.mounts,
                )
            ]
            if task.needs_sandbox and task.verifier.mode == "separate":
                specs.append(task.verifier_spec({}, isolated=isolated))
            task = msgspec.structs.replace(task, environment=specs[0].environment)
            missing = unsupported(
                task, parts.provider.capabilities, unisolated_setup=parts.config.snapshots.allow_unisolated
            )
            lacking += [task] if missing else []
            for reason in missing or await _wrong_in(specs, parts.provider, checked):
                reasons.setdefault(reason, task.name)
    if reasons:
        listed = "\n  ".join(f"{name}: {reason}" for reason, name in list(reasons.items())[:10])
        raise Unsupported(
            f"harness {parts.config.harness.name!r} in sandbox {parts.config.sandbox.name!r} cannot run every task:"
            f"\n  {listed}",
            remedy=sandboxes_that_can(parts.registry, parts.config.sandbox.name, lacking) if lacking else None,
        )


async def _wrong_in(specs: Sequence[SandboxSpec], provider: SandboxProvider, checked: set[bytes]) -> list[str]:
    """What the provider finds wrong in a task's sandboxes, of those that are not ``checked`` yet."""
    found = []
    for spec in specs:
        content = msgspec.json.encode(spec, order="deterministic", enc_hook=str)
        if content in checked:
            continue
        checked.add(content)
        try:
            await provider.check(spec)
        except (TaskError, Unsupported, SandboxError) as error:
            found.append(str(error).replace("\n", "\n  "))
    return found
