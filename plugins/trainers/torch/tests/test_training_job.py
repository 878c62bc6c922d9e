"""The whole training job as a process, on a real (tiny, random) model: it learns, resumes and survives kill -9."""

from __future__ import annotations

import json
import os
import random
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rl_harness.testing.tokenizer import write_tokenizer
from rl_harness_torch.testing import tiny_model
from safetensors.numpy import load_file

STEPS = 4
#: Each costs a start of two torch processes, so they fall where something can be lost: the first while the job starts,
#: the others after it has recorded something. The evaluation job and the store are killed 20 and 30 times by their own
#: tests; set TRAINING_KILLS to kill this one as often.
KILLS = int(os.environ.get("TRAINING_KILLS", "2"))
#: The first token is the answer; half of the printable characters are right.
RIGHT = [chr(code) for code in range(33, 127) if code % 2 == 0]


@pytest.fixture
def job(tmp_path: Path) -> list[str]:
    """The command line of a training run, all but its name."""
    model = tiny_model(tmp_path / "model", vocab_size=261)
    write_tokenizer(model)
    for number in range(4):
        task = tmp_path / "tasks" / f"t{number}"
        task.mkdir(parents=True)
        (task / "instruction.md").write_text(f"Question {number}.\n")
        (task / "task.toml").write_text(f"[rl_harness]\nanswer = {json.dumps(RIGHT)}\n")
    options = {
        "engine.threads": 1,
        "backend.threads": 1,
        "sampling.max_tokens": 1,
        "training.steps": STEPS,
        "training.group_size": 16,
        "training.learning_rate": 0.02,
        "training.stop_at_pass_rate": 1.0,
        "evaluation.greedy": "false",
        "concurrency": 64,
    }
    settings = [part for key, value in options.items() for part in ("-o", f"{key}={value}")]
    command = [sys.executable, "-m", "rl_harness", "run", *map(str, sorted((tmp_path / "tasks").iterdir()))]
    return [*command, "--harness", "chat", "--model", str(model), "--trainer", "grpo", "--json", *settings]


def start(job: list[str], directory: Path, name: str) -> subprocess.Popen[bytes]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RL_HARNESS_")}
    return subprocess.Popen(
        [*job, "--name", name], cwd=directory, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def result(process: subprocess.Popen[bytes]) -> Any:
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors.decode()
    return json.loads(output)


def finish(job: list[str], directory: Path, name: str) -> Any:
    return result(start(job, directory, name))


def rows(run: Path, query: str) -> list[tuple[Any, ...]]:
    """A kill may leave a database without tables, or none."""
    if not (run / "db.sqlite").exists():
        return []
    connection = sqlite3.connect(f"file:{run / 'db.sqlite'}?mode=ro", uri=True)
    try:
        if not connection.execute("select 1 from sqlite_master where name = 'metrics'").fetchall():
            return []
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def keys(run: Path) -> list[tuple[Any, ...]]:
    return rows(run, "select phase, step, task, sample from episodes")


def wait_for_more(process: subprocess.Popen[bytes], run: Path, than: int) -> None:
    """Until the process has recorded further episodes, or is over."""
    while process.poll() is None and len(keys(run)) <= than:
        time.sleep(0.05)


def is_done(run: Path) -> bool:
    """A kill after the end changes nothing; the next command would start another run."""
    info = run / "run.json"
    return info.exists() and json.loads(info.read_text())["status"] == "done"


def newest_weights(run: Path) -> tuple[str, dict[str, np.ndarray]]:
    """A last step without signal leaves no checkpoint of its own."""
    newest = max(run.glob("checkpoints/step-*"))
    return newest.name, load_file(newest / "model.safetensors")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_it_learns_and_kill_9_anywhere_changes_nothing(job, tmp_path):
    began = time.monotonic()
    process = start(job, tmp_path, "whole")
    wait_for_more(process, tmp_path / "runs" / "whole", than=0)
    recording = time.monotonic()
    whole = result(process)
    starting, working = recording - began, time.monotonic() - recording
    rates = [step["pass_rate"] for step in whole["training"]]
    assert rates[-1] > rates[0]
    assert "4 of 4 tasks that are evaluated are also trained on" in whole["notes"]
    assert not [note for note in whole["notes"] if "WARNING" in note]
    expected = 4 * 16 * STEPS + 4 * 2
    initial = load_file(tmp_path / "model" / "model.safetensors")

    generator = random.Random(20)  # of what is left to do, each life does about a sixth: a run takes several kills
    kills, started = 0, 0
    while kills < KILLS:
        name = f"killed-{started}"
        run = tmp_path / "runs" / name
        seen: set[Any] = set()
        while kills < KILLS:
            process = start(job, tmp_path, name)
            if kills:
                wait_for_more(process, run, than=len(seen))
            try:
                process.communicate(timeout=generator.uniform(0, working / 3 if kills else starting))
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                kills += 1
            now = set(keys(run))
            assert seen <= now
            seen = now
            if is_done(run):
                break
        started += 1
        if not is_done(run):
            finish(job, tmp_path, name)
        recorded = keys(run)
        assert len(recorded) == len(set(recorded)) == expected
        steps = rows(run, "select distinct step from metrics where phase = 'train' order by step")
        assert [step for (step,) in steps] == list(range(STEPS))
        (step, trained), (whole_step, uninterrupted) = newest_weights(run), newest_weights(tmp_path / "runs" / "whole")
        assert step == whole_step
        assert distance(trained, uninterrupted) < 0.05 * distance(uninterrupted, initial)


def test_a_gap_between_sampler_and_trainer_is_warned_of(job, tmp_path):
    """Every gap is too large here, so that the real one of a step, which is rounding, is."""
    program = (
        "import runpy, rl_harness.reports.training as training; training.LARGE_LOGP_GAP = -1.0;"
        "runpy.run_module('rl_harness', run_name='__main__', alter_sys=True)"
    )
    assert job[1:3] == ["-m", "rl_harness"]
    told = finish([job[0], "-c", program, *job[3:], "-o", "training.steps=1"], tmp_path, "far")
    assert any("WARNING, step 0: engine and trainer disagree" in note for note in told["notes"])
    assert "engine and trainer disagree" in (tmp_path / "runs" / "far" / "run.log").read_text()


def distance(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> float:
    """Sum of absolute differences. What is left of a step is sampled in other batches after a kill, so log-probs
    differ in their last digits and Adam spreads that; a step lost or taken twice would be a large part of the way.
    """
    return float(sum(np.abs(left[name] - right[name]).sum() for name in right))
