"""What recording long conversations takes on disk, as a multiple of what there is to record.

    python benchmarks/storage.py [--conversations 20] [--turns 50] [--ids 8192] [--most 5.0]

Each conversation grows to ``--ids`` ids, six of ten of them prompt. What there is to record: each id, log-prob and
version once (four bytes each), and the replies' text (four characters an id, which nothing compresses here). A record
that repeats the prompt with every turn would need ``--turns`` / 2 times the ids. Exits 1 when it takes over
``--most`` MB.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

import numpy as np
from rl_harness.records import Message, SamplingParams, ToolCall, Turn, ids, logps
from rl_harness.runs.store import RunStore
from rl_harness.testing.records import an_episode

LETTERS = np.array(list("abcdefghijklmnopqrstuvwxyz0123456789 .,/"))


def conversation(name: str, turns: int, length: int, random: np.random.Generator) -> list[Turn]:
    made: list[Turn] = []
    new = length // turns
    sampled = new * 4 // 10
    for index in range(turns):
        parent = made[-1] if made else None
        shared = 0 if parent is None else parent.prompt_tokens + parent.completion_tokens
        text = "".join(random.choice(LETTERS, sampled * 2))
        call = ToolCall(id=f"call_{random.bytes(12).hex()}", name="shell", arguments=f'{{"command": "{text}"}}')
        made.append(
            Turn(
                id=f"{name}/{index}",
                session=name,
                index=index,
                policy="m",
                sampling=SamplingParams(max_tokens=2048, stop_token_ids=(151645, 151643), seed=int(index)),
                parent=None if parent is None else parent.id,
                shared=shared,
                context=ids(random.integers(0, 150_000, new - sampled)),
                completion=ids(random.integers(0, 150_000, sampled)),
                logps=logps(-random.exponential(1.0, sampled)),
                versions=ids(np.full(sampled, 7)),
                finish_reason="tool_calls",
                message=Message(
                    role="assistant", content="".join(random.choice(LETTERS, sampled * 2)), tool_calls=(call,)
                ),
                prompt_tokens=shared + new - sampled,
                completion_tokens=sampled,
            )
        )
    return made


async def record(path: Path, conversations: list[list[Turn]]) -> None:
    store = RunStore(path)
    for number, turns in enumerate(conversations):
        await store.add_episode(an_episode(f"task-{number}"), turns)
    store.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--ids", type=int, default=8192)
    parser.add_argument("--most", type=float, default=5.0, help="megabytes that it may take")
    how = parser.parse_args()
    random = np.random.default_rng(0)
    made = [conversation(f"task-{number}", how.turns, how.ids, random) for number in range(how.conversations)]
    turns = [turn for one in made for turn in one]
    least = sum(4 * len(turn.context) + 12 * len(turn.completion) for turn in turns)
    least += sum(len(turn.message.content) + len(turn.message.tool_calls[0].arguments) for turn in turns)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(record(Path(folder) / "run.sqlite", made))
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
    told = f"to record {least / 1e6:.2f} MB, on disk {size / 1e6:.2f} MB, {size / least:.2f} x"
    print(f"{told} (at most {how.most:g} MB)")
    return int(size > how.most * 1e6)


if __name__ == "__main__":
    sys.exit(main())
