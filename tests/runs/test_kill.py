"""Kill -9 at random points: what was reported finished is on disk, once, and the same command continues."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time

from rl_harness.records import Turn
from rl_harness.runs import open_run, read_info
from rl_harness.runs.info import DATABASE
from rl_harness.runs.store import reading
from rl_harness.testing.records import a_conversation, an_episode

TASKS = 400
KILLS = 30
AT_MOST = 12  # tasks in a life that ends by kill, so that they last for all the lives


def test_nothing_reported_is_lost_or_repeated(config, child):
    turns: list[Turn] = a_conversation(3)

    said: list[int] = []

    def body(say):
        async def one(run, number, slots):
            async with slots:
                if number % 7 == 0:  # an attempt that its sandbox failed, and its retry
                    await run.store.add_episode(an_episode(f"task-{number}", reward=None, id=f"{number}-dead"), [])
                reward = float(number % 2)
                await run.store.add_episode(an_episode(f"task-{number}", reward, attempt=2, id=f"{number}"), turns)
                say(str(number))
                said.append(number)
                if len(said) == dies_after:
                    os.kill(os.getpid(), signal.SIGKILL)

        async def everything(run):
            done = {e.key.task for e in run.store.episodes() if e.reward is not None}
            slots = asyncio.Semaphore(8)
            missing = [n for n in range(TASKS) if f"task-{n}" not in done]
            say(f"start {len(done)}")
            if kills < KILLS:
                await asyncio.gather(*(one(run, number, slots) for number in missing[:AT_MOST]))
                await asyncio.sleep(60)
            await asyncio.gather(*(one(run, number, slots) for number in missing))

        with open_run(config, {}) as run:
            asyncio.run(everything(run))
            run.close("done")
        say("done")

    reported: list[str] = []
    kills = 0
    rng = random.Random(20)
    while True:
        # Every second one kills itself the moment it has reported: is that really on disk already?
        dies_after = rng.randrange(1, AT_MOST) if kills % 2 and kills < KILLS else None
        process = child(body)
        if kills < KILLS:
            if dies_after is None:
                time.sleep(rng.random() * 0.05)  # before, during and after opening
                reported += [process.line() for _ in range(rng.randrange(AT_MOST))]
                process.kill()
            assert process.wait() == -9
            kills += 1
        else:
            assert process.wait() == 0
        reported += process.rest()
        numbers = [line for line in reported if line.isdigit()]
        run_directory = config.runs_dir / "bench-model"
        if run_directory.exists():
            _check(run_directory, numbers)
        if "done" in reported:
            break
    assert len(numbers) == len(set(numbers))  # nothing was done again that had been reported
    assert {path.name for path in config.runs_dir.iterdir()} <= {".lock", "bench-model"}
    assert len(_check(run_directory, numbers)) == TASKS
    assert read_info(run_directory).status == "done"
    assert len(read_info(run_directory).starts) > 10


def _check(run_directory, numbers):
    """Every reported task counts exactly once, with its reward and its turns."""
    with reading(run_directory / DATABASE) as store:
        counted = {e.key.task: e for e in store.episodes() if e.reward is not None}
        keys = [e.key for e in store.episodes()]
        assert len(keys) == len(set(keys))
        for number in numbers:
            episode = counted[f"task-{number}"]
            assert episode.reward == float(int(number) % 2)
        for number in numbers[-3:]:
            assert [turn.id for turn in store.turns(number)] == ["s-0", "s-1", "s-2"]
        everything = store.episodes(attempts=True)
        assert len({e.id for e in everything}) == len(everything)
    return counted
