"""Puts the parts of a job together from a configuration, and takes them down again.

Everything that can be known before the first episode is checked here: names, options, capabilities, preflights.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
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
)
from rl_harness.errors import Unavailable, Unsupported, UsageError
from rl_harness.gateway import ChatPolicy, Gateway, TokenPolicy
from rl_harness.inference import Replicas
from rl_harness.plugins import Registry
from rl_harness.rollout import EpisodeRunner
from rl_harness.runs.config import PluginChoice, RunConfig
from rl_harness.tasks import BenchmarkHandle, Task, open_benchmark, tasks_from_directories, unsupported

#: The split that is evaluated when nobody names one: the first of these the benchmark has, else its only one.
PREFERRED_SPLITS = ("heldout", "test", "dev")


class TaskSource:
    """The tasks a run may draw from: a benchmark with splits, or bare directories as one split ``tasks``."""

    def __init__(self, benchmark: BenchmarkHandle | None, tasks: Sequence[Task] = ()) -> None:
        self._benchmark = benchmark
        self._tasks = list(tasks)
        self.name = benchmark.name if benchmark else "tasks"
        self.prompts: Prompts = benchmark.prompts if benchmark else Prompts()

    @classmethod
    def of(cls, registry: Registry, config: RunConfig) -> TaskSource:
        if config.tasks:
            return cls(None, tasks_from_directories(config.tasks))
        if config.benchmark is None:
            raise UsageError("nothing to run", remedy="name a benchmark (rl-harness tasks list) or a task directory")
        return cls(open_benchmark(registry, config.benchmark))

    def default_split(self) -> str:
        if self._benchmark is None:
            return "tasks"
        splits = self._benchmark.splits
        return next((name for name in PREFERRED_SPLITS if name in splits), next(iter(splits)))

    async def tasks(self, split: str, *, limit: int | None, seed: int) -> list[Task]:
        """The first ``limit`` tasks of a split in an order that ``seed`` decides."""
        if self._benchmark is None:
            return self._tasks[:limit]
        return await asyncio.to_thread(self._benchmark.tasks, split, limit, seed)


class Assembly:
    """The running parts of a job. Made by :func:`assembled`."""

    def __init__(self, config: RunConfig, registry: Registry) -> None:
        self.config = config
        self.registry = registry
        self.source: TaskSource
        self.harness: Harness
        self.provider: SandboxProvider | None = None
        self.engine: TokenEngine | ChatEngine | None = None
        self.replicas: Replicas | None = None
        self.model: ModelInfo | None = None
        self.gateway: Gateway | None = None
        self.backend: Backend | None = None
        self.http: aiohttp.ClientSession

    def runner(self, labels: Mapping[str, str]) -> EpisodeRunner:
        return EpisodeRunner(
            harness=self.harness,
            provider=self.provider,
            gateway=self.gateway,
            policy=self.model.name if self.model else "none",
            benchmark=self.source.name,
            prompts=self.source.prompts,
            labels=labels,
            max_turns=self.config.max_turns,
            agent_timeout=self.config.agent_timeout,
            http=self.http,
        )

    def check_tasks(self, tasks: Sequence[Task]) -> None:
        """Refuse tasks that this sandbox or harness cannot honour. Raises ``Unsupported`` naming all reasons."""
        if not tasks:
            raise UsageError("there is no task to run", remedy="check the split and the limit")
        reasons: dict[str, str] = {}
        for task in tasks:
            if not (task.needs_sandbox or self.harness.capabilities.needs_sandbox):
                continue
            if self.provider is None:
                raise UsageError(f"task {task.name} needs a sandbox", remedy="choose one with --sandbox")
            for reason in unsupported(task, self.provider.capabilities):
                reasons.setdefault(reason, task.name)
        if reasons:
            listed = "\n  ".join(f"{name}: {reason}" for reason, name in list(reasons.items())[:10])
            raise Unsupported(f"sandbox {self.config.sandbox.name!r} cannot run every task:\n  {listed}")


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
    config: RunConfig, registry: Registry, tasks: Sequence[Sequence[Task]], source: TaskSource
) -> AsyncIterator[Assembly]:
    """Create, check and start every part for these lists of tasks; close all of them in reverse order at the end."""
    async with contextlib.AsyncExitStack() as stack:
        parts = Assembly(config, registry)
        parts.source = source
        parts.harness = _create(registry, "harnesses", config.harness)
        if any(t.needs_sandbox for part in tasks for t in part) or parts.harness.capabilities.needs_sandbox:
            parts.provider = _create(registry, "sandboxes", config.sandbox)
            stack.push_async_callback(parts.provider.close)
            await parts.provider.preflight()
            if config.trains and not parts.provider.capabilities.isolated and not config.training.allow_unisolated:
                raise UsageError(
                    f"sandbox {config.sandbox.name!r} does not isolate the agent, so it could reach its own grade",
                    remedy="use an isolating sandbox, or accept that with -o training.allow_unisolated=true",
                )
            await parts.provider.reap()
        for part in tasks:
            parts.check_tasks(part)
        await parts.harness.preflight()
        parts.http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )
        stack.push_async_callback(parts.http.close)
        if parts.harness.capabilities.protocols:
            await _start_model(parts, stack)
        elif config.trains:
            raise UsageError(f"harness {config.harness.name!r} calls no model, so there is nothing to train")
        await parts.harness.start()
        stack.push_async_callback(parts.harness.close)
        yield parts


async def _start_model(parts: Assembly, stack: contextlib.AsyncExitStack) -> None:
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
    await engine.preflight()
    stack.push_async_callback(engine.close)
    if config.trains:
        parts.backend = cast(Backend, _create(registry, "backends", config.backend))
        transport(engine, parts.backend)
        await parts.backend.preflight()
    parts.model = await engine.start(config.model)
    name = parts.model.name
    if isinstance(engine, TokenEngine):
        if parts.model.path is None:
            raise Unavailable(f"engine {_engine_name(config)!r} gives no model folder to read a tokenizer from")
        renderer = cast(Renderer, _create(registry, "renderers", config.renderer))
        renderer.load(parts.model.path)
        parts.replicas = Replicas([engine])
        policy: TokenPolicy | ChatPolicy = TokenPolicy(name, parts.replicas, renderer)
    else:
        policy = ChatPolicy(name, engine)
    parts.gateway = Gateway({name: policy})
    await parts.gateway.start()
    stack.push_async_callback(parts.gateway.close)


def _engine_name(config: RunConfig) -> str:
    return "api" if config.base_url else config.engine.name


def _engine(config: RunConfig, registry: Registry) -> TokenEngine | ChatEngine:
    options = config.engine.plugin_options
    if config.base_url:
        if not os.environ.get(config.api_key_env) and config.api_key_env != "OPENAI_API_KEY":
            raise UsageError(f"api_key_env names {config.api_key_env}, which is not set")
        options = {"base_url": config.base_url, "api_key_env": config.api_key_env}
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
