"""Find the agent's function, call it with its task, and report how it ended."""

from __future__ import annotations

import importlib
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from .channel import Channel
from .failures import describe, full_traceback, gateway_failure
from .task import Sandbox, Task

Function = Callable[[Task], Any]


class Missing(Exception):
    """The target cannot be called; ``message`` is what the harness is told."""

    def __init__(self, what: str, error: str, **details: Any) -> None:
        super().__init__(error)
        self.message = {"op": "missing", "what": what, "error": error, **details}


def run(sock: socket.socket) -> None:
    """Serve the one job of this process: ``check`` a target, or ``run`` it on a task."""
    channel = Channel(sock)
    job = channel.receive()
    try:
        function = resolve(job["target"])
    except Missing as missing:
        channel.send(missing.message)
        return
    if job["op"] == "check":
        channel.send({"op": "found"})
        return
    channel.start_reader()
    channel.send(_attempt(function, Task(job["task"], Sandbox(channel) if job["has_sandbox"] else None)))


def resolve(target: str) -> Function:
    """The function named ``module:function``. Raises :class:`Missing`."""
    module_name, _, attribute = target.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except BaseException as error:
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent is not None and f"{module_name}.".startswith(f"{absent}."):
            raise Missing("module", str(error)) from None
        raise Missing("import", describe(error), traceback=full_traceback(error)) from None
    for name in attribute.split("."):
        if not hasattr(found, name):
            names = [other for other in dir(found) if not other.startswith("_") and callable(getattr(found, other))]
            raise Missing("function", name, names=names)
        found = getattr(found, name)
    if not callable(found):
        raise Missing("callable", f"it is of type {type(found).__name__}")
    function: Function = found
    return function


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
