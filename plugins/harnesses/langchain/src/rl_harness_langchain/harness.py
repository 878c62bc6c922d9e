"""Harness ``langchain``: its options. The agent itself runs in a process of its own, see :mod:`.worker`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator
from rl_harness.rollout.harnesses.python import Adapter, WorkerHarness, WorkerOptions, checked_target


class LangChainOptions(WorkerOptions):
    agent: str = Field(
        description="a graph, a Runnable or a function that makes one, as module:attr; --harness langchain:… sets it"
    )
    input_key: str | None = Field(None, description="key of the agent's input that the instruction is given as")
    output_key: str | None = Field(None, description="key of the agent's output that holds the answer")
    recursion_limit: int | None = Field(None, ge=1, description="steps a graph may take; its own limit if unset")

    @field_validator("agent")
    @classmethod
    def _names(cls, agent: str) -> str:
        return checked_target(agent)


class LangChainHarness(WorkerHarness):
    """An agent made with LangChain or LangGraph, in a process of its own for each attempt."""

    Options = LangChainOptions
    argument = "agent"
    label = "langchain"

    def __init__(self, options: LangChainOptions) -> None:
        super().__init__(options)
        self._choice = options

    @property
    def target(self) -> str:
        return self._choice.agent

    @property
    def adapter(self) -> Adapter:
        return Adapter(
            folder=str(Path(__file__).parent),
            module="rl_harness_langchain.worker",
            options=self._choice.model_dump(include={"agent", "input_key", "output_key", "recursion_limit"}),
        )
