"""Serve one worker: give it its task, carry out what it asks of the sandbox, learn how the agent ended."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from rl_harness.contracts.harness import HarnessContext
from rl_harness.contracts.sandbox import DEFAULT_OUTPUT_LIMIT, Sandbox
from rl_harness.errors import SandboxError
from rl_harness.rollout.harnesses.chat_client import to_wire
from rl_harness.rollout.harnesses.exec_events import record_exec
from rl_harness.rollout.harnesses.python_process import ProtocolError, WorkerProcess

#: Sandbox operations of one agent that run at once; more wait in the socket.
_CONCURRENT = 32
#: Bytes that one reply may carry: base64 and two streams must fit into a frame of the worker's channel.
_DATA_LIMIT = 8 << 20


class _Exec(msgspec.Struct, tag_field="op", tag="exec"):
    id: int
    command: str | list[str]
    cwd: str | None = None
    env: dict[str, str] | None = None
    user: str | None = None
    stdin: bytes = b""
    timeout: float | None = None
    output_limit: int = DEFAULT_OUTPUT_LIMIT


class _ReadFile(msgspec.Struct, tag_field="op", tag="read_file"):
    id: int
    path: str


class _WriteFile(msgspec.Struct, tag_field="op", tag="write_file"):
    id: int
    path: str
    data: bytes
    mode: int = 0o644


class Answered(msgspec.Struct, tag_field="op", tag="result"):
    """The agent's function returned."""

    answer: str | None


class Failed(msgspec.Struct, tag_field="op", tag="failed"):
    """The agent's function raised. ``gateway``: the gateway's error code, or ``engine`` for its failure."""

    error: str
    traceback: str = ""
    gateway: str | None = None


class Missing(msgspec.Struct, tag_field="op", tag="missing"):
    """The target cannot be called; ``what`` is ``module``, ``function``, ``agents``, ``import`` or
    ``callable``."""

    what: str
    error: str
    names: list[str] = []
    traceback: str = ""


class Found(msgspec.Struct, tag_field="op", tag="found"):
    """The target of a check can be called."""


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """What turns the agents of a framework into functions of a task, in the worker: ``adapt(found, options)`` of
    ``module``, which lies in the package whose folder is ``folder``. The package runs under the agent's interpreter, so
    it imports nothing but the standard library and the framework. ``adapt`` raises ``TypeError`` for what is no agent.
    """

    folder: str
    module: str
    options: Mapping[str, Any]


_Request = _Exec | _ReadFile | _WriteFile
Outcome = Answered | Failed | Missing | Found
_DECODER: msgspec.json.Decoder[_Request | Outcome] = msgspec.json.Decoder(
    _Exec | _ReadFile | _WriteFile | Answered | Failed | Missing | Found
)


async def converse(
    worker: WorkerProcess, context: HarnessContext, target: str, adapter: Adapter | None = None
) -> Outcome | None:
    """Run the agent to its end; None when the worker ended without a word.

    Raises ``SandboxError`` when the sandbox failed, which no agent gets to hide, and ``ProtocolError``.
    """
    await worker.send(
        {
            "op": "run",
            "target": target,
            "adapter": adapter,
            "task": _task_fields(context),
            "has_sandbox": context.sandbox is not None,
        }
    )
    try:
        async with asyncio.TaskGroup() as group:
            return await _serve(worker, context, group)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def check(worker: WorkerProcess, target: str, adapter: Adapter | None = None) -> Outcome | None:
    """Import the target without calling it."""
    await worker.send({"op": "check", "target": target, "adapter": adapter})
    message = await _receive(worker)
    if isinstance(message, _Request):
        raise ProtocolError("the worker used the sandbox while it was only to import the agent")
    return message


async def _serve(worker: WorkerProcess, context: HarnessContext, group: asyncio.TaskGroup) -> Outcome | None:
    running: set[asyncio.Task[None]] = set()
    while True:
        message = await _receive(worker)
        if message is None or not isinstance(message, _Request):
            for task in running:
                task.cancel()
            return message
        if context.sandbox is None:
            raise ProtocolError("the worker used a sandbox that it was not given")
        if len(running) >= _CONCURRENT:
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        task = group.create_task(_answer(worker, context, context.sandbox, message))
        running.add(task)
        task.add_done_callback(running.discard)


async def _receive(worker: WorkerProcess) -> _Request | Outcome | None:
    data = await worker.receive()
    if data is None:
        return None
    try:
        return _DECODER.decode(data)
    except msgspec.DecodeError as error:
        raise ProtocolError(str(error)) from error


async def _answer(worker: WorkerProcess, context: HarnessContext, sandbox: Sandbox, request: _Request) -> None:
    try:
        value = await _carry_out(context, sandbox, request)
    except SandboxError as error:
        # A file that cannot be read is the agent's affair, as long as the sandbox itself lives.
        if isinstance(request, _Exec) or not await sandbox.alive():
            raise
        await worker.send({"id": request.id, "error": str(error), "kind": "OSError"})
    except Exception as error:
        await worker.send({"id": request.id, "error": str(error), "kind": type(error).__name__})
    else:
        await worker.send({"id": request.id, "value": value})


async def _carry_out(context: HarnessContext, sandbox: Sandbox, request: _Request) -> Any:
    match request:
        case _ReadFile(path=path):
            return await sandbox.read_file(path, limit=_DATA_LIMIT)
        case _WriteFile(path=path, data=data, mode=mode):
            await sandbox.write_file(path, data, mode=mode)
            return None
        case _Exec():
            left = max(context.seconds_left(), 0.001)
            result = await sandbox.exec(
                request.command,
                cwd=request.cwd,
                env=request.env,
                user=request.user,
                stdin=request.stdin,
                timeout=left if request.timeout is None else min(request.timeout, left),
                output_limit=min(request.output_limit, _DATA_LIMIT),
            )
            record_exec(context, request.command, result)
            return result


def _task_fields(context: HarnessContext) -> dict[str, Any]:
    task, endpoint = context.task, context.endpoint
    return {
        "name": task.name,
        "instruction": task.instruction,
        "workdir": task.workdir,
        "system": task.system,
        "examples": [to_wire(example) for example in task.examples],
        "max_turns": task.max_turns,
        "time_limit": task.time_limit,
        "model": endpoint.model if endpoint else None,
        "base_url": endpoint.base_url if endpoint else None,
        "api_key": endpoint.api_key if endpoint else None,
    }
