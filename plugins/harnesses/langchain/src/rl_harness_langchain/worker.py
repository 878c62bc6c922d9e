"""In the agent's process: make the graph, give it the task, and take its last message as the answer.

Nothing of rl-harness is imported here, only langchain-core: the interpreter may be another environment's.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import typing
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.runnables import Runnable, RunnableConfig
from pydantic import BaseModel

from rl_harness_langchain import tools

#: Steps of a graph for each turn of its agent, where nobody set a limit: more than any loop of model and tools takes.
_STEPS_A_TURN = 10


class StepLimit(Exception):
    """A graph took as many steps as it may. ``code`` is how the harness knows a limit."""

    code = "turn_limit"


def adapt(found: Any, options: Mapping[str, Any]) -> Callable[[Any], Awaitable[str | None]]:
    """The function of a task that runs what was found. Raises ``TypeError`` for what can be no agent."""
    if not isinstance(found, Runnable) and not callable(found) and not hasattr(found, "compile"):
        raise TypeError(f"it is of type {type(found).__name__}, and neither a Runnable nor a function that makes one")

    async def attempt(task: Any) -> str | None:
        tools.bind(task)
        config = _config(task)
        async with contextlib.AsyncExitStack() as stack:
            runnable = await _make(found, task, config, stack, options["agent"])
            if options["recursion_limit"] is not None:
                config["recursion_limit"] = options["recursion_limit"]
            elif "recursion_limit" not in (getattr(runnable, "config", None) or {}):
                config["recursion_limit"] = 25 + _STEPS_A_TURN * task.max_turns
            try:
                output = await runnable.ainvoke(_input(runnable, task, options["input_key"]), config)
            except Exception as error:
                if type(error).__name__ == "GraphRecursionError":  # without needing langgraph
                    raise StepLimit(str(error)) from error
                raise
            return _answer(output, options["output_key"])

    return attempt


def _config(task: Any) -> RunnableConfig:
    """What a graph finds in ``config["configurable"]``; a configurable chat model takes its name from there."""
    return {
        "configurable": {
            "thread_id": uuid.uuid4().hex,
            "model": task.model,
            "model_provider": "openai",
            "task": task,
            "sandbox": task.sandbox,
            "tools": tools.sandbox_tools(),
        }
    }


async def _make(
    found: Any, task: Any, config: RunnableConfig, stack: contextlib.AsyncExitStack, name: str
) -> Runnable[Any, Any]:
    made = found
    if not isinstance(made, Runnable) and callable(made):
        # In a thread, where it may run an event loop of its own, as factories that ask a server for tools do.
        made = await asyncio.to_thread(made, **_arguments(made, task, config, name))
        if inspect.isawaitable(made):
            made = await made
        if hasattr(made, "__aenter__") and not isinstance(made, Runnable):
            made = await stack.enter_async_context(made)
    if not isinstance(made, Runnable) and hasattr(made, "compile"):
        made = made.compile()
    if not isinstance(made, Runnable):
        raise TypeError(
            f"{name} made {type(made).__name__}, not a Runnable; a function that answers itself is for --harness python"
        )
    return made


def _arguments(function: Callable[..., Any], task: Any, config: RunnableConfig, name: str) -> dict[str, Any]:
    """A factory names what it wants; where it has a single parameter of another name, that is the configuration."""
    given = {"task": task, "config": config, "tools": tools.sandbox_tools(), "model": task.model}
    wanted = {}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind in named]
    for parameter in parameters:
        if parameter.name in given:
            wanted[parameter.name] = given[parameter.name]
        elif parameter.default is parameter.empty:
            if len(parameters) > 1:
                raise TypeError(f"{name} wants {parameter.name!r}; it can have {', '.join(given)}")
            wanted[parameter.name] = config
    return wanted


def _input(runnable: Runnable[Any, Any], task: Any, key: str | None) -> Any:
    """The instruction in the form that the input's schema asks for."""
    if key is not None:
        return {key: task.instruction}
    keys = _input_keys(runnable)
    if keys is None:
        return task.instruction
    if "messages" in keys:
        return {"messages": [HumanMessage(task.instruction)]}
    if len(keys) != 1:
        raise TypeError(f"the agent's input has the keys {', '.join(keys)}; set harness.input_key to the instruction's")
    return {keys[0]: task.instruction}


def _input_keys(runnable: Any) -> list[str] | None:
    """The keys that the input needs; None for one that is no mapping, or says nothing: a text will do for a model."""
    while (inner := getattr(runnable, "first", None) or getattr(runnable, "bound", None)) is not None:
        runnable = inner
    state = getattr(getattr(runnable, "builder", None), "input_schema", None)
    if state is not None:  # pydantic refuses the schema of a TypedDict of Python 3.11's own
        try:
            return list(typing.get_type_hints(state))
        except NameError:  # of a type that is imported for type checkers only
            return list(state.__annotations__)
    schema = runnable.get_input_jsonschema()
    if "$ref" in schema:
        schema = schema["$defs"][schema["$ref"].rpartition("/")[2]]
    properties = schema.get("properties")
    return schema.get("required") or list(properties) if properties else None


def _answer(output: Any, key: str | None) -> str | None:
    if isinstance(output, Mapping) and output.get("__interrupt__"):
        raise RuntimeError("the graph was interrupted to wait for a person, and there is none")
    if key is not None:
        if not isinstance(output, Mapping) or key not in output:
            kind = f"the keys {', '.join(map(str, output))}" if isinstance(output, Mapping) else type(output).__name__
            raise TypeError(f"harness.output_key is {key!r}, but the agent's output has {kind}")
        output = output[key]
    elif isinstance(output, Mapping) and "messages" in output:
        output = output["messages"]
    if isinstance(output, list) and all(isinstance(item, BaseMessage) for item in output):
        output = next((message for message in reversed(output) if isinstance(message, AIMessage)), None)
    if isinstance(output, Mapping) and len(output) == 1:
        (output,) = output.values()
    if output is None or isinstance(output, str):
        return output
    if isinstance(output, BaseMessage):
        return str(output.text)
    if isinstance(output, BaseModel):
        return output.model_dump_json()
    return json.dumps(output, default=str)
