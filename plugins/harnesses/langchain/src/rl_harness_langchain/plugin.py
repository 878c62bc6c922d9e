"""Registers the harness; imports nothing heavy."""

from __future__ import annotations

from rl_harness.hookspecs import Extension, hookimpl


@hookimpl
def rl_harness_harnesses() -> list[Extension]:
    return [
        Extension(
            "langchain",
            "rl_harness_langchain.harness:LangChainHarness",
            "a LangChain agent or LangGraph graph, as langchain:module:attr",
        )
    ]
