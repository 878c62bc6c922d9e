"""What building a prompt costs in CPU time at turn 50 of a conversation, as a multiple of turn 5.

    python benchmarks/prompting.py [--conversations 20] [--characters 640] [--model DIR]

Both turns bring as much that is new: a recorded reply with a tool call, sent back by an agent that re-serialised it,
and the tool's result. Measured is everything between a parsed request and the engine, and recording the turn. Of the
kinds of agents, ``plain`` sends its history back as it is, ``tail`` ends each request with a message that is gone from
the next, ``header`` changes its system message with every request: its prompts share no ids, so that each is recorded
whole.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from rl_harness.gateway.prompting import build_prompt
from rl_harness.gateway.renderers.template import TemplateOptions, TemplateRenderer
from rl_harness.gateway.tree import Conversation, TurnTree
from rl_harness.records import Message, SamplingParams, ToolCall, Turn, ids, logps
from rl_harness.testing.tokenizer import write_tokenizer

TURNS = 52
TOOL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
KINDS = ("plain", "tail", "header")
#: At most so many times turn 5. Under another system message all of a prompt's ids are new, and are recorded again.
MOST = {"plain": 1.25, "tail": 1.25, "header": 2.0}


def converse(renderer: TemplateRenderer, kind: str, characters: int) -> list[float]:
    """CPU seconds that each turn of one conversation took."""
    tree = TurnTree()
    history = [Message(role="user", content="Tidy up this folder. " * 20)]
    seconds: list[float] = []
    folder = renderer._folder
    for number in range(TURNS):
        command = f"sed -n {number},{number + 20}p file.py | head  # é" + " x" * (characters // 20)
        text = f"<tool_call>\n{json.dumps({'name': 'shell', 'arguments': {'command': command}})}\n</tool_call>"
        completion = ids([*folder.encode(f"I look at part {number}.\n{text}"), renderer.end_token_ids[0]])
        request = [Message(role="system", content="You are an agent."), *history]
        if kind == "header":
            request[0] = Message(role="system", content=f"You are an agent. Spent: {number}")
        if kind == "tail":
            request.append(Message(role="user", content=f"It is {number} o'clock."))
        parser = renderer.parser((TOOL,))
        parser.feed(completion)
        parser.finish("stop")
        message = parser.message()
        # A request's texts are new objects each time, as they are when they come from a body.
        request = [as_received(one) for one in request]
        start = time.thread_time()
        prompt = build_prompt(renderer, tree, Conversation.of(request, (TOOL,)), ids(()))
        record(tree, prompt, completion, message)
        seconds.append(time.thread_time() - start)
        call = message.tool_calls[0]
        compact = json.dumps(json.loads(call.arguments), separators=(",", ":"))
        sent = ToolCall(id=call.id, name=call.name, arguments=compact)
        output = f"{number}: " + "def function(argument): return value\n" * (characters // 37)
        history += [
            Message(role="assistant", content=message.content, tool_calls=(sent,)),
            Message(role="tool", content=output, tool_call_id=call.id),
        ]
    return seconds


def as_received(message: Message) -> Message:
    def fresh(text: str) -> str:
        return text.encode().decode()

    calls = tuple(ToolCall(id=c.id, name=c.name, arguments=fresh(c.arguments)) for c in message.tool_calls)
    return Message(
        role=message.role, content=fresh(message.content), tool_calls=calls, tool_call_id=message.tool_call_id
    )


def record(tree: TurnTree, prompt, completion, message) -> None:
    index = len(tree.turns)
    turn = Turn(
        id=f"s/{index}",
        session="s",
        index=index,
        policy="m",
        sampling=SamplingParams(),
        parent=prompt.parent,
        shared=prompt.shared,
        context=ids(prompt.ids[prompt.shared :]),
        completion=completion,
        logps=logps(np.zeros(len(completion))),
        versions=ids(np.zeros(len(completion))),
        finish_reason="tool_calls",
        message=message,
        prompt_tokens=len(prompt.ids),
        completion_tokens=len(completion),
    )
    tree.add(turn, prompt.conversation, prompt.follows, replies=prompt.replies)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--characters", type=int, default=640, help="of a tool's result")
    parser.add_argument("--model", type=Path, help="folder with a tokenizer and a chat template that knows tools")
    how = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        renderer = TemplateRenderer(TemplateOptions())
        renderer.load(how.model or write_tokenizer(Path(folder)))
        missed = []
        for kind in KINDS:
            runs = [converse(renderer, kind, how.characters) for _ in range(how.conversations)]
            at = {
                turn: statistics.median(run[n] for run in runs for n in (turn - 1, turn, turn + 1)) for turn in (5, 50)
            }
            print(
                f"{kind:6}  turn 5: {at[5] * 1e3:.2f} ms, turn 50: {at[50] * 1e3:.2f} ms, {at[50] / at[5]:.2f} x",
                flush=True,
            )
            if at[50] > MOST[kind] * at[5]:
                missed.append(f"{kind}: {at[50] / at[5]:.2f} x (at most {MOST[kind]})")
    print("missed:\n  " + "\n  ".join(missed) if missed else "every figure is reached")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
