"""Registers the provider; imports nothing heavy."""

from __future__ import annotations

from rl_harness.hookspecs import Extension, hookimpl


@hookimpl
def rl_harness_sandboxes() -> list[Extension]:
    return [Extension("e2b", "rl_harness_e2b.provider:E2BProvider", "machines on E2B: snapshots, forks, pause")]
