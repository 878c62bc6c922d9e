"""Our gateway before the scripted engine, recording every turn; told of sessions by lines on standard input.

python our_gateway.py ENGINE     prints its port; "open N" prints N keys, "store" writes what was recorded
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path

from rl_harness.gateway import Gateway, TokenPolicy
from rl_harness.gateway.renderers.template import TemplateOptions, TemplateRenderer
from rl_harness.inference.completions import CompletionsEngine, CompletionsOptions
from rl_harness.jobs.loop import run
from rl_harness.records import Episode, EpisodeKey, TaskRef, Termination
from rl_harness.runs.store import RunStore
from rl_harness.testing.tokenizer import write_tokenizer


async def main(address: str) -> None:
    folder = Path(tempfile.mkdtemp())
    renderer = TemplateRenderer(TemplateOptions())
    renderer.load(write_tokenizer(folder))
    engine = CompletionsEngine(CompletionsOptions(base_url=f"{address}/v1"))
    await engine.preflight()
    await engine.start(str(folder))
    store = RunStore(folder / "run.sqlite")
    gateway = Gateway({"m": TokenPolicy("m", engine, renderer)})
    await gateway.start()

    async def stored(name: str) -> None:
        turns = await gateway.close_session(name)
        await store.add_episode(
            Episode(
                id=name,
                key=EpisodeKey(phase="evaluate", step=0, task=name, sample=0),
                task=TaskRef(benchmark="b", name=name, split="s", digest=""),
                termination=Termination.ANSWER,
                reward=1.0,
                rewards={"reward": 1.0},
            ),
            turns,
        )

    print(gateway.base_url.split(":")[2].partition("/")[0], flush=True)
    loop = asyncio.get_running_loop()
    count = 0
    opened: list[str] = []
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        if line.startswith("open"):
            keys = []
            for _ in range(int(line.split()[1])):
                session = gateway.open_session(f"s{count}", policy="m")
                opened.append(f"s{count}")
                keys.append(session.api_key)
                count += 1
            print(json.dumps(keys), flush=True)
        else:
            await asyncio.gather(*map(stored, opened))  # as those of a run are, which end when they will
            opened.clear()
            print("{}", flush=True)


if __name__ == "__main__":
    run(main(sys.argv[1]))
