"""What a LangChain agent may be, what it is given, and what of its output is the answer: no process, no model."""

from __future__ import annotations

import asyncio
import contextlib
import typing
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("langgraph", reason="needs langchain: the module langgraph is not installed")

from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, chain
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import interrupt
from pydantic import BaseModel
from rl_harness_langchain.worker import StepLimit, adapt

pytestmark = pytest.mark.needs("langchain")

OPTIONS = {"agent": "mine:agent", "input_key": None, "output_key": None, "recursion_limit": None}


async def attempt(found: Any, **options: Any) -> str | None:
    task = SimpleNamespace(
        name="t", instruction="hello", model="m", max_turns=2, sandbox=None, workdir="/app", system=None, examples=[]
    )
    return await adapt(found, {**OPTIONS, **options})(task)


def reply(state: MessagesState) -> dict[str, Any]:
    return {"messages": [AIMessage(f"you said: {state['messages'][-1].text}")]}


def builder(end: str = END, node: Any = reply) -> Any:
    return StateGraph(MessagesState).add_node("reply", node).add_edge(START, "reply").add_edge("reply", end)


GRAPH = builder().compile()
LOOP = builder(end="reply").compile()


class Own(typing.TypedDict):  # pydantic has no schema for this one on Python 3.11
    question: str


class Out(BaseModel):
    number: int


def function(config: Any) -> Any:
    return GRAPH


async def async_function() -> Any:
    return builder()


def function_with_a_loop_of_its_own() -> Any:
    return asyncio.run(async_function())


@contextlib.asynccontextmanager
async def context_manager(given: Any) -> Any:
    yield GRAPH | RunnableLambda(lambda out: sorted(given["configurable"]))


def wishes(task: Any, tools: Any, model: str, more: int = 3) -> Any:
    names = [tool.name for tool in tools]
    return GRAPH | RunnableLambda(lambda out: f"{task.name} {model} {more} {names}")


@chain
def shout(text: str) -> str:
    return text.upper()


@pytest.mark.parametrize(
    ("found", "answer"),
    [
        pytest.param(GRAPH, "you said: hello", id="graph"),
        pytest.param(builder(), "you said: hello", id="builder"),
        pytest.param(builder().compile(checkpointer=InMemorySaver()), "you said: hello", id="checkpointer"),
        pytest.param(function, "you said: hello", id="function"),
        pytest.param(function_with_a_loop_of_its_own, "you said: hello", id="function with a loop"),
        pytest.param(async_function, "you said: hello", id="async function"),
        pytest.param(
            context_manager,
            '["model", "model_provider", "sandbox", "task", "thread_id", "tools"]',
            id="context manager",
        ),
        pytest.param(wishes, "t m 3 ['shell', 'read_file', 'write_file']", id="named parameters"),
        pytest.param(
            ChatPromptTemplate.from_template("Q: {question}") | RunnableLambda(lambda prompt: prompt.to_string()),
            "Human: Q: hello",
            id="prompt",
        ),
        pytest.param(shout, "HELLO", id="text"),
        pytest.param(
            StateGraph(Own).add_node("n", lambda state: {"question": "!"}).add_edge(START, "n"), "!", id="own state"
        ),
        pytest.param(RunnableLambda(lambda text: Out(number=3)), '{"number":3}', id="model of pydantic"),
        pytest.param(RunnableLambda(lambda text: [HumanMessage("q"), AIMessage("a")]), "a", id="messages"),
        pytest.param(
            RunnableLambda(lambda text: AIMessage([{"type": "text", "text": "x"}, {"type": "text", "text": "y"}])),
            "xy",
            id="blocks",
        ),
        pytest.param(RunnableLambda(lambda text: None), None, id="nothing"),
    ],
)
async def test_an_agent_is_whatever_makes_a_runnable(found: Any, answer: str | None) -> None:
    assert await attempt(found) == answer


async def test_keys_of_input_and_output_can_be_chosen() -> None:
    echo: Runnable[Any, Any] = RunnableLambda(lambda given: {"other": 1, "said": given["job"] + "!"})
    assert await attempt(echo, input_key="job", output_key="said") == "hello!"
    with pytest.raises(TypeError, match="output_key is 'sad', but the agent's output has the keys other, said"):
        await attempt(echo, input_key="job", output_key="sad")


@pytest.mark.parametrize(
    ("found", "limit", "steps"),
    [(LOOP, 3, 3), (LOOP.with_config(recursion_limit=4), None, 4), (LOOP, None, 45)],
    ids=["chosen", "the graph's own", "by the turns"],
)
async def test_a_graph_takes_no_more_steps_than_it_may(found: Any, limit: int | None, steps: int) -> None:
    with pytest.raises(StepLimit, match=f"Recursion limit of {steps} ") as raised:
        await attempt(found, recursion_limit=limit)
    assert raised.value.code == "turn_limit"


class Two(typing.TypedDict):
    a: str
    b: str


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (lambda: 3, "mine:agent made int, not a Runnable"),
        (lambda task, wish: GRAPH, "mine:agent wants 'wish'; it can have task, config, tools, model"),
        (
            StateGraph(Two).add_node("n", lambda state: state).add_edge(START, "n"),
            "input has the keys a, b; set harness.input_key",
        ),
        (
            builder(node=lambda state: interrupt("?")).compile(checkpointer=InMemorySaver()),
            "interrupted to wait for a person",
        ),
    ],
)
async def test_what_cannot_be_is_said(found: Any, message: str) -> None:
    with pytest.raises((TypeError, RuntimeError), match=message):
        await attempt(found)


def test_what_can_be_no_agent_is_refused_before_it_is_run() -> None:
    with pytest.raises(TypeError, match="of type int, and neither a Runnable nor a function that makes one"):
        adapt(3, OPTIONS)
