"""Online training under load: from the last reward of a batch to the first answer with the weights it led to, beyond
the training step itself; and how many calls failed meanwhile.

    python benchmarks/online.py [--model FOLDER|ID] [--updates 20] [--sessions 4] [--batch-size 8] [--threads 1]

`rl-harness serve --trainer reinforce` runs as a process on a tiny random model unless one is named. Assistants call it
all the time; others are rewarded, a batch at a time. Targets: at most 1 s, and no failed call. Printed for each update
is where its seconds went, and who used the processors meanwhile: on a machine that does other work too everything takes
longer, and the CPU seconds of the server, its engine and its trainer tell what it would take alone.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
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
    """One update: the clock when its last reward came, seconds from there to the first answer by its weights, and what
    these seconds consist of, in order. ``reward``: until the step begins; ``answer``: from the new weights serving to
    the end of that answer."""

    began: float
    whole: float
    parts: Mapping[str, float]

    @property
    def beyond(self) -> float:
        return self.whole - self.parts["train"]

    @property
    def serving(self) -> float:
        """Of these, those until the new weights serve: the others are what an answer takes."""
        return self.beyond - self.parts["answer"]


#: The parts of an update by the metrics of its step.
PARTS = {
    "reward": "seconds_waited",
    "advantages": "seconds_advantages",
    "train": "seconds_train",
    "export": "seconds_weights_export",
    "prepare": "seconds_weights_prepare",
    "commit": "seconds_weights_commit",
}


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
                parts = {part: metrics[name] for part, name in PARTS.items()}
                found.append(Update(last, whole, {**parts, "answer": whole - sum(parts.values())}))
    return found


class Processors:
    """What the processors did, by whom: the server's own process, its engine and its trainer, and everybody else."""

    WHO = ("serve", "engine", "trainer", "others")

    def __init__(self, server: int) -> None:
        self._server = server
        self._seen: list[tuple[float, tuple[float, ...]]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            self._seen.append((time.time(), self._now()))

    def _now(self) -> tuple[float, ...]:
        """CPU seconds so far."""
        own = dict.fromkeys(self.WHO[:3], 0.0)
        for process in (self._server, *_children(self._server)):
            try:
                command = Path(f"/proc/{process}/cmdline").read_bytes()
                fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            who = next((who for who in ("engine", "trainer") if f"{who}_worker".encode() in command), "serve")
            own[who] += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        busy = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        times = [int(number) / os.sysconf("SC_CLK_TCK") for number in busy]
        used = sum(times) - times[3] - times[4]  # but for idle and waiting for disks
        return (*own.values(), used - sum(own.values()))

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def between(self, start: float, end: float) -> dict[str, float]:
        """CPU seconds of each."""
        moments = [moment for moment, _ in self._seen]

        def at(moment: float) -> tuple[float, ...]:
            return self._seen[min(bisect.bisect_left(moments, moment), len(moments) - 1)][1]

        return {who: last - first for who, first, last in zip(self.WHO, at(start), at(end), strict=True)}


def _children(process: int) -> list[int]:
    tasks = Path(f"/proc/{process}/task")
    return [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]


def show(updates: Sequence[Update], processors: Processors) -> None:
    """A line an update: where its seconds went, and what the processors did in those beyond the step."""
    names = [*PARTS, "answer"]
    print("seconds of each update, then CPU seconds from the end of its step to the first answer")
    print("update" + "".join(f"{name:>11}" for name in ("whole", *names)) + "".join(f"{w:>9}" for w in Processors.WHO))
    for number, update in enumerate(updates):
        stepped = update.began + sum(update.parts[name] for name in ("reward", "advantages", "train"))
        seconds = "".join(f"{value:11.2f}" for value in (update.whole, *(update.parts[name] for name in names)))
        used = processors.between(stepped, update.began + update.whole)
        print(f"{number:6}{seconds}" + "".join(f"{value:9.2f}" for value in used.values()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--sessions", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1, help="of the engine and of the trainer, each")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        place = ServingPlace(Path(directory))
        model = arguments.model
        if model is None:
            model = str(write_tokenizer(tiny_model(place.directory / "model", vocab_size=261)))
        settings = {"online.batch_size": arguments.batch_size, "sampling.max_tokens": arguments.max_tokens}
        settings |= {"engine.threads": arguments.threads, "backend.threads": arguments.threads}
        options = [part for key, value in settings.items() for part in ("-o", f"{key}={value}")]
        served = place.start("--model", model, "--trainer", "reinforce", *options).ready()
        processors = Processors(served.process.pid)
        began = time.perf_counter()
        statuses = asyncio.run(drive(served, arguments.sessions, arguments.updates, arguments.batch_size))
        seconds = time.perf_counter() - began
        processors.close()
        run = place.directory / served.wait_for("start")["run"]
        served.stop()
        updates = measured(run)
    show(updates, processors)
    largest = max(update.beyond for update in updates)
    failed = sum(status != 200 for status in statuses)
    print(
        f"updates {len(updates)}, calls under load {len(statuses)} ({len(statuses) / seconds:.1f}/s), failed {failed}"
    )
    training, serving, beyond = (
        sorted(value(update) for update in updates)
        for value in (lambda one: one.parts["train"], lambda one: one.serving, lambda one: one.beyond)
    )
    print(
        f"from the last reward, beyond the training step (median {statistics.median(training):.2f} s), until the new "
        f"weights serve: median {statistics.median(serving):.2f} s, largest {serving[-1]:.2f} s"
    )
    print(
        f"until the end of the first answer by them: median {statistics.median(beyond):.2f} s, largest {largest:.2f} s "
        f"(target, of the median: {SECONDS:.0f} s): ratio {statistics.median(beyond) / SECONDS:.2f}"
    )
    return int(failed > 0 or statistics.median(beyond) > SECONDS or len(updates) < arguments.updates)


if __name__ == "__main__":
    sys.exit(main())
