"""Puts the parts of a job together from a configuration, and takes them down again.

Everything that can be known before the first episode is checked here: names, options, capabilities, preflights.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import aiohttp
import msgspec

from rl_harness.contracts import (
    Backend,
    ChatEngine,
    Harness,
    ModelInfo,
    Prompts,
    Renderer,
    SandboxProvider,
    TokenEngine,
    ToolSpec,
)
from rl_harness.errors import SandboxError, TaskError, Unavailable, Unsupported, UsageError
from rl_harness.gateway import ChatPolicy, Gateway, TokenPolicy
from rl_harness.inference import Replicas
from rl_harness.jobs.supply import Supply, make_supply
from rl_harness.plugins import Registry
from rl_harness.records import Message
from rl_harness.rollout import EpisodeRunner
from rl_harness.runs import Run
from rl_harness.runs.config import PluginChoice, RunConfig
from rl_harness.runs.info import MODEL_FOLDER, SANDBOXES
from rl_harness.tasks import BenchmarkHandle, Task, in_seeded_order, open_benchmark, tasks_from_directories, unsupported

#: The name in records of what task directories are instead of a split.
NO_SPLIT = "tasks"


_SOME_TOOL: ToolSpec = {
    "type": "function",
    "function": {"name": "shell", "description": "", "parameters": {"type": "object", "properties": {}}},
}


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


class Assembly:
    """The parts of one job. Made by :func:`assembled`."""

    def __init__(
        self, config: RunConfig, registry: Registry, source: TaskSource, stack: contextlib.AsyncExitStack
    ) -> None:
        self.config = config
        self.registry = registry
        self.source = source
        self._stack = stack
        self._http: aiohttp.ClientSession | None = None
        self.harness = cast(Harness, _create(registry, "harnesses", config.harness))
        self.provider: SandboxProvider | None = None
        self.supply: Supply | None = None
        self._process: int | None = None
        self.engine: TokenEngine | ChatEngine | None = None
        self.renderer: Renderer | None = None
        self.replicas: Replicas | None = None
        self.model: ModelInfo | None = None
        self.gateway: Gateway | None = None
        self.backend: Backend | None = None

    async def start(self, run: Run, note: Callable[[str], None]) -> None:
        """Remove what dead runs left, load the model, open the gateway. ``note`` is for people."""
        if self.provider is not None:
            await self.provider.reap()
            self.supply = make_supply(self.config, self.registry, self.provider, {"run": run.id}, note)
            self._stack.push_async_callback(self.supply.close)
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )
        self._stack.push_async_callback(self._http.close)
        if self.engine is not None:
            await self._start_gateway(self.engine)
        await self.harness.start()
        self._stack.push_async_callback(self.harness.close)

    def remember_model(self, run: Run) -> None:
        """Note where the model's tokenizer is, so that the run's token ids can be read as text later."""
        if self.model is not None and self.model.path is not None:
            run.store.set_state(MODEL_FOLDER, str(self.model.path.absolute()))

    async def _start_gateway(self, engine: TokenEngine | ChatEngine) -> None:
        assert self.config.model is not None
        self.model = await engine.start(self.config.model)
        name = self.model.name
        if isinstance(engine, TokenEngine):
            if self.model.path is None:
                raise Unavailable(
                    f"engine {_engine_name(self.config)!r} gives no model folder to read a tokenizer from"
                )
            assert self.renderer is not None
            self.renderer.load(self.model.path)
            _check_vocabulary(self.renderer, self.model)
            if self.harness.capabilities.calls_tools:  # refused now, if at all, and not in every episode
                self.renderer.render([Message(role="user")], [_SOME_TOOL])
            self.replicas = Replicas([engine])
            policy: TokenPolicy | ChatPolicy = TokenPolicy(name, self.replicas, self.renderer)
        else:
            policy = ChatPolicy(name, engine)
        self.gateway = Gateway({name: policy})
        await self.gateway.start()
        self._stack.push_async_callback(self.gateway.close)

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


def _check_vocabulary(renderer: Renderer, model: ModelInfo) -> None:
    """Refuse a tokenizer that was made for other weights: its ids would fail in every request."""
    highest = max(renderer.end_token_ids, default=-1)
    if model.vocab_size is not None and highest >= model.vocab_size:
        raise Unavailable(
            f"the tokenizer in {model.path} ends turns with {highest}, but the model has only {model.vocab_size} ids",
            remedy="give --model a folder whose tokenizer belongs to its weights",
        )


def _create(registry: Registry, kind: str, choice: PluginChoice) -> Any:
    return registry.create(kind, choice.name, choice.plugin_options)


def model_identity(model: str | None) -> dict[str, Any]:
    """What tells one model from another in the digest of a run: its name and, for a folder, its files."""
    identity: dict[str, Any] = {"model": model}
    if model and (folder := Path(model)).is_dir():
        stats = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(folder.iterdir()) if f.is_file()]
        identity["files"] = hashlib.sha256(msgspec.json.encode(stats)).hexdigest()
    return identity


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
            parts.provider = cast(SandboxProvider, _create(registry, "sandboxes", config.sandbox))
            stack.push_async_callback(parts.provider.close)
            await parts.provider.preflight()
            _check_isolation(config, parts.provider)
        await _check_tasks(parts, tasks)
        _check_protocols(parts)
        await parts.harness.preflight()
        if parts.harness.capabilities.protocols:
            await _create_model(parts, stack)
        elif config.trains:
            raise UsageError(f"harness {config.harness.name!r} calls no model, so there is nothing to train")
        yield parts


def _check_isolation(config: RunConfig, provider: SandboxProvider) -> None:
    if config.trains and not provider.capabilities.isolated and not config.training.allow_unisolated:
        raise UsageError(
            f"sandbox {config.sandbox.name!r} does not isolate the agent, so it could reach its own grade",
            remedy="use an isolating sandbox, or accept that with -o training.allow_unisolated=true",
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
    checked: set[bytes] = set()
    for task in tasks:
        if parts.harness.capabilities.needs_solution and task.solution is None:
            reasons.setdefault("it has no solution/, which this harness runs", task.name)
        if task.needs_sandbox and not parts.harness.capabilities.acts:
            reasons.setdefault(
                "it is graded on what is left in the sandbox, where this harness does nothing", task.name
            )
        if parts.provider is not None and (task.needs_sandbox or parts.harness.capabilities.needs_sandbox):
            environment = task.agent_environment(parts.harness.setup)
            task = msgspec.structs.replace(task, environment=environment)
            missing = unsupported(task, parts.provider.capabilities)
            for reason in missing or await _wrong_in(task, parts.provider, checked):
                reasons.setdefault(reason, task.name)
    if reasons:
        listed = "\n  ".join(f"{name}: {reason}" for reason, name in list(reasons.items())[:10])
        raise Unsupported(
            f"harness {parts.config.harness.name!r} in sandbox {parts.config.sandbox.name!r} cannot run every task:"
            f"\n  {listed}"
        )


async def _wrong_in(task: Task, provider: SandboxProvider, checked: set[bytes]) -> list[str]:
    """What the provider finds wrong in the task's environments, of those that are not ``checked`` yet."""
    environments = [task.environment]
    if task.needs_sandbox and task.verifier.mode == "separate":
        environments.append(task.verifier.environment)
    found = []
    for environment in environments:
        content = msgspec.json.encode(environment, order="deterministic", enc_hook=str)
        if content in checked:
            continue
        checked.add(content)
        try:
            await provider.check(environment)
        except (TaskError, Unsupported, SandboxError) as error:
            found.append(str(error).replace("\n", "\n  "))
    return found


async def _create_model(parts: Assembly, stack: contextlib.AsyncExitStack) -> None:
    config, registry = parts.config, parts.registry
    if config.model is None:
        raise UsageError("no model given", remedy="--model FOLDER|HUB_ID, or --model NAME --base-url URL")
    engine = _engine(config, registry)
    parts.engine = engine
    if config.trains and not engine.capabilities.trainable:
        raise Unsupported(
            f"engine {_engine_name(config)!r} cannot be trained behind: it does not give token ids and log-probs, "
            "and its weights cannot be changed",
            remedy="give --model a folder or hub id and leave --base-url out, or evaluate with --trainer none",
        )
    if isinstance(engine, TokenEngine):
        parts.renderer = cast(Renderer, _create(registry, "renderers", config.renderer))
        await parts.renderer.preflight()
    await engine.preflight()
    await engine.preflight_model(config.model)
    stack.push_async_callback(engine.close)
    if config.trains:
        parts.backend = cast(Backend, _create(registry, "backends", config.backend))
        transport(engine, parts.backend)
        stack.push_async_callback(parts.backend.close)
        await parts.backend.preflight()


def _engine_name(config: RunConfig) -> str:
    return "api" if config.base_url else config.engine.name


def _engine(config: RunConfig, registry: Registry) -> TokenEngine | ChatEngine:
    options = config.engine.plugin_options
    if config.base_url:
        if not os.environ.get(config.api_key_env) and config.api_key_env != "OPENAI_API_KEY":
            raise UsageError(f"api_key_env names {config.api_key_env}, which is not set")
        further = options if config.engine.name == "api" else {}
        options = {"base_url": config.base_url, "api_key_env": config.api_key_env, **further}
    return cast(TokenEngine | ChatEngine, registry.create("engines", _engine_name(config), options))


def transport(engine: TokenEngine | ChatEngine, backend: Backend) -> str:
    """The first way of moving weights that both sides have. Raises ``Unsupported`` when there is none."""
    for transport in backend.capabilities.weight_transports:
        if transport in engine.capabilities.weight_transports:
            return transport
    raise Unsupported(
        f"the engine takes weights by {list(engine.capabilities.weight_transports)}, the backend gives them by "
        f"{list(backend.capabilities.weight_transports)}: they have no transport in common"
    )
