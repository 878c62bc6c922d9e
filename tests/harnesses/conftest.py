from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from rl_harness.contracts import (
    AgentTask,
    Endpoint,
    HarnessContext,
    NetworkPolicy,
    Sandbox,
    SandboxProvider,
    SandboxSpec,
)
from rl_harness.sandboxes.local import LocalProvider
from rl_harness.sandboxes.process import ProcessProvider

NewSandbox = Callable[[], AbstractAsyncContextManager[Sandbox]]


def opener(provider_class: type[SandboxProvider], spec: SandboxSpec, state_dir: Path) -> NewSandbox:
    @asynccontextmanager
    async def open_sandbox() -> AsyncIterator[Sandbox]:
        provider = provider_class(provider_class.Options(state_dir=state_dir))
        try:
            yield await provider.create(spec)
        finally:
            await provider.close()

    return open_sandbox


@pytest.fixture(scope="session")
def new_sandbox(tmp_path_factory: pytest.TempPathFactory) -> NewSandbox:
    """Plain processes: enough wherever a command stays in its working directory, and works on every system."""
    return opener(ProcessProvider, SandboxSpec(network=NetworkPolicy.FULL), tmp_path_factory.mktemp("process"))


@pytest.fixture(scope="session")
def new_isolated_sandbox(tmp_path_factory: pytest.TempPathFactory) -> NewSandbox:
    """A root of its own, for tests marked as needing ``userns``."""
    return opener(LocalProvider, SandboxSpec(), tmp_path_factory.mktemp("local"))


@pytest.fixture
async def sandbox(new_sandbox: NewSandbox) -> AsyncIterator[Sandbox]:
    async with new_sandbox() as opened:
        yield opened


@pytest.fixture
async def isolated_sandbox(new_isolated_sandbox: NewSandbox) -> AsyncIterator[Sandbox]:
    async with new_isolated_sandbox() as opened:
        yield opened


@pytest.fixture
def events() -> list[tuple[str, Mapping[str, Any]]]:
    return []


@pytest.fixture
def make_context(events: list[tuple[str, Mapping[str, Any]]]) -> Callable[..., HarnessContext]:
    def make(
        endpoint: Endpoint | None = None,
        sandbox: Sandbox | None = None,
        *,
        seconds: float = 30.0,
        solution: Path | None = None,
        solution_env: Mapping[str, str] | None = None,
        **task: Any,
    ) -> HarnessContext:
        values: dict[str, Any] = {"name": "task", "instruction": "Do it.", "time_limit": seconds, **task}
        return HarnessContext(
            task=AgentTask(**values),
            sandbox=sandbox,
            endpoint=endpoint,
            deadline=time.monotonic() + seconds,
            solution=solution,
            solution_env=solution_env or {},
            on_event=lambda kind, data: events.append((kind, data)),
        )

    return make
