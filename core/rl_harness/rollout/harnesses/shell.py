"""Harness ``shell``: a multi-turn agent that acts through the sandbox's shell.

The loop is here: ask the model, run what it says, show it the output, until it answers or meets a limit. How a
command is written in a reply is a *protocol*: fenced code blocks (:class:`FencedProtocol`) or calls of a ``shell``
tool (:class:`ToolProtocol`).

Every command runs in a fresh shell in the task's working directory: files persist between turns, ``cd`` and
exported variables do not, and the agent is told so.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rl_harness.contracts.common import API, Options
from rl_harness.contracts.harness import Harness, HarnessCapabilities, HarnessContext, HarnessResult
from rl_harness.contracts.sandbox import Sandbox
from rl_harness.errors import PluginError
from rl_harness.records.episode import Termination
from rl_harness.rollout.harnesses.chat_client import ChatClient, LimitReached, Reply, open_client, opening_messages
from rl_harness.rollout.harnesses.exec_events import record_exec
from rl_harness.rollout.harnesses.observation import observation
from rl_harness.rollout.harnesses.shell_prompts import LimitsNotice
from rl_harness.rollout.harnesses.shell_protocols import Action, FencedProtocol, Protocol, ToolProtocol

#: Linux refuses a single argument of 128 KiB or more; the command is one argument of a shell.
_COMMAND_LIMIT = 120_000


class ShellOptions(Options):
    format: Literal["fenced", "tools"] = Field(
        "fenced", description="how the model writes commands: ```bash blocks, or calls of a tool named shell"
    )
    system: str | None = Field(None, description="system prompt, instead of the benchmark's or the built-in one")
    output_limit: int = Field(8000, ge=100, description="characters of a command's output the model is shown")
    exec_timeout: float = Field(60.0, gt=0, description="seconds one command may take")
    announce_limits: bool | Literal["auto"] = Field(
        "auto",
        description="tell the agent its turn and time limits; auto: unless the benchmark has its own system prompt",
    )


class ShellHarness(Harness):
    """Ends with ``answer`` (a reply without a command), ``turn_limit``, ``token_limit``, ``time_limit`` or
    ``no_action`` (an empty reply). The last turn's command is still carried out.
    """

    api = API
    Options = ShellOptions

    def __init__(self, options: ShellOptions) -> None:
        self._options = options

    @property
    def capabilities(self) -> HarnessCapabilities:
        return HarnessCapabilities(calls_tools=self._options.format == "tools", needs_sandbox=True)

    async def run(self, context: HarnessContext) -> HarnessResult:
        if context.sandbox is None:
            raise PluginError("the shell harness acts in a sandbox, and the run gave it none")
        async with open_client(context) as client:
            episode = _Episode(self._options, context, context.sandbox, client)
            try:
                return await episode.run()
            except LimitReached as limit:
                return HarnessResult(termination=limit.termination, detail=limit.detail)


class _Episode:
    """One attempt: the conversation so far and the way to act."""

    def __init__(self, options: ShellOptions, context: HarnessContext, sandbox: Sandbox, client: ChatClient) -> None:
        self._options = options
        self._context = context
        self._sandbox = sandbox
        self._client = client
        self._protocol: Protocol = ToolProtocol() if options.format == "tools" else FencedProtocol()
        given = context.task.system
        own = options.system if options.system is not None or given is None else self._protocol.system(given)
        self._notice = LimitsNotice(context, own=own, announce=options.announce_limits)
        system = self._notice.system(self._protocol.default_system)
        self._messages: list[dict[str, Any]] = self._protocol.examples(opening_messages(context, system))

    async def run(self) -> HarnessResult:
        turns = self._context.task.max_turns
        for turn in range(1, turns + 1):
            reply = await self._client.complete(self._messages, self._protocol.tools)
            ended = _ending(reply, self._protocol)
            if ended is not None:
                return ended
            self._messages.append(reply.message)
            for action in self._protocol.actions(reply):
                text = action.correction if action.command is None else await self._act(action)
                self._messages.append(self._protocol.result(action, text))
            self._messages[-1]["content"] += self._notice.after(turn)
        return HarnessResult(termination=Termination.TURN_LIMIT, detail=f"all {turns} turns were used")

    async def _act(self, action: Action) -> str:
        """Run one command and say what came of it."""
        command = action.command or ""
        refusal = _refusal(command)
        if refusal is not None:
            return refusal
        left = self._context.seconds_left()
        if left <= 0:
            raise LimitReached(Termination.TIME_LIMIT, "the deadline passed before a command")
        timeout = min(self._options.exec_timeout, left)
        # One stream, so that output and errors arrive in the order in which they were written.
        result = await self._sandbox.exec(f"exec 2>&1; {command}", timeout=timeout)
        record_exec(self._context, command, result)
        if result.timed_out and self._context.seconds_left() <= 0:
            raise LimitReached(Termination.TIME_LIMIT, "the deadline passed during a command")
        return observation(result, limit=self._options.output_limit, timeout=timeout)


def _ending(reply: Reply, protocol: Protocol) -> HarnessResult | None:
    """How this reply ends the episode, or None when it is something to act on or to correct."""
    if protocol.acts(reply):
        return None
    if reply.finish_reason == "length":
        return HarnessResult(
            termination=Termination.TOKEN_LIMIT, detail="a reply was cut at the token limit before it said what to do"
        )
    if protocol.malformed(reply):
        return None
    if not reply.text.strip():
        return HarnessResult(termination=Termination.NO_ACTION, detail="a reply was empty")
    return HarnessResult(termination=Termination.ANSWER, answer=reply.text)


def _refusal(command: str) -> str | None:
    if "\0" in command:
        return "The command was not run: it contains a NUL character."
    if len(command.encode("utf-8", "replace")) > _COMMAND_LIMIT:
        return f"The command was not run: it is longer than {_COMMAND_LIMIT} bytes. Write it in parts."
    return None
