"""Finds out whether a task is sound: read without a sandbox, then its solution must score 1 and an agent that does
nothing must not pass. Every problem names the file at fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from rl_harness.contracts.sandbox import Sandbox, SandboxSource
from rl_harness.errors import SetupFailed, TaskError, Unsupported
from rl_harness.tasks.load import load_task
from rl_harness.tasks.schema import SETUP_SCRIPT
from rl_harness.tasks.support import unsupported
from rl_harness.tasks.task import Task
from rl_harness.tasks.verifier import Verdict, verify

#: A reward at least this is a pass.
PASS = 1.0 - 1e-9
_REMOVAL_SECONDS = 60.0


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Something wrong with a task, and the file to look at."""

    file: Path
    message: str

    def __str__(self) -> str:
        return f"{self.file}: {self.message}"


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was found. ``solution`` and ``nothing`` are the two verdicts, None where it did not come to that.
    ``refused``: the task, where it is sound so far and asks for more than the sandbox has."""

    directory: Path
    problems: tuple[Problem, ...] = ()
    solution: Verdict | None = None
    nothing: Verdict | None = None
    refused: Task | None = None

    @property
    def ok(self) -> bool:
        return not self.problems


async def check_task(
    directory: Path,
    provider: SandboxSource | None,
    labels: Mapping[str, str] | None = None,
    *,
    unisolated_setup: bool = False,
) -> CheckReport:
    """Check one task directory. ``provider`` may be None for tasks that need no sandbox. ``unisolated_setup`` as for
    :func:`~rl_harness.tasks.support.unsupported`."""
    directory = Path(directory)
    try:
        task = load_task(directory)
    except TaskError as error:
        return CheckReport(directory=directory, problems=(Problem(file=directory, message=str(error)),))
    problems = check_files(task)
    refused = None
    if provider is not None and not problems:
        problems = [
            _blamed(task, sentence)
            for sentence in unsupported(task, provider.capabilities, unisolated_setup=unisolated_setup)
        ]
        refused = task if problems else None
    if problems:
        return CheckReport(directory=directory, problems=tuple(problems), refused=refused)
    labels = {"task": task.name, "run": "check", **(labels or {})}
    try:
        solution = await attempt(task, provider, labels, solve=True)
        nothing = await attempt(task, provider, labels, solve=False)
    except SetupFailed as error:
        problem = Problem(file=directory / SETUP_SCRIPT, message=str(error))
        return CheckReport(directory=directory, problems=(problem,))
    except Unsupported as error:
        # Not all that a sandbox refuses can be read off its capabilities; the other tasks are checked all the same.
        return CheckReport(directory=directory, problems=(_blamed(task, str(error)),))
    return CheckReport(
        directory=directory,
        problems=tuple(_judge(task, solution, nothing)),
        solution=solution,
        nothing=nothing,
    )


def _blamed(task: Task, sentence: str) -> Problem:
    """What a sandbox cannot do is the file's that asks for it, where the sentence begins with one."""
    for environment in (task.environment, task.verifier.environment):
        for file in (environment.dockerfile, environment.compose):
            if file is not None and sentence.startswith(f"{file}: "):
                return Problem(file=file, message=sentence.removeprefix(f"{file}: "))
    return Problem(file=task.directory / "task.toml", message=sentence)


def check_files(task: Task) -> list[Problem]:
    """What can be told without running anything."""
    problems = []
    if task.needs_sandbox and not (task.directory / "solution/solve.sh").is_file():
        problems.append(
            Problem(file=task.directory / "solution/solve.sh", message="there is no solution to check with")
        )
    return problems


async def attempt(task: Task, provider: SandboxSource | None, labels: Mapping[str, str], *, solve: bool) -> Verdict:
    """Run the task's solution, or nothing, and grade it."""
    if not task.needs_sandbox:
        return await verify(task, None, None, _written_answer(task) if solve else None, labels)
    if provider is None:
        raise TaskError(f"{task.directory}: needs a sandbox to be checked in", remedy="choose one with --sandbox")
    sandbox = await provider.create(task.sandbox_spec(labels, isolated=provider.capabilities.isolated))
    try:
        said = await run_solution(task, sandbox) if solve else ""
        verdict = await verify(task, sandbox, provider, None, labels)
        return msgspec.structs.replace(verdict, detail="; ".join(filter(None, (said, verdict.detail))))
    finally:
        await sandbox.close()


def _written_answer(task: Task) -> str:
    """What the ``oracle`` harness answers, or else the first answer of ``task.toml``."""
    path = task.directory / "solution/answer.txt"
    return path.read_text(encoding="utf-8") if path.is_file() else task.verifier.answers[0]


async def run_solution(task: Task, sandbox: Sandbox) -> str:
    """Run ``solution/solve.sh`` as an agent would act. The answer says how it failed, and is empty if it did not."""
    await sandbox.upload(task.directory / "solution", "/solution")
    result = await sandbox.exec(
        ["bash", sandbox.native_path("/solution/solve.sh")], env=task.solution_env, timeout=task.agent_timeout
    )
    await remove_solution(sandbox)
    if result.timed_out:
        return f"solution/solve.sh did not end within {task.agent_timeout:g} s"
    if result.exit_code:
        tail = (result.stdout + result.stderr)[-300:].decode("utf-8", "replace").strip()
        return f"solution/solve.sh ended with exit code {result.exit_code}: {tail}"
    return ""


async def remove_solution(sandbox: Sandbox) -> None:
    """Take away what no agent has: in a shared root it would look like something planted for the tests."""
    for user in (None, "root"):  # the image's own user may not remove what was uploaded
        command = ["rm", "-rf", sandbox.native_path("/solution")]
        if (await sandbox.exec(command, cwd="/", user=user, timeout=_REMOVAL_SECONDS)).ok:
            return


def _judge(task: Task, solution: Verdict, nothing: Verdict) -> list[Problem]:
    tests, solve = task.directory / "tests/test.sh", task.directory / "solution/solve.sh"
    if not task.needs_sandbox:
        tests = solve = task.directory / "task.toml"
    problems = []
    for verdict, who in ((solution, "the solution"), (nothing, "an agent that does nothing")):
        if verdict.unscored is not None:
            problems.append(
                Problem(file=tests, message=f"gives {who} no score: {verdict.unscored}: {_explain(verdict)}")
            )
    if solution.reward is not None and solution.reward < PASS:
        problems.append(
            Problem(file=solve, message=f"the solution scores {solution.reward:g}, not 1: {_explain(solution)}")
        )
    if solution.flags:
        problems.append(Problem(file=solve, message=f"the solution is flagged {', '.join(solution.flags)}"))
    if nothing.reward is not None and nothing.reward >= PASS:
        problems.append(Problem(file=tests, message="lets an agent pass that does nothing"))
    return problems


def _explain(verdict: Verdict) -> str:
    output = verdict.output[-300:].strip()
    printed = f"the verifier printed: {output}" if output else ""
    return "; ".join(filter(None, (verdict.detail, printed))) or "the verifier printed nothing"
