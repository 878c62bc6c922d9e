"""Record a command that an agent ran as an event of its episode."""

from __future__ import annotations

from rl_harness.contracts.harness import HarnessContext
from rl_harness.contracts.sandbox import Command, ExecResult

_COMMAND_CHARS = 500
#: Of each stream. What a model is shown is in its next prompt; this is for people, and for models that give no ids.
_OUTPUT_CHARS = 1000


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
            "output": "\n".join(filter(None, map(_shown, (result.stdout, result.stderr)))),
        },
    )


def _shown(output: bytes) -> str:
    """The beginning and the end of an output. A character takes at most four bytes: no more than that is decoded."""
    half = _OUTPUT_CHARS // 2
    if len(output) <= 4 * _OUTPUT_CHARS:
        text = output.decode("utf-8", "replace").rstrip("\r\n")
        if len(text) <= _OUTPUT_CHARS:
            return text
        head, tail = text[:half], text[-half:]
    else:
        head = output[: 4 * half].decode("utf-8", "replace")[:half]
        tail = output[-4 * half :].decode("utf-8", "replace").rstrip("\r\n")[-half:]
    return f"{head}\n[...]\n{tail}"
