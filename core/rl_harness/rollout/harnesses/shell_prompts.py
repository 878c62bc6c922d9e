"""What the shell agent is told before it starts and as its limits come near."""

from __future__ import annotations

from typing import Literal

from rl_harness.contracts.harness import HarnessContext

_COMMON = """\
You work on a Linux machine through its shell. Commands run in {workdir}, each in a new shell: files you write \
stay, but `cd` and exported variables do not carry over to the next command. Nobody can answer questions. Nothing \
can be typed into a running command."""

FENCED_SYSTEM = (
    _COMMON
    + """

Each turn, reply with exactly one ```bash block with the command to run; you are then shown its output. If the \
command itself contains ``` write a longer fence (````) around it. When the task is done, reply without a code \
block: that ends the work, and the reply is your final answer."""
)

TOOLS_SYSTEM = (
    _COMMON
    + """

Run commands with the `shell` tool; you are shown their output. When the task is done, reply without calling the \
tool: that ends the work, and the reply is your final answer."""
)

_LIMITS = "You have at most {max_turns} turns and {time_limit} seconds."
#: Share of the time limit below which the agent is reminded of the deadline.
_SHORT_OF_TIME = 0.1


class LimitsNotice:
    """Tells an agent its turn and time limits.

    ``own`` is a system prompt that somebody wrote for this agent: with ``announce`` at ``auto`` it stays as it
    is but for the placeholders ``{max_turns}``, ``{time_limit}`` (seconds) and ``{workdir}``, and nothing is
    added to observations. The built-in prompt states the limits, and the agent is reminded near them.
    """

    def __init__(self, context: HarnessContext, *, own: str | None, announce: bool | Literal["auto"]) -> None:
        self._context = context
        self._own = own
        self._announce = own is None if announce == "auto" else announce

    def system(self, default: str) -> str:
        """The system prompt, complete."""
        text = default if self._own is None else self._own
        if self._announce and "{max_turns}" not in text and "{time_limit}" not in text:
            text = f"{text}\n\n{_LIMITS}"
        task = self._context.task
        sandbox = self._context.sandbox
        values = {
            "{max_turns}": str(task.max_turns),
            "{time_limit}": f"{task.time_limit:g}",
            "{workdir}": task.workdir if sandbox is None else sandbox.native_path(task.workdir),
        }
        for placeholder, value in values.items():
            text = text.replace(placeholder, value)
        return text

    def after(self, turn: int) -> str:
        """A reminder to append to the observation of turn number ``turn`` (from 1), or nothing."""
        if not self._announce:
            return ""
        notes = []
        if turn == self._context.task.max_turns - 1:
            notes.append("The next turn is your last.")
        left = self._context.seconds_left()
        if left < _SHORT_OF_TIME * self._context.task.time_limit:
            notes.append(f"{max(left, 0):.0f} seconds are left.")
        return "".join(f"\n{note}" for note in notes)
