"""The two ways in which a model tells the shell harness what to run: fenced blocks and tool calls."""

from __future__ import annotations

import abc
import re
from typing import Any, ClassVar

import msgspec

from rl_harness.contracts.renderer import ToolSpec
from rl_harness.rollout.harnesses.chat_client import Reply, RequestedCall
from rl_harness.rollout.harnesses.fences import opens_shell_block, shell_blocks, without_shell_blocks
from rl_harness.rollout.harnesses.shell_prompts import FENCED_SYSTEM, TOOLS_SYSTEM

Wire = dict[str, Any]
"""A chat message as it is sent."""

SHELL_TOOL: ToolSpec = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a command in a new shell and return its output.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command, or a script of several lines."}},
            "required": ["command"],
        },
    },
}


_BLOCK = re.compile(r"```(?:bash|sh|shell) (?:code )?block(s?)")


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """One command to run or, where ``command`` is None, the ``correction`` of a reply that cannot be run."""

    command: str | None = None
    correction: str = ""
    call_id: str | None = None


class Protocol(abc.ABC):
    """How commands are written in replies and how their results are written back."""

    default_system: ClassVar[str]
    tools: ClassVar[tuple[ToolSpec, ...]] = ()

    @abc.abstractmethod
    def acts(self, reply: Reply) -> bool:
        """Whether the reply holds at least one complete command."""

    @abc.abstractmethod
    def malformed(self, reply: Reply) -> bool:
        """Whether a reply that does not act means to, and needs correcting rather than taking as the answer."""

    @abc.abstractmethod
    def actions(self, reply: Reply) -> list[Action]:
        """What to do about a reply that acts or is malformed; at least one action."""

    @abc.abstractmethod
    def result(self, action: Action, text: str) -> Wire:
        """The message that carries an action's observation or correction."""

    def system(self, text: str) -> str:
        """A benchmark's system prompt, put into this protocol."""
        return text

    def examples(self, messages: list[Wire]) -> list[Wire]:
        """The opening messages, worked examples put into this protocol."""
        return messages


class FencedProtocol(Protocol):
    """Exactly one closed ```bash block a reply is run; a reply in which no block begins is the final answer."""

    default_system = FENCED_SYSTEM

    def acts(self, reply: Reply) -> bool:
        return bool(shell_blocks(reply.text))

    def malformed(self, reply: Reply) -> bool:
        return opens_shell_block(reply.text)

    def actions(self, reply: Reply) -> list[Action]:
        blocks = shell_blocks(reply.text)
        if len(blocks) == 1:
            return [Action(command=blocks[0])]
        if not blocks:
            return [Action(correction="Nothing was run: the ```bash block is not closed with ``` on its own line.")]
        return [
            Action(
                correction=f"Nothing was run: your reply has {len(blocks)} ```bash blocks. "
                "Reply with exactly one ```bash block."
            )
        ]

    def result(self, action: Action, text: str) -> Wire:
        return {"role": "user", "content": text}


class ToolProtocol(Protocol):
    """Every call of the ``shell`` tool is run, in order; a reply without calls is the final answer."""

    default_system = TOOLS_SYSTEM
    tools = (SHELL_TOOL,)

    def acts(self, reply: Reply) -> bool:
        return bool(reply.tool_calls)

    def malformed(self, reply: Reply) -> bool:
        return False

    def actions(self, reply: Reply) -> list[Action]:
        return [_call_action(call) for call in reply.tool_calls]

    def result(self, action: Action, text: str) -> Wire:
        return {"role": "tool", "tool_call_id": action.call_id, "content": text}

    def system(self, text: str) -> str:
        """Benchmarks write for fenced blocks: a model that is to call a tool must not be told to write them."""
        return _BLOCK.sub(r"call\1 of the `shell` tool", text)

    def examples(self, messages: list[Wire]) -> list[Wire]:
        """Examples written with fenced blocks become tool calls, so that they show what is asked for."""
        converted: list[Wire] = []
        call_id: str | None = None
        for index, message in enumerate(messages):
            blocks = shell_blocks(message["content"]) if message["role"] == "assistant" else []
            if len(blocks) == 1:
                call_id = f"call_example_{index}"
                converted.append(_example_call(call_id, blocks[0], without_shell_blocks(message["content"])))
            elif call_id is not None:
                if message["role"] == "user" and message["content"].startswith("Output:"):
                    converted.append({"role": "tool", "tool_call_id": call_id, "content": message["content"]})
                else:
                    converted.append({"role": "tool", "tool_call_id": call_id, "content": "Output:\n(no output)"})
                    converted.append(message)
                call_id = None
            else:
                converted.append(message)
        return converted


def _example_call(call_id: str, command: str, prose: str) -> Wire:
    arguments = msgspec.json.encode({"command": command}).decode()
    call = {"id": call_id, "type": "function", "function": {"name": "shell", "arguments": arguments}}
    return {"role": "assistant", "content": prose, "tool_calls": [call]}


class _Arguments(msgspec.Struct):
    command: str


def _call_action(call: RequestedCall) -> Action:
    if call.function.name != "shell":
        return Action(
            call_id=call.id, correction=f"Nothing was run: there is no tool {call.function.name!r}, only `shell`."
        )
    try:
        return Action(call_id=call.id, command=msgspec.json.decode(call.function.arguments, type=_Arguments).command)
    except msgspec.DecodeError as error:
        return Action(
            call_id=call.id, correction=f'Nothing was run: the arguments must be {{"command": "..."}} ({error}).'
        )
