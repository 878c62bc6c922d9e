"""Registers the agents; imports nothing heavy."""

from __future__ import annotations

from rl_harness.hookspecs import Extension, hookimpl

_AGENTS = "rl_harness_cli_agents.agents"


@hookimpl
def rl_harness_harnesses() -> list[Extension]:
    return [
        Extension("claude-code", f"{_AGENTS}.claude_code:ClaudeCode", "Anthropic's Claude Code, in the sandbox"),
        Extension("codex", f"{_AGENTS}.codex:Codex", "OpenAI's Codex, in the sandbox"),
        Extension("opencode", f"{_AGENTS}.opencode:OpenCode", "OpenCode, in the sandbox"),
        Extension("qwen-code", f"{_AGENTS}.qwen_code:QwenCode", "Qwen Code, in the sandbox"),
        Extension("pi", f"{_AGENTS}.pi:Pi", "the pi coding agent, in the sandbox"),
        Extension("mini-swe-agent", f"{_AGENTS}.mini_swe_agent:MiniSweAgent", "mini-SWE-agent, in the sandbox"),
        Extension("aider", f"{_AGENTS}.aider:Aider", "aider, in the sandbox"),
    ]
