"""Harness ``python``: any Python function as an agent, ``--harness python:module:function``.

Each attempt runs in a worker process of its own. The function is called with a task (``instruction``, ``workdir``,
``model``, ``base_url``, ``api_key``, ``sandbox``, …) and returns its answer; it may be async. It finds the model
at the address in the environment, so an agent that uses an OpenAI client needs no change. It acts through
``task.sandbox``; the process itself is not isolated, just as the code of the run is not.
"""

from __future__ import annotations

import asyncio
import difflib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field, field_validator

from rl_harness.contracts.common import API, Options
from rl_harness.contracts.harness import Endpoint, Harness, HarnessCapabilities, HarnessContext, HarnessResult
from rl_harness.errors import EngineError, HarnessError, Unavailable, UsageError
from rl_harness.records.episode import Termination
from rl_harness.rollout.harnesses.python_bridge import Answered, Failed, Found, Missing, Outcome, check, converse
from rl_harness.rollout.harnesses.python_process import ProtocolError, WorkerProcess

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


class PythonOptions(Options):
    target: str = Field(description="the agent, as module:function; --harness python:module:function sets it")
    path: Path = Field(Path(), description="the agent's working directory, which it can import from")
    python: str | None = Field(None, description="interpreter, such as another environment's; this run's own if unset")
    env: tuple[str, ...] = Field(
        (), description="further variables for the agent: NAME passes one on, NAME=value sets one"
    )
    output_limit: int = Field(16_000, ge=0, description="bytes of what the agent prints that the episode keeps")

    @field_validator("target")
    @classmethod
    def _two_names(cls, target: str) -> str:
        module, colon, function = target.partition(":")
        if module.endswith(".py") or "/" in module:
            raise ValueError(f"{module!r} is a file; give its module name, as agent:solve, and its folder as path")
        names = [*module.split("."), *function.split(".")]
        if not colon or not all(name.isidentifier() for name in names):
            raise ValueError(f"{target!r} is not of the form module:function")
        return target


class PythonHarness(Harness):
    """The function's return value ends the episode with ``answer``; what it raises with ``agent_error``, unless
    it was a limit or a failure of the gateway that the agent let through."""

    api = API
    argument = "target"
    Options = PythonOptions
    argument = "target"

    def __init__(self, options: PythonOptions) -> None:
        self._options = options

    @property
    def capabilities(self) -> HarnessCapabilities:
        return HarnessCapabilities(needs_sandbox=False)

    async def preflight(self) -> None:
        """Import the agent in a worker. Raises ``UsageError`` for a target that is not there."""
        absent = [entry for entry in self._options.env if "=" not in entry and entry not in os.environ]
        if absent:
            raise UsageError(f"harness.env: the environment has no variable {absent[0]}")
        try:
            worker = await self._start(None)
        except HarnessError as error:
            raise Unavailable(
                error.message, remedy="set harness.python to a Python interpreter and harness.path to a folder"
            ) from error
        try:
            async with asyncio.timeout(_IMPORT_TIMEOUT):
                outcome = await check(worker, self._options.target)
        except TimeoutError:
            raise UsageError(
                f"harness python: importing {self._options.target} did not end within {_IMPORT_TIMEOUT:g} s",
                remedy="an agent's module should only define it; its work belongs into the function",
            ) from None
        finally:
            await worker.close()
        if isinstance(outcome, Missing):
            raise _not_found(self._options, outcome)
        if not isinstance(outcome, Found):
            said = worker.output.text().strip()[-500:]
            raise UsageError(
                f"harness python: the worker {worker.how_it_ended()} while importing {self._options.target}: {said}"
            )

    async def run(self, context: HarnessContext) -> HarnessResult:
        worker = await self._start(context.endpoint)
        try:
            async with asyncio.timeout(context.seconds_left()):
                outcome = await converse(worker, context, self._options.target)
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
                f"harness python: cannot start {python} in {self._options.path.absolute()}: {error}"
            ) from error


def worker_environment(
    environment: Mapping[str, str], extra: tuple[str, ...], endpoint: Endpoint | None
) -> dict[str, str]:
    """The worker's whole environment: an allow-list of ours, what the user named, and the way to the model."""
    result = {name: value for name, value in environment.items() if name in PASSED_VARIABLES or name.startswith("LC_")}
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


def _not_found(options: PythonOptions, missing: Missing) -> UsageError:
    module, _, function = options.target.partition(":")
    folder = options.path.absolute()
    if missing.what == "module":
        top = module.partition(".")[0]
        here = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
        return UsageError(
            f"harness python: there is no module {module!r} in {folder} or the environment{_nearest(top, here)}",
            remedy="set harness.path to the folder that holds the module",
        )
    if missing.what == "function":
        return UsageError(
            f"harness python: module {module!r} has no {function!r}{_nearest(missing.error, missing.names)}"
        )
    if missing.what == "callable":
        return UsageError(f"harness python: {options.target} cannot be called: {missing.error}")
    return UsageError(f"harness python: importing {module!r} failed: {missing.error}")


def _nearest(name: str, names: set[str] | list[str]) -> str:
    near = difflib.get_close_matches(name, sorted(names), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
