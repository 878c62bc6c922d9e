"""Harness plugins: run an agent on one task.

A harness gets an instruction, perhaps a sandbox, and the address of the gateway with a key for one session. It
never sees the task's directory or its verifier, and its solution only if it is there to check tasks. Its exit is
never a grade.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from rl_harness.contracts.common import Plugin
from rl_harness.contracts.sandbox import HostMount, Sandbox, SandboxCapabilities, SetupStep
from rl_harness.records.episode import Termination
from rl_harness.records.turn import Message

#: Turns an agent gets when neither the run, the task nor the benchmark says.
DEFAULT_MAX_TURNS = 20


class HarnessCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """``protocols`` it speaks to the gateway; empty for a harness that calls no model (``oracle``, ``nop``).

    ``calls_tools``: it sends tools with its model calls, so the model's renderer must know what to do with them.
    ``needs_sandbox``: it cannot attempt a task without one. ``acts`` False: its agent only gives an answer, so a task
    that is graded on what is left in the sandbox is refused. ``needs_solution``: it is given the task's solution
    directory (only a harness that checks tasks asks for that). ``inside``: its agent runs in the sandbox and calls the
    model from there, so its endpoint is an address inside, which needs no network.
    """

    protocols: frozenset[str] = frozenset({"chat"})
    calls_tools: bool = False
    needs_sandbox: bool = True
    acts: bool = True
    needs_solution: bool = False
    inside: bool = False


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where the agent's model is: ``base_url`` ends in ``/v1``; ``api_key`` opens exactly one session. ``keyless_url``
    is the same session at an address of its own that needs no key and is as secret as one, for an agent that cannot be
    given a key."""

    base_url: str
    api_key: str
    model: str
    keyless_url: str = ""


class AgentTask(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent may know. ``system`` and ``examples`` come from the benchmark, ``examples`` as real turns."""

    name: str
    instruction: str
    workdir: str = "/app"
    system: str | None = None
    examples: tuple[Message, ...] = ()
    max_turns: int = DEFAULT_MAX_TURNS
    time_limit: float = 600.0


class HarnessContext:
    """Everything one attempt needs. ``deadline`` is on :func:`time.monotonic`'s clock."""

    def __init__(
        self,
        *,
        task: AgentTask,
        sandbox: Sandbox | None,
        endpoint: Endpoint | None,
        deadline: float,
        solution: Path | None = None,
        solution_env: Mapping[str, str] = MappingProxyType({}),
        on_event: Callable[[str, Mapping[str, Any]], None] = lambda kind, data: None,
        http: Any = None,
    ) -> None:
        self.task = task
        self.sandbox = sandbox
        self.endpoint = endpoint
        self.deadline = deadline
        #: The task's solution directory, and the variables its script runs with; for ``needs_solution`` only.
        self.solution = solution
        self.solution_env = solution_env
        #: Record an event of the episode (an exec, a warning) for reports.
        self.on_event = on_event
        #: A shared :class:`aiohttp.ClientSession` with keep-alive, for harnesses that run in this process.
        self.http = http

    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()


class HarnessResult(msgspec.Struct, frozen=True, kw_only=True):
    """How the agent ended; ``answer`` is its final text, which tasks without a sandbox are graded on."""

    termination: Termination
    answer: str | None = None
    detail: str = ""


class Harness(Plugin):
    """Stateless between episodes: :meth:`run` is called concurrently.

    ``setup`` installs what the agent needs inside its sandbox, after the task's own set-up and before any episode: once
    for each environment where the provider has snapshots. A class attribute, or a property where it depends on options.
    The sandbox of a separate verifier does not get it. ``mounts`` shows the agent's sandbox, and no other, directories
    of this machine, where the provider can; they must be there once :meth:`start` has returned.
    """

    setup: tuple[SetupStep, ...] = ()
    mounts: tuple[HostMount, ...] = ()

    @property
    @abc.abstractmethod
    def capabilities(self) -> HarnessCapabilities: ...

    def adapt(self, sandbox: SandboxCapabilities) -> None:
        """Told what the run's sandboxes can do, before ``preflight`` and before ``setup`` and ``mounts`` are read; not
        called in a run without sandboxes. Raises :class:`~rl_harness.errors.Unsupported` for what cannot be."""

    async def start(self) -> None:
        """Once per run, before the first episode."""

    @abc.abstractmethod
    async def run(self, context: HarnessContext) -> HarnessResult:
        """Attempt the task. Returns for every end the agent itself reached, with its own termination. The
        caller enforces the deadline by cancellation as well. A ``SandboxError``, ``EngineError`` or
        ``HarnessError`` passes through and leaves the episode unscored; any other exception is recorded as
        ``agent_error`` with its text."""

    async def close(self) -> None:
        """Once per run, after the last episode."""
