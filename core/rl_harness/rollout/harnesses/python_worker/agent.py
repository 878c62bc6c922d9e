"""Call the agent's function with its task, and report how it ended."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from typing import Any

from .adapter import load_adapter, provide
from .channel import Channel
from .failures import describe, full_traceback, gateway_failure
from .finding import Missing, find
from .task import Sandbox, Task

Function = Callable[[Task], Any]


def run(sock: socket.socket) -> None:
    """Serve the one job of this process: ``check`` a target, or ``run`` it on a task."""
    channel = Channel(sock)
    job = channel.receive()
    try:
        function = resolve(job["target"], job["adapter"])
    except Missing as missing:
        channel.send(missing.message)
        return
    if job["op"] == "check":
        channel.send({"op": "found"})
        return
    channel.start_reader()
    channel.send(_attempt(function, Task(job["task"], Sandbox(channel) if job["has_sandbox"] else None)))


def resolve(target: str, adapter: dict[str, Any] | None = None) -> Function:
    """The function that is called with the task. Raises :class:`Missing`."""
    if adapter is not None:
        provide(adapter)
    found = find(target)
    if adapter is None:
        if not callable(found):
            raise Missing("callable", f"it is of type {type(found).__name__}")
        function: Function = found
        return function
    try:
        return load_adapter(adapter)(found, adapter["options"])
    except ImportError as error:
        raise Missing("import", describe(error), traceback=full_traceback(error)) from None
    except TypeError as error:
        raise Missing("callable", str(error)) from None


def _attempt(function: Function, task: Task) -> dict[str, Any]:
    try:
        answer = function(task)
        if isinstance(answer, Awaitable):
            answer = _awaited(answer)
    except SystemExit as error:
        return {"op": "failed", "error": f"the agent called sys.exit({error.code!r})"}
    except BaseException as error:
        return {
            "op": "failed",
            "error": describe(error),
            "traceback": full_traceback(error),
            "gateway": gateway_failure(error, task.base_url),
        }
    if answer is None or isinstance(answer, str):
        return {"op": "result", "answer": answer}
    kind = type(answer).__name__
    return {"op": "failed", "error": f"the agent returned {kind}; an agent returns its answer as str, or None"}


def _awaited(awaitable: Awaitable[Any]) -> Any:
    import asyncio

    async def wait() -> Any:
        return await awaitable

    return asyncio.run(wait())
