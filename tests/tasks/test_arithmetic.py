"""``shell-arithmetic``: deterministic, splits without a shared pair of operands, built once and whole."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from rl_harness.contracts import GeneratedBenchmark
from rl_harness.contracts.common import Options
from rl_harness.errors import ConfigError
from rl_harness.tasks import open_benchmark
from rl_harness.tasks.registry import ShellArithmetic, ShellBasics

BENCHMARKS = {"shell-arithmetic": ShellArithmetic, "shell-basics": ShellBasics}


class Registry:
    """As much of a registry as opening a benchmark needs."""

    def create(self, kind, name, options):
        cls = BENCHMARKS[name]
        return cls(cls.Options(**options))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Path]:
    return benchmark().directories("dev", tmp_path_factory.mktemp("cache"))


def benchmark(turns: int = 2) -> ShellArithmetic:
    return ShellArithmetic(ShellArithmetic.Options(turns=turns))


def test_no_pair_of_operands_in_either_order_is_in_two_splits():
    pairs = {
        split: {frozenset((p.a, p.b)) for p in benchmark().problems(split)} for split in ("train", "dev", "heldout")
    }
    assert not pairs["train"] & pairs["heldout"]
    assert not pairs["train"] & pairs["dev"]
    assert not pairs["dev"] & pairs["heldout"]


def test_the_same_tasks_in_every_process():
    script = "from rl_harness.tasks.registry import *; b = ShellArithmetic(ShellArithmetic.Options())"
    script += "; print(*[tuple(p) for s in b.splits for p in b.problems(s)])"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, check=True, env={**os.environ, "PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert next(iter(outputs)).count(b"heldout-") == 300


def test_two_turns_keep_the_operands_out_of_the_prompt_and_the_answer_out_of_the_sandbox(tmp_path):
    handle = open_benchmark(Registry(), "shell-arithmetic@1", tmp_path)
    tasks = handle.tasks("heldout", limit=30)
    assert len({task.instruction for task in tasks}) == 3
    for task in tasks:
        assert not any(character.isdigit() for character in task.instruction)
        workspace = task.environment.directory / "workspace"
        assert [file.name for file in workspace.iterdir()] == ["input.txt"]
        expected = (task.directory / "tests/expected.txt").read_text().strip()
        assert expected not in (workspace / "input.txt").read_text().split()
        assert (task.max_turns, task.verifier.mode) == (2, "separate")
    prompts = handle.prompts
    assert (prompts.max_turns, len(prompts.examples), prompts.examples[2].content) == (2, 4, "Output:\n6")


def test_one_turn_has_the_operands_in_the_prompt(tmp_path):
    handle = open_benchmark(Registry(), "shell-arithmetic", tmp_path, {"turns": 1})
    task = handle.tasks("dev", limit=1)[0]
    assert sum(word.strip(".").isdigit() for word in task.instruction.split()) == 2
    assert (task.max_turns, handle.prompts.max_turns) == (1, 1)


def test_order_is_drawn_from_the_seed_and_a_limit_takes_the_first(tmp_path):
    handle = open_benchmark(Registry(), "shell-arithmetic", tmp_path)
    names = [task.name for task in handle.tasks("dev", seed=1)]
    assert names[:5] == [task.name for task in handle.tasks("dev", limit=5, seed=1)]
    assert names != [task.name for task in handle.tasks("dev", seed=2)]
    assert len(set(names)) == handle.splits["dev"] == 100


def test_a_wrong_version_or_split_is_an_error_with_the_right_one(tmp_path):
    with pytest.raises(ConfigError, match="here in version 1, not 9"):
        open_benchmark(Registry(), "shell-arithmetic@9", tmp_path)
    with pytest.raises(ConfigError, match="did you mean 'heldout'"):
        open_benchmark(Registry(), "shell-arithmetic", tmp_path).tasks("held-out")


def test_the_folder_of_another_content_is_another(tmp_path):
    one, two = benchmark(1).directories("dev", tmp_path), benchmark(2).directories("dev", tmp_path)
    assert one[0].parent != two[0].parent


def _build(folder: str) -> int:
    return len(benchmark().directories("dev", Path(folder)))


def test_many_processes_may_build_at_once(tmp_path):
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        assert pool.map(_build, [str(tmp_path)] * 3) == [100] * 3
    assert not [path for path in tmp_path.rglob(".*") if path.is_dir()]


class Fragile(GeneratedBenchmark):
    api = 1
    name, version, splits = "fragile", "1", {"dev": 1}
    fails = True

    def sources(self):
        return ["one"]

    def write(self, split, folder):
        (folder / "a").mkdir()
        if self.fails:
            raise OSError("disk full")


def test_a_build_that_dies_leaves_nothing_that_looks_whole(tmp_path):
    benchmark = Fragile(Options())
    with pytest.raises(OSError, match="disk full"):
        benchmark.directories("dev", tmp_path)
    assert [*tmp_path.rglob("a"), *tmp_path.rglob(".*")] == []
    benchmark.fails = False
    assert [path.name for path in benchmark.directories("dev", tmp_path)] == ["a"]


@pytest.mark.parametrize(
    ("written", "passes"),
    [
        (b"42\n", True),
        (b"42", True),
        (b"42 \n\n", True),
        (b"41\n", False),
        (b"42\n43\n", False),
        (b"41\n42\n", False),
        (b"42 43\n", False),
        (b"042\n", False),
        (b"+42\n", False),
        (b"42\x00", False),
        (b"4\x002\n", False),
        (b"", False),
        (b"42" + b" " * 100 + b"7", True),
    ],
)
def test_the_answer_must_be_exactly_the_number(built, tmp_path, written, passes):
    """The shipped test.sh itself, told where to leave the reward."""
    shutil.copytree(built[0] / "tests", tmp_path / "tests")
    (tmp_path / "tests/expected.txt").write_text("42\n")
    (tmp_path / "answer.txt").write_bytes(written)
    logs = {"RL_HARNESS_LOGS": str(tmp_path)}
    subprocess.run(["bash", tmp_path / "tests/test.sh"], check=True, cwd=tmp_path, env={**os.environ, **logs})
    assert (tmp_path / "reward.txt").read_text() == f"{int(passes)}\n"
