"""What an agent is told about a command it ran: output, exit code, what was cut."""

from __future__ import annotations

from rl_harness.contracts.sandbox import ExecResult


def observation(result: ExecResult, *, limit: int, timeout: float) -> str:
    """``Output:`` and the command's output; a line for a failure; a visible mark where text was left out.

    ``limit`` is in characters. ``timeout`` is what the command was given, for the message when it was exceeded.
    """
    text = _shorten(_decode(result.stdout), limit, cut=result.stdout_truncated)
    # The harness joins both streams inside the sandbox; what is on this one is the sandbox's own complaint.
    if result.stderr:
        text = "\n".join(part for part in (text, _shorten(_decode(result.stderr), limit, cut=False)) if part)
    lines = ["Output:", text or "(no output)"]
    if result.timed_out:
        lines.append(f"The command timed out after {timeout:g} s and was killed.")
    elif result.exit_code != 0:
        killed = f" (killed by signal {result.signal})" if result.signal is not None else ""
        lines.append(f"Exit code: {result.exit_code}{killed}")
    return "\n".join(lines)


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "replace").rstrip("\r\n")


def _shorten(text: str, limit: int, *, cut: bool) -> str:
    """At most ``limit`` characters of ``text``, head and tail. ``cut``: the sandbox threw away what followed."""
    if cut:
        # The end of what was kept is an arbitrary middle of the output: showing it as a tail would mislead.
        return (
            f"{text[:limit]}\n[... output truncated: only its first {min(limit, len(text))} characters are shown ...]"
        )
    if len(text) <= limit:
        return text
    head = (limit + 1) // 2
    tail = limit - head
    shown_tail = text[len(text) - tail :]
    return f"{text[:head]}\n[... {len(text) - limit} characters left out ...]\n{shown_tail}"
