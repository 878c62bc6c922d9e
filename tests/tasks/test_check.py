"""``check`` tells sound tasks from broken ones and names the file at fault; every shipped task is sound."""

from __future__ import annotations

import pytest
from rl_harness.sandboxes.process import ProcessProvider
from rl_harness.tasks import check_task, new_task
from rl_harness.tasks.registry import ShellArithmetic, ShellBasics

pytestmark = [pytest.mark.needs("userns"), pytest.mark.asyncio(loop_scope="module")]

OURS = "[rl_harness]\n"


async def test_a_new_task_is_sound(tmp_path, provider):
    report = await check_task(new_task(tmp_path, "fresh"), provider)
    assert report.problems == ()
    assert (report.solution.reward, report.nothing.reward) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("files", "at_fault", "says"),
    [
        ({"solution/solve.sh": "true\n"}, "solution/solve.sh", "the solution scores 0, not 1"),
        ({"solution/solve.sh": "no-such-command\n"}, "solution/solve.sh", "exit code 127"),
        ({"solution/solve.sh": None}, "solution/solve.sh", "no solution"),
        (
            {"tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n"},
            "tests/test.sh",
            "lets an agent pass that does nothing",
        ),
        ({"tests/test.sh": "true\n"}, "tests/test.sh", "gives the solution no score: reward_missing"),
        ({"tests/test.sh": "exit 3\n"}, "tests/test.sh", "exit code 3"),
        ({"tests/test.sh": "true\r\n"}, "", "tests/test.sh: has CRLF"),
        (
            {"task.toml": OURS + "[verifier]\ntimeout_sec = 0.3", "tests/test.sh": "sleep 60\n"},
            "tests/test.sh",
            "timeout",
        ),
        ({"task.toml": OURS + "[environment]\ndocker_image = 'x'"}, "task.toml", "cannot start from an image"),
        ({"task.toml": "[environment"}, "", "not valid TOML"),
    ],
)
async def test_the_file_at_fault_is_named(write_task, provider, files, at_fault, says):
    directory = write_task(OURS, files)
    report = await check_task(directory, provider)
    assert not report.ok
    assert report.problems[0].file == (directory / at_fault if at_fault else directory)
    assert says in str(report.problems[0])


async def test_scripts_need_not_be_executable(write_task, provider):
    directory = write_task(OURS)
    for script in ("tests/test.sh", "solution/solve.sh"):
        (directory / script).chmod(0o644)
    assert (await check_task(directory, provider)).ok


async def test_a_task_whose_verifier_shares_the_sandbox_is_sound_if_its_solution_is(write_task, provider):
    report = await check_task(write_task("[rl_harness]\nverifier = 'shared'\n"), provider)
    assert report.problems == ()
    assert (report.solution.reward, report.solution.flags) == (1.0, ())


async def test_an_answer_task_is_checked_without_a_sandbox(write_task):
    assert (await check_task(write_task("[rl_harness]\nanswer = '4'"), None)).ok


BASICS = ShellBasics(ShellBasics.Options())


@pytest.mark.parametrize("name", [path.name for path in BASICS.directories("heldout", None)])
async def test_every_basic_job_is_sound(provider, name):
    directory = next(path for path in BASICS.directories("heldout", None) if path.name == name)
    assert [str(problem) for problem in (await check_task(directory, provider)).problems] == []


@pytest.mark.parametrize("turns", [1, 2])
async def test_arithmetic_tasks_are_sound(provider, tmp_path, turns):
    benchmark = ShellArithmetic(ShellArithmetic.Options(turns=turns))
    for directory in list(benchmark.directories("dev", tmp_path))[:3]:
        assert (await check_task(directory, provider)).problems == ()


async def test_shipped_tasks_are_sound_without_isolation_too(tmp_path):
    """A sandbox without a root of its own tells the tests where they are and where the reward goes."""
    provider = ProcessProvider(ProcessProvider.Options(state_dir=tmp_path / "sandboxes"))
    try:
        for directory in [
            *list(BASICS.directories("heldout", None))[:4],
            ShellArithmetic(ShellArithmetic.Options()).directories("dev", tmp_path)[0],
            new_task(tmp_path, "fresh"),
        ]:
            assert [str(problem) for problem in (await check_task(directory, provider)).problems] == []
        unaware = new_task(tmp_path, "unaware")
        (unaware / "tests/test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
        report = await check_task(unaware, provider)
        assert "$RL_HARNESS_LOGS" in str(report.problems[0])
    finally:
        await provider.close()
