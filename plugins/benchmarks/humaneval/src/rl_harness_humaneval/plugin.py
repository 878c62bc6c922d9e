"""Registers the benchmark; imports nothing heavy."""

from __future__ import annotations

from rl_harness.hookspecs import Extension, hookimpl


@hookimpl
def rl_harness_benchmarks() -> list[Extension]:
    return [
        Extension("humaneval", "rl_harness_humaneval.benchmark:HumanEval", "164 Python problems, graded in the sandbox")
    ]
