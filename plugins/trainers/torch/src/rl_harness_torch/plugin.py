"""Registers the torch engine and backend; imports nothing heavy."""

from __future__ import annotations

from rl_harness.hookspecs import Extension, hookimpl


@hookimpl
def rl_harness_engines() -> list[Extension]:
    return [
        Extension("torch", "rl_harness_torch.engine:TorchEngine", "embedded engine: decoder-only transformers models")
    ]


@hookimpl
def rl_harness_backends() -> list[Extension]:
    return [Extension("torch", "rl_harness_torch.backend:TorchBackend", "single-device training with AdamW")]
