"""Harness ``python``: any Python function as an agent, ``--harness python:module:function``.

Each attempt runs in a worker process of its own. The function is called with a task (``instruction``, ``workdir``,
``model``, ``base_url``, ``api_key``, ``sandbox``, …) and returns its answer; it may be async. It finds the model
at the address in the environment, so an agent that uses an OpenAI client needs no change. It acts through
``task.sandbox``; the process itself is not isolated, just as the code of the run is not.

:class:`WorkerHarness` is the base for harnesses of other frameworks, whose agents run in the same way.
"""

from __future__ import annotations

import abc
import asyncio
import difflib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from pydantic import Field, field_validator

from rl_harness.contracts.common import API, Options
from rl_harness.contracts.harness import Endpoint, Harness, HarnessCapabilities, HarnessContext, HarnessResult
from rl_harness.errors import EngineError, HarnessError, Unavailable, UsageError
from rl_harness.records.episode import Termination
from rl_harness.rollout.harnesses.python_bridge import (
    Adapter,
    Answered,
    Failed,
    Found,
    Missing,
    Outcome,
    check,
    converse,
)
from rl_harness.rollout.harnesses.python_process import ProtocolError, WorkerProcess

__all__ = ["Adapter", "PythonHarness", "PythonOptions", "WorkerHarness", "WorkerOptions", "checked_target"]

#: Variables of this process that a worker gets: what programs need to run, nothing that could be a secret.
PASSED_VARIABLES = frozenset(
    {
        "HOME",
        "LANG",
        "LANGUAGE",
        "LD_LIBRARY_PATH",
        "LOGNAME",
        "OMP_NUM_THREADS",
        "PATH",
        "PYTHONPATH",
        "REQUESTS_CA_BUNDLE",
        "SSL_CERT_DIR",
        "SSL_CERT_FILE",
        "TMPDIR",
        "TZ",
        "USER",
        "VIRTUAL_ENV",
        "XDG_CACHE_HOME",
    }
)
#: Importing an agent may load large frameworks from a cold disk.
_IMPORT_TIMEOUT = 120.0
#: Seconds an agent that has answered gets to leave on its own: exit handlers, traces to flush.
_EXIT_GRACE = 5.0


#: Where the model is while an agent is only imported: clients made then find a key, and nobody behind the address.
_NOWHERE = Endpoint(base_url="http://127.0.0.1:9/v1", api_key="none", model="none")


class WorkerOptions(Options):
    """How the process of an agent is started."""

    path: Path = Field(Path(), description="the agent's working directory, which it can import from")
    python: str | None = Field(None, description="interpreter, such as another environment's; this run's own if unset")
    env: tuple[str, ...] = Field(
        (), description="further variables for the agent: NAME passes one on, NAME=value sets one"
    )
    output_limit: int = Field(16_000, ge=0, description="bytes of what the agent prints that the episode keeps")


def checked_target(target: str) -> str:
    """``module:name`` or ``module``; raises ``ValueError`` for another form."""
    module, colon, name = target.partition(":")
    if module.endswith(".py") or "/" in module:
        raise ValueError(f"{module!r} is a file; give its module name, as agent:solve, and its folder as path")
    if not all(part.isidentifier() for part in [*module.split("."), *(name.split(".") if colon else ())]):
        raise ValueError(f"{target!r} is not of the form module:name, or module for its marked agent")
    return target


class PythonOptions(WorkerOptions):
    target: str = Field(
        description="the agent, as module:function, or module for its marked one; --harness python:… sets it"
    )

    @field_validator("target")
    @classmethod
    def _two_names(cls, target: str) -> str:
        return checked_target(target)


class WorkerHarness(Harness):
    """Each attempt calls a function in a process of its own. Its return value ends the episode with ``answer``; what it
    raises with ``agent_error``, unless it was a limit or a failure of the gateway that the agent let through."""

    api = API
    #: Its name in messages.
    label: ClassVar[str]

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options

    @property
    @abc.abstractmethod
    def target(self) -> str:
        """The agent, as :func:`checked_target` wants it."""

    @property
    def adapter(self) -> Adapter | None:
        """What makes a function of the target; None for a target that is one."""
        return None

    @property
    def capabilities(self) -> HarnessCapabilities:
        return HarnessCapabilities(needs_sandbox=False, protocols=frozenset({"chat", "responses", "messages"}))

    async def preflight(self) -> None:
        """Import the agent in a worker. Raises ``UsageError`` for a target that is not there."""
        absent = [entry for entry in self._options.env if "=" not in entry and entry not in os.environ]
        if absent:
            raise UsageError(f"harness.env: the environment has no variable {absent[0]}")
        try:
            worker = await self._start(_NOWHERE)
        except HarnessError as error:
            raise Unavailable(
                error.message, remedy="set harness.python to a Python interpreter and harness.path to a folder"
            ) from error
        try:
            async with asyncio.timeout(_IMPORT_TIMEOUT):
                outcome = await check(worker, self.target, self.adapter)
        except TimeoutError:
            raise UsageError(
                f"harness {self.label}: importing {self.target} did not end within {_IMPORT_TIMEOUT:g} s",
                remedy="an agent's module should only define it; its work belongs into the function",
            ) from None
        finally:
            await worker.close()
        if isinstance(outcome, Missing):
            raise self._not_found(outcome)
        if not isinstance(outcome, Found):
            said = worker.output.text().strip()[-500:]
            raise UsageError(
                f"harness {self.label}: the worker {worker.how_it_ended()} while importing {self.target}: {said}"
            )

    async def run(self, context: HarnessContext) -> HarnessResult:
        worker = await self._start(context.endpoint)
        try:
            async with asyncio.timeout(context.seconds_left()):
                outcome = await converse(worker, context, self.target, self.adapter)
            await worker.ended(min(_EXIT_GRACE, context.seconds_left()))
        except TimeoutError:
            return HarnessResult(termination=Termination.TIME_LIMIT, detail="the agent was stopped at its deadline")
        except ProtocolError as error:
            return HarnessResult(
                termination=Termination.AGENT_ERROR, detail=f"the agent broke its channel to the harness: {error}"
            )
        finally:
            await worker.close()
            if text := worker.output.text():
                context.on_event("agent_output", {"text": text, "truncated": worker.output.truncated})
        if outcome is None:
            return HarnessResult(
                termination=Termination.AGENT_ERROR, detail=f"the agent's process {worker.how_it_ended()}"
            )
        return _result(context, outcome)

    async def _start(self, endpoint: Endpoint | None) -> WorkerProcess:
        python = self._options.python or sys.executable
        try:
            return await WorkerProcess.start(
                python,
                cwd=self._options.path,
                env=worker_environment(os.environ, self._options.env, endpoint),
                output_limit=self._options.output_limit,
            )
        except OSError as error:
            raise HarnessError(
                f"harness {self.label}: cannot start {python} in {self._options.path.absolute()}: {error}"
            ) from error

    def _not_found(self, missing: Missing) -> UsageError:
        module = self.target.partition(":")[0]
        folder = self._options.path.absolute()
        if missing.what == "module":
            top = module.partition(".")[0]
            here = {path.stem for path in folder.glob("*.py")}
            here |= {path.parent.name for path in folder.glob("*/__init__.py")}
            return UsageError(
                f"harness {self.label}: there is no module {module!r} in {folder} or the environment"
                f"{_nearest(top, here)}",
                remedy="set harness.path to the folder that holds the module",
            )
        if missing.what == "function":
            return UsageError(
                f"harness {self.label}: module {module!r} has no {missing.error!r}"
                f"{_nearest(missing.error, missing.names)}"
            )
        if missing.what == "agents":
            return UsageError(
                f"harness {self.label}: {module!r} {missing.error}",
                remedy=f"name one, as {module}:name, or mark one with @rl_harness.agent",
            )
        if missing.what == "callable":
            return UsageError(f"harness {self.label}: {self.target} cannot be called: {missing.error}")
        return UsageError(f"harness {self.label}: importing {module!r} failed: {missing.error}")


class PythonHarness(WorkerHarness):
    """A function of the user's own."""

    Options = PythonOptions
    argument = "target"
    label = "python"

    def __init__(self, options: PythonOptions) -> None:
        super().__init__(options)
        self._target = options.target

    @property
    def target(self) -> str:
        return self._target


def worker_environment(
    environment: Mapping[str, str], extra: tuple[str, ...], endpoint: Endpoint | None
) -> dict[str, str]:
    """The worker's whole environment: an allow-list of ours, what the user named, and the way to the model."""
    result = {name: value for name, value in environment.items() if name in PASSED_VARIABLES or name.startswith("LC_")}
    # Else the OpenAI Agents SDK would send what happens, with the session's key, to a service that knows neither.
    result["OPENAI_AGENTS_DISABLE_TRACING"] = "1"
    for entry in extra:
        name, equals, value = entry.partition("=")
        if equals:
            result[name] = value
        elif name in environment:
            result[name] = environment[name]
    result["PYTHONUNBUFFERED"] = "1"
    if endpoint is not None:
        result |= {
            "OPENAI_BASE_URL": endpoint.base_url,
            "OPENAI_API_BASE": endpoint.base_url,
            "OPENAI_API_KEY": endpoint.api_key,
            "ANTHROPIC_BASE_URL": endpoint.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": endpoint.api_key,
            "RL_HARNESS_MODEL": endpoint.model,
        }
    return result


def _result(context: HarnessContext, outcome: Outcome) -> HarnessResult:
    match outcome:
        case Answered(answer=answer):
            return HarnessResult(termination=Termination.ANSWER, answer=answer)
        case Missing(error=error):
            return HarnessResult(termination=Termination.AGENT_ERROR, detail=f"the agent cannot be imported: {error}")
        case Found():
            return HarnessResult(termination=Termination.AGENT_ERROR, detail="the worker did not run the agent")
        case Failed(error=error, traceback=traceback, gateway=gateway):
            if traceback:
                context.on_event("agent_traceback", {"text": traceback})
            if gateway == "engine":
                raise EngineError(f"a model call of the agent failed: {error}")
            limits = {"turn_limit": Termination.TURN_LIMIT, "context_length_exceeded": Termination.TOKEN_LIMIT}
            return HarnessResult(termination=limits.get(gateway or "", Termination.AGENT_ERROR), detail=error)


def _nearest(name: str, names: set[str] | list[str]) -> str:
    near = difflib.get_close_matches(name, sorted(names), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
