"""A task directory to start from, one keystroke away from every fault."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from rl_harness.contracts.sandbox import SandboxProvider
from rl_harness.sandboxes.local import LocalProvider
from rl_harness.tasks import new_task

WriteTask = Callable[..., Path]


@pytest.fixture
def write_task(tmp_path: Path) -> WriteTask:
    """``write_task("task.toml's text", **{"tests/test.sh": "..."})`` writes a directory; None removes a file."""

    def write(toml: str | None = None, files: dict[str, str | None] | None = None, name: str = "job") -> Path:
        directory = new_task(tmp_path, name)
        for path, text in {"task.toml": toml, **(files or {})}.items():
            target = directory / path
            if text is not None:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text, encoding="utf-8")
            elif path != "task.toml":
                target.unlink()
        return directory

    return write


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def provider(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SandboxProvider]:
    """One for a module, whose tests run on one event loop."""
    provider = LocalProvider(LocalProvider.Options(state_dir=tmp_path_factory.mktemp("sandboxes"), storage="memory"))
    yield provider
    await provider.close()
