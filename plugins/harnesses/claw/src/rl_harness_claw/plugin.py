"""Registers the assistants; imports nothing heavy."""

from __future__ import annotations

from rl_harness.hookspecs import Extension, hookimpl


@hookimpl
def rl_harness_harnesses() -> list[Extension]:
    return [
        Extension("openclaw", "rl_harness_claw.openclaw:OpenClaw", "OpenClaw, asked once, in the sandbox"),
        Extension("zeroclaw", "rl_harness_claw.zeroclaw:ZeroClaw", "ZeroClaw, asked once, in the sandbox"),
        Extension("nanobot", "rl_harness_claw.nanobot:Nanobot", "nanobot, asked once, in the sandbox"),
    ]
