"""Prepares the environments of tasks ahead of any run: each distinct one once, some at a time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from rl_harness.contracts import Harness, SandboxProvider, SandboxSpec
from rl_harness.errors import RlHarnessError
from rl_harness.jobs.alternatives import sandboxes_that_can
from rl_harness.jobs.supply import make_provider, prepared_environments
from rl_harness.plugins import Registry
from rl_harness.runs.config import RunConfig
from rl_harness.sandboxes.snapshots import machine
from rl_harness.tasks import UNISOLATED, Task, unsupported

_log = logging.getLogger(__name__)

_LABELS = {"run": "build"}


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """One environment and the tasks that use it. ``plain``: there was nothing to prepare. ``ready``: a
    sandbox of its image started, whether or not that had to be fetched or built first."""

    tasks: tuple[str, ...]
    outcome: Literal["built", "found", "ready", "plain", "failed"]
    seconds: float = 0.0
    error: str = ""


async def build_environments(
    config: RunConfig,
    registry: Registry,
    tasks: Sequence[Task],
    *,
    concurrency: int,
    note: Callable[[str], None],
    started: Callable[[int], None],
    ended: Callable[[Prepared], None],
) -> list[Prepared]:
    """Prepare what runs of ``tasks`` with this configuration will start from. What is there already stays.

    ``note`` is for people. ``started`` is told how many environments there are, ``ended`` about each as it ends. A
    failure is an outcome.
    """
    harness = registry.create("harnesses", config.harness.name, config.harness.plugin_options)
    provider = make_provider(registry, config.sandbox.name, config.sandbox.plugin_options)
    assert isinstance(harness, Harness)
    results: list[Prepared] = []

    def say(result: Prepared) -> None:
        results.append(result)
        ended(result)

    try:
        await provider.preflight()
        if not provider.capabilities.isolated:
            note(f"sandbox {config.sandbox.name}: {UNISOLATED}")
        harness.adapt(provider.capabilities)
        await provider.reap()
        environments, refused, lacking = _distinct(tasks, harness, provider, config.snapshots.allow_unisolated)
        if lacking:
            note(sandboxes_that_can(registry, config.sandbox.name, lacking))
        started(len(environments) + len(refused))
        for task, reason in refused.items():
            say(Prepared(tasks=(task,), outcome="failed", error=reason))
        snapshots = prepared_environments(config, registry, provider, _LABELS, note)
        together = asyncio.Semaphore(concurrency)

        async def one(spec: SandboxSpec, users: tuple[str, ...]) -> None:
            async with together:
                began = time.perf_counter()
                try:
                    outcome = await snapshots.build(spec)
                except RlHarnessError as error:
                    say(Prepared(tasks=users, outcome="failed", seconds=time.perf_counter() - began, error=str(error)))
                except Exception as error:
                    # A mistake in a provider, or a file nobody foresaw: the others are prepared all the same.
                    _log.debug("preparing the environment of %s", ", ".join(users), exc_info=True)
                    words = f"{type(error).__name__}: {error}"
                    say(Prepared(tasks=users, outcome="failed", seconds=time.perf_counter() - began, error=words))
                else:
                    say(Prepared(tasks=users, outcome=outcome, seconds=time.perf_counter() - began))

        try:
            async with asyncio.TaskGroup() as group:
                for spec, users in environments:
                    group.create_task(one(spec, users))
        finally:
            await snapshots.close()
    finally:
        await provider.close()
    return results


def _distinct(
    tasks: Sequence[Task], harness: Harness, provider: SandboxProvider, unisolated_setup: bool
) -> tuple[list[tuple[SandboxSpec, tuple[str, ...]]], dict[str, str], list[Task]]:
    """A spec for each environment and size of machine with the tasks that use it, and the tasks that cannot run there
    with the reason, which come last too."""
    lacking: list[Task] = []
    found: dict[bytes, tuple[SandboxSpec, dict[str, None]]] = {}
    refused: dict[str, str] = {}
    isolated = provider.capabilities.isolated
    for task in tasks:
        if not (task.needs_sandbox or harness.capabilities.needs_sandbox):
            continue
        prepared = msgspec.structs.replace(task, environment=task.agent_environment(harness.setup))
        if reasons := unsupported(prepared, provider.capabilities, unisolated_setup=unisolated_setup):
            refused[task.name] = "; ".join(reasons)
            lacking.append(prepared)
            continue
        specs = [task.sandbox_spec(_LABELS, isolated=isolated, setup=harness.setup)]
        if task.needs_sandbox and task.verifier.mode == "separate":
            specs.append(task.verifier_spec(_LABELS, isolated=isolated))
        for spec in specs:
            content = msgspec.json.encode(machine(spec), order="deterministic", enc_hook=str)
            found.setdefault(content, (spec, {}))[1][task.name] = None
    return [(spec, tuple(names)) for spec, names in found.values()], refused, lacking
