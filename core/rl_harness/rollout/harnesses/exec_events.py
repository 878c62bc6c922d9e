"""Record a command that an agent ran as an event of its episode."""

from __future__ import annotations

from rl_harness.contracts.harness import HarnessContext
from rl_harness.contracts.sandbox import Command, ExecResult

_COMMAND_CHARS = 500


def record_exec(context: HarnessContext, command: Command, result: ExecResult) -> None:
    """Bounded, whatever the command: an episode's events are kept for good."""
    text = command if isinstance(command, str) else " ".join(command)
    context.on_event(
        "exec",
        {
            "command": text[:_COMMAND_CHARS],
            "exit_code": result.exit_code,
            "timed_out": result.timed_out,
            "truncated": result.stdout_truncated or result.stderr_truncated,
            "seconds": round(result.seconds, 4),
        },
    )
