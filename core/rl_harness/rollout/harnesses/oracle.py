"""Harness ``oracle``: carries out the task's own solution. A task it does not pass is broken.

In a sandbox it runs ``solution/solve.sh``; what that prints is the answer. A task without a sandbox is answered
with the text of ``solution/answer.txt``: nothing of a task is ever executed on the host.
"""

from __future__ import annotations

from pathlib import Path

from rl_harness.contracts.common import API
from rl_harness.contracts.harness import Harness, HarnessCapabilities, HarnessContext, HarnessResult
from rl_harness.contracts.sandbox import Sandbox
from rl_harness.errors import TaskError
from rl_harness.records.episode import Termination
from rl_harness.rollout.harnesses.exec_events import record_exec
from rl_harness.tasks.check import remove_solution

#: Where task authors expect their solution directory.
SOLUTION_DIRECTORY = "/solution"
_DETAIL_CHARS = 1000


class OracleHarness(Harness):
    """Answers with the solution that the task's author wrote."""

    api = API

    @property
    def capabilities(self) -> HarnessCapabilities:
        return HarnessCapabilities(protocols=frozenset(), needs_sandbox=False, needs_solution=True)

    async def run(self, context: HarnessContext) -> HarnessResult:
        if context.solution is None:
            raise TaskError(f"task {context.task.name} has no solution directory for the oracle to run")
        if context.sandbox is None:
            return HarnessResult(termination=Termination.ANSWER, answer=_written_answer(context.solution))
        return await _solve(context, context.sandbox, context.solution)


async def _solve(context: HarnessContext, sandbox: Sandbox, solution: Path) -> HarnessResult:
    if not (solution / "solve.sh").is_file():
        raise TaskError(f"{solution / 'solve.sh'}: the oracle runs this file, and it does not exist")
    await sandbox.upload(solution, SOLUTION_DIRECTORY)
    result = await sandbox.exec(
        ["bash", sandbox.native_path(f"{SOLUTION_DIRECTORY}/solve.sh")],
        env=context.solution_env,
        timeout=max(context.seconds_left(), 0.001),
    )
    stdout, stderr = (stream.decode("utf-8", "replace") for stream in (result.stdout, result.stderr))
    record_exec(context, "solution/solve.sh", result)
    await remove_solution(sandbox)
    if result.timed_out:
        return HarnessResult(termination=Termination.TIME_LIMIT, detail="solution/solve.sh did not end in time")
    if result.exit_code != 0:
        said = (stderr.strip() or stdout.strip())[-_DETAIL_CHARS:]
        return HarnessResult(
            termination=Termination.AGENT_ERROR, detail=f"solution/solve.sh exited with {result.exit_code}: {said}"
        )
    return HarnessResult(termination=Termination.ANSWER, answer=stdout.strip())


def _written_answer(solution: Path) -> str:
    path = solution / "answer.txt"
    try:
        return path.read_text(encoding="utf-8").rstrip("\n")
    except FileNotFoundError:
        raise TaskError(f"{path}: a task without a sandbox keeps its solution in this file") from None
