"""Runs the set-up steps of an environment in a sandbox no agent has been in, by the provider's own means."""

from __future__ import annotations

from collections.abc import Sequence

from rl_harness.contracts.sandbox import ExecResult, Sandbox, SetupStep
from rl_harness.errors import SandboxError, SetupFailed
from rl_harness.excerpts import excerpt

#: How much of a failed step's output the error quotes.
KEPT_OUTPUT = 4000
#: Read of each stream: the reason is at the end, and what is over a limit is cut there.
_OUTPUT_LIMIT = 64 << 20
_CHECK_SECONDS = 60.0
_SCRIPT = "/tmp/.rl-harness-setup"
_RUN = 'if command -v bash >/dev/null 2>&1; then exec bash "$1"; fi; exec sh "$1"'


async def run_setup(sandbox: Sandbox, steps: Sequence[SetupStep], *, users: bool) -> None:
    """Run the steps in order in the working directory, as root, and kill what they leave running.

    ``users``: the sandbox can run commands as another user than its own. Raises ``SetupFailed`` with the step's
    name, its exit code and the end of its output, also when no command runs any more after it.
    """
    for step in steps:
        await sandbox.write_file(_SCRIPT, step.script.encode(), mode=0o755)
        result = await sandbox.exec(
            ["/bin/sh", "-c", _RUN, "sh", sandbox.native_path(_SCRIPT)],
            env=step.env,
            user="root" if users else None,
            timeout=step.timeout,
            output_limit=_OUTPUT_LIMIT,
        )
        if not result.ok:
            raise SetupFailed(f"set-up step {step.name!r} {_ending(result, step)}{_tail(result)}")
        await _check_commands_run(sandbox, step)
    if steps:
        await sandbox.exec(["rm", "-f", sandbox.native_path(_SCRIPT)], cwd="/", user="root" if users else None)
        await sandbox.kill_processes()


async def _check_commands_run(sandbox: Sandbox, step: SetupStep) -> None:
    """A step that ended well may have taken the shell away, which would show in every episode and nowhere else."""
    try:
        result = await sandbox.exec("exit 0", cwd="/", timeout=_CHECK_SECONDS)
    except SandboxError as error:
        if not await sandbox.alive():
            raise
        raise SetupFailed(f"after set-up step {step.name!r} no command runs any more: {error.message}") from None
    if not result.ok:
        raise SetupFailed(f"after set-up step {step.name!r} no command runs any more{_tail(result)}")


def _ending(result: ExecResult, step: SetupStep) -> str:
    if result.timed_out:
        return f"did not end within {step.timeout:g} s"
    if result.signal is not None:
        return f"was killed by signal {result.signal}"
    return f"failed with exit code {result.exit_code}"


def _tail(result: ExecResult) -> str:
    parts = [stream.decode("utf-8", "replace").strip() for stream in (result.stdout, result.stderr)]
    said = "\n".join(filter(None, parts))
    return f":\n{excerpt(said, KEPT_OUTPUT)}" if said else ", and printed nothing"
