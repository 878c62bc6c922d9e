"""The plugins that ship with the core, registered through the same hooks as anyone's."""

from __future__ import annotations

from rl_harness.hookspecs import Extension, hookimpl


@hookimpl
def rl_harness_harnesses() -> list[Extension]:
    return [
        Extension(
            "shell", "rl_harness.rollout.harnesses.shell:ShellHarness", "multi-turn agent acting through a shell"
        ),
        Extension("chat", "rl_harness.rollout.harnesses.chat:ChatHarness", "one model call a task, no sandbox needed"),
        Extension(
            "python",
            "rl_harness.rollout.harnesses.python:PythonHarness",
            "any Python function, as python:module:function",
        ),
        Extension("oracle", "rl_harness.rollout.harnesses.oracle:OracleHarness", "runs the task's own solution"),
        Extension("nop", "rl_harness.rollout.harnesses.nop:NopHarness", "does nothing; must not pass any task"),
    ]


@hookimpl
def rl_harness_sandboxes() -> list[Extension]:
    return [
        Extension("local", "rl_harness.sandboxes.local:LocalProvider", "Linux namespaces on this machine, no daemon"),
        Extension("process", "rl_harness.sandboxes.process:ProcessProvider", "plain processes, NO isolation"),
    ]


@hookimpl
def rl_harness_engines() -> list[Extension]:
    return [
        Extension("api", "rl_harness.inference.api:ApiEngine", "a model behind an OpenAI-compatible address"),
        Extension(
            "completions",
            "rl_harness.inference.completions:CompletionsEngine",
            "a server of token ids, as vLLM is, at its completions address",
        ),
    ]


@hookimpl
def rl_harness_renderers() -> list[Extension]:
    return [
        Extension(
            "template", "rl_harness.gateway.renderers.template:TemplateRenderer", "the model folder's own chat template"
        ),
        Extension(
            "chatml",
            "rl_harness.gateway.renderers.chatml:ChatMLRenderer",
            "ChatML with a tool template, for models whose own ignores tools",
        ),
    ]


@hookimpl
def rl_harness_algorithms() -> list[Extension]:
    return [
        Extension("grpo", "rl_harness.learning.grpo:GRPO", "group-relative policy optimisation, clipped"),
        Extension(
            "reinforce",
            "rl_harness.learning.reinforce:Reinforce",
            "every episode against a running baseline; needs no groups",
        ),
    ]


@hookimpl
def rl_harness_benchmarks() -> list[Extension]:
    return [
        Extension(
            "shell-arithmetic",
            "rl_harness.tasks.registry:ShellArithmetic",
            "two-turn and one-turn arithmetic with a shell",
        ),
        Extension("shell-basics", "rl_harness.tasks.registry:ShellBasics", "small real jobs with a shell"),
    ]
