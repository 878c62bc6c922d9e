"""Online training under load: from the last reward of a batch to the first answer with the weights it led to, beyond
the training step itself; and how many calls failed meanwhile.

    python benchmarks/online.py [--model FOLDER|ID] [--updates 20] [--sessions 4] [--batch-size 8]

`rl-harness serve --trainer reinforce` runs as a process on a tiny random model unless one is named. Assistants call it
all the time; others are rewarded, a batch at a time. Targets: at most 1 s, and no failed call.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from rl_harness.records import Turn
from rl_harness.runs.info import DATABASE
from rl_harness.runs.online import OnlineStore
from rl_harness.runs.store import RunStore, reading
from rl_harness.testing.serving import Served, ServingPlace
from rl_harness.testing.tokenizer import write_tokenizer
from rl_harness_torch.testing import tiny_model

SECONDS = 1.0


async def call(http: aiohttp.ClientSession, served: Served, session: dict[str, Any], text: str) -> int:
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    headers = {"authorization": f"Bearer {session['api_key']}"}
    async with http.post(f"{served.base_url}/chat/completions", json=body, headers=headers) as response:
        await response.read()
        return response.status


async def load(http: aiohttp.ClientSession, served: Served, session: dict[str, Any], statuses: list[int]) -> None:
    """An assistant that never rests."""
    while True:
        try:
            statuses.append(await call(http, served, session, f"Question {len(statuses)}"))
        except aiohttp.ClientError:
            statuses.append(0)


async def rewarded(http: aiohttp.ClientSession, served: Served, session: dict[str, Any], reward: float) -> None:
    status = await call(http, served, session, "How are you?")
    assert status == 200, status
    headers = {"authorization": f"Bearer {session['reward_key']}"}
    url = f"{served.base_url.removesuffix('/v1')}/rl/reward"
    async with http.post(url, json={"reward": reward}, headers=headers) as response:
        assert response.status == 200, await response.text()


async def drive(served: Served, sessions: int, updates: int, batch_size: int) -> list[int]:
    """The statuses of the calls under load."""
    statuses: list[int] = []
    loading = [served.session() for _ in range(sessions)]
    learning = [served.session() for _ in range(batch_size)]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        tasks = [asyncio.create_task(load(http, served, session, statuses)) for session in loading]
        for update in range(updates):
            rewards = [float((update + number) % 2) for number in range(batch_size)]
            await asyncio.gather(
                *(rewarded(http, served, session, r) for session, r in zip(learning, rewards, strict=True))
            )
            await asyncio.to_thread(served.wait_for, "step", update + 1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return statuses


def every_turn(store: RunStore) -> list[Turn]:
    online = OnlineStore(store)
    over = [turn for episode in store.episodes(phase="online") for turn in store.turns(episode.id)]
    return over + [row.turn for episode in online.open_episodes() for row in online.turns(episode.id)]


class Update(NamedTuple):
    """Seconds: from its last reward to the first answer by its weights, of the training step, of moving the weights."""

    whole: float
    training: float
    weights: float

    @property
    def beyond(self) -> float:
        return self.whole - self.training


def measured(run: Path) -> list[Update]:
    found = []
    with reading(run / DATABASE) as store:
        turns = sorted(every_turn(store), key=lambda turn: turn.started_at + turn.seconds)
        for metrics in store.metrics("train"):
            step = int(metrics["step"])
            last = max(row.closed_at or 0.0 for row in OnlineStore(store).given_to(step))
            first = next((t for t in turns if len(t.versions) and t.versions[-1] == step + 1), None)
            if first is not None:
                whole = first.started_at + first.seconds - last
                found.append(Update(whole, metrics["seconds_train"], metrics["seconds_weights"]))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--sessions", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=16)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        place = ServingPlace(Path(directory))
        model = arguments.model
        if model is None:
            model = str(write_tokenizer(tiny_model(place.directory / "model", vocab_size=261)))
        settings = {"online.batch_size": arguments.batch_size, "sampling.max_tokens": arguments.max_tokens}
        options = [part for key, value in settings.items() for part in ("-o", f"{key}={value}")]
        served = place.start("--model", model, "--trainer", "reinforce", *options).ready()
        began = time.perf_counter()
        statuses = asyncio.run(drive(served, arguments.sessions, arguments.updates, arguments.batch_size))
        seconds = time.perf_counter() - began
        run = place.directory / served.wait_for("start")["run"]
        served.stop()
        updates = measured(run)
    largest = max(update.beyond for update in updates)
    failed = sum(status != 200 for status in statuses)
    rate = len(statuses) / seconds
    training, weights, beyond = (
        statistics.median(getattr(update, name) for update in updates) for name in ("training", "weights", "beyond")
    )
    print(f"updates {len(updates)}, calls under load {len(statuses)} ({rate:.1f}/s), failed {failed}")
    print(f"training step {training:.2f} s, moving the weights {weights:.2f} s (medians)")
    print(
        f"last reward to first answer with new weights, beyond the step: median {beyond:.2f} s, "
        f"largest {largest:.2f} s (target {SECONDS:.0f} s): ratio {largest / SECONDS:.2f}"
    )
    return int(failed > 0 or largest > SECONDS or len(updates) < arguments.updates)


if __name__ == "__main__":
    sys.exit(main())
