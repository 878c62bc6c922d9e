"""Grades one attempt (rules 3 and 4 of the architecture): the agent cannot write its own grade, and what is not the
agent's failure is *unscored*, never 0.

In every mode all agent processes are dead before anything else happens, the tests are files the agent never saw,
and ``/logs/verifier`` is made anew. Decisions, all of them tested:

- The exit code of ``test.sh`` does not matter when it left a valid reward (scripts commonly end with the code of a
  failing test), except that a verifier killed by a signal has not graded, and one that fails *and* leaves a negative
  number has crashed, not graded.
- In a shared root, an agent that removed or replaced the shell, the loader, the C library or a whole system
  directory, or spoiled the accounts so that nobody can run the tests, scores 0 (and is flagged) if no reward came of
  it, be it that the tests never end.
- ``reward.json`` and ``reward.txt`` may both be there when they agree.
- Files that cannot be carried to a separate verifier (devices, links out of their tree) are left out, and the
  verifier judges what is left; more bytes than the task allows score 0, since they are the agent's doing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from rl_harness.contracts.sandbox import ExecResult, Sandbox, SandboxSource
from rl_harness.errors import BrokenSandbox, RlHarnessError, SandboxError, TaskError, UnsafeFiles
from rl_harness.records.episode import UnscoredReason
from rl_harness.tasks import rewards as reward_files
from rl_harness.tasks.carry import Carried, collect, place
from rl_harness.tasks.rewards import InvalidReward
from rl_harness.tasks.tamper import accounts, destroyed, suspicious
from rl_harness.tasks.task import Task

_log = logging.getLogger(__name__)

TAMPERED = "tampered"
TESTS = "/tests"
LOGS = "/logs/verifier"
OUTPUT_LIMIT = 256 << 10
#: Who grades in a sandbox with several users, unless the task says.
ROOT = "root"
#: Seconds on top of the verifier's own timeout for moving files and starting a sandbox.
GRACE = 120.0
#: Seconds for a command that does nothing.
_PROBE = 20.0
_KEPT_OUTPUT = 4000
#: How grading ends where the shell or the system's tools do not work.
_BROKEN = (UnscoredReason.VERIFIER_ERROR, UnscoredReason.VERIFIER_TIMEOUT, UnscoredReason.REWARD_MISSING)
_NO_ROOT = " (this sandbox has no root of its own: tests write to $RL_HARNESS_LOGS and find themselves by $0)"
#: What a shell or loader would read before the tests, if the image set it.
_NO_HOOKS = {"BASH_ENV": "", "ENV": "", "LD_PRELOAD": ""}

# Its arguments are native paths: in a sandbox without a root of its own, /tests would be the host's.
_PREPARE = """
logs=$1 workdir=$2; shift 2
parent=${logs%/*}
[ -d "$parent" ] && [ ! -L "$parent" ] || rm -rf "$parent"
rm -rf "$logs" "$@" && mkdir -p "$logs" && chmod 0777 "$logs" || exit 1
[ -d "$workdir" ] || { rm -rf "$workdir"; mkdir -p "$workdir"; }
"""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """``reward`` is the one that counts and ``rewards`` all of them, by name; both None exactly when ``unscored``
    says why. ``output`` is the end of what the verifier printed."""

    reward: float | None = None
    rewards: dict[str, float] | None = None
    unscored: UnscoredReason | None = None
    detail: str = ""
    flags: tuple[str, ...] = ()
    seconds: float = 0.0
    output: str = ""


async def verify(
    task: Task,
    sandbox: Sandbox | None,
    provider: SandboxSource | None,
    answer: str | None,
    labels: Mapping[str, str],
) -> Verdict:
    """Grade the attempt whose agent used ``sandbox`` and ended with ``answer``.

    ``provider``, or what stands before it, makes the fresh sandbox of a ``separate`` verifier, labelled with
    ``labels``. Raises nothing but cancellation: whatever goes wrong becomes a reason. The agent's sandbox is left to
    the caller, who must close it: it ran agent code.
    """
    started = time.monotonic()
    limit = task.verifier.timeout + GRACE + _build_time(task)
    bound = asyncio.timeout(limit)
    try:
        async with bound:
            verdict = await _grade(task, sandbox, provider, answer, labels)
    except UnsafeFiles as error:
        # The agent's doing, such as a link where the tests belong: otherwise it could escape its grade.
        verdict = Verdict(reward=0.0, rewards={reward_files.MAIN: 0.0}, detail=str(error))
    except SandboxError as error:
        verdict = _unscored(UnscoredReason.SANDBOX_ERROR, str(error))
    except RlHarnessError as error:
        verdict = _unscored(UnscoredReason.VERIFIER_ERROR, str(error))
    except Exception as error:
        if isinstance(error, TimeoutError) and bound.expired():
            verdict = _unscored(UnscoredReason.VERIFIER_TIMEOUT, f"no verdict after {limit:.0f} s")
        else:
            # A full disk, or a mistake in a provider: this attempt is lost, the others go on.
            _log.exception("verifying %s", task.name)
            verdict = _unscored(UnscoredReason.VERIFIER_ERROR, f"{type(error).__name__}: {error}")
    return msgspec.structs.replace(verdict, seconds=time.monotonic() - started)


def _build_time(task: Task) -> float:
    """A separate verifier may be the first to need its environment prepared."""
    environment = task.verifier.environment
    built = environment.build_timeout if environment.image or environment.dockerfile or environment.compose else 0.0
    return built + sum(step.timeout for step in environment.setup)


async def _grade(
    task: Task,
    sandbox: Sandbox | None,
    provider: SandboxSource | None,
    answer: str | None,
    labels: Mapping[str, str],
) -> Verdict:
    if task.verifier.mode == "answer":
        return _grade_answer(task, answer)
    if sandbox is None or provider is None:
        raise TaskError(f"task {task.name} is graded in a sandbox, and none was given")
    await sandbox.kill_processes()
    if task.verifier.mode == "separate":
        return await _grade_separate(task, sandbox, provider, labels)
    return await _grade_shared(task, sandbox, provider)


def _grade_answer(task: Task, answer: str | None) -> Verdict:
    matches = answer is not None and answer.strip() in {item.strip() for item in task.verifier.answers}
    reward = 1.0 if matches else 0.0
    return Verdict(reward=reward, rewards={reward_files.MAIN: reward})


async def _grade_shared(task: Task, sandbox: Sandbox, provider: SandboxSource) -> Verdict:
    """In the agent's root, which is scanned for what could have altered the verifier before it is used."""
    flags: tuple[str, ...] = ()
    detail = ""
    found: list[str] = []
    if provider.capabilities.changes:  # lacking only where nothing is isolated, which the whole run is marked with
        found = suspicious(await sandbox.changes(), await _search_path(sandbox))
    if found:
        flags = (TAMPERED,)
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        detail = f"the agent changed {', '.join(found[:5])}{more}"
    essential = destroyed(found)
    if accounts(found) and not await _can_run_tests(task, sandbox, provider):
        essential = accounts(found)
        verdict = _unscored(UnscoredReason.VERIFIER_ERROR, "no command can be run any more as the user of the tests")
    else:
        try:
            verdict = await _prepare_tests(task, sandbox, provider) or await _run_tests(task, sandbox, provider)
        except SandboxError as error:
            if not essential or isinstance(error, UnsafeFiles):
                raise
            verdict = _unscored(UnscoredReason.SANDBOX_ERROR, str(error))
    if (
        (verdict.unscored in _BROKEN or verdict.unscored is UnscoredReason.SANDBOX_ERROR)
        and essential
        and await sandbox.alive()
    ):
        # Not infrastructure: the agent took away what runs the tests, and would be given another attempt for it.
        verdict = Verdict(reward=0.0, rewards={reward_files.MAIN: 0.0}, detail=verdict.detail, output=verdict.output)
    return msgspec.structs.replace(verdict, flags=flags, detail="; ".join(filter(None, (verdict.detail, detail))))


async def _search_path(sandbox: Sandbox) -> list[str]:
    """Where the sandbox looks for tools. Nothing is known of it when the agent left no way to run a command."""
    try:
        async with asyncio.timeout(_PROBE):
            path = await sandbox.exec(["/bin/sh", "-c", 'printf %s "$PATH"'], cwd="/", timeout=_PROBE)
    except (SandboxError, TimeoutError):
        if await sandbox.alive():
            return []
        raise
    return path.stdout.decode("utf-8", "replace").split(":")


async def _can_run_tests(task: Task, sandbox: Sandbox, provider: SandboxSource) -> bool:
    """Whether the user who runs the tests is still found, in a sandbox that is alive. Asked from outside, since it is
    the engine that reads the accounts, and may do so for ever where they are a pipe."""
    user = (task.verifier.user or ROOT) if provider.capabilities.users else None
    try:
        async with asyncio.timeout(_PROBE):
            return (await sandbox.exec(["/bin/sh", "-c", "exit 0"], cwd="/", user=user, timeout=_PROBE)).ok
    except (SandboxError, TimeoutError):
        return not await sandbox.alive()


async def _grade_separate(task: Task, sandbox: Sandbox, provider: SandboxSource, labels: Mapping[str, str]) -> Verdict:
    """In a fresh root, to which only the declared artifacts are carried, through a folder on the host."""
    spec = task.verifier
    try:
        async with collect(sandbox, spec.artifacts, spec.artifact_limit) as carried:
            return await _grade_carried(task, carried, provider, labels)
    except UnsafeFiles as error:
        return Verdict(reward=0.0, rewards={reward_files.MAIN: 0.0}, detail=str(error))


async def _grade_carried(
    task: Task, carried: Sequence[Carried], provider: SandboxSource, labels: Mapping[str, str]
) -> Verdict:
    spec = task.verifier_spec({**labels, "role": "verifier"}, isolated=provider.capabilities.isolated)
    with _nobodys_doing(UnsafeFiles):
        fresh = await provider.create(spec)
    try:
        with _room(), _nobodys_doing(BrokenSandbox):
            await place(carried, fresh, clean=task.verifier_is_prepared or spec.environment.directory is not None)
            unprepared = await _prepare_tests(task, fresh, provider)
        with _room():
            return unprepared or await _run_tests(task, fresh, provider)
    finally:
        try:
            await fresh.close()
        except SandboxError:
            pass  # the verdict stands; the provider's reaper removes what is left


@contextlib.contextmanager
def _room() -> Iterator[None]:
    """A machine for the tests that is too small for them is nothing that an agent is graded by."""
    try:
        yield
    except UnsafeFiles as error:
        if not error.full:
            raise
        raise SandboxError(
            f"the verifier's sandbox is full: {error.message}",
            remedy=error.remedy or "raise [environment] storage_mb of the task, or choose a sandbox with a larger disk",
        ) from None


@contextlib.contextmanager
def _nobodys_doing(kind: type[SandboxError]) -> Iterator[None]:
    """What an agent would be blamed for happened in a sandbox that no agent has been in."""
    try:
        yield
    except kind as error:
        raise SandboxError(error.message, remedy=error.remedy) from None


async def _prepare_tests(task: Task, sandbox: Sandbox, provider: SandboxSource) -> Verdict | None:
    """Bring the tests into the sandbox; a verdict if that cannot be done."""
    spec = task.verifier
    tests, logs = sandbox.native_path(TESTS), sandbox.native_path(LOGS)
    stale = [] if spec.bundled else [tests]
    workdir = sandbox.native_path(spec.environment.workdir)
    prepared = await sandbox.exec(
        ["/bin/sh", "-c", _PREPARE, "sh", logs, workdir, *stale],
        cwd="/",
        user=ROOT if provider.capabilities.users else None,  # an image may name another for its commands
        timeout=GRACE / 2,
    )
    if not prepared.ok:
        return _unscored(UnscoredReason.VERIFIER_ERROR, f"{LOGS} could not be made in the sandbox: {_text(prepared)}")
    if not spec.bundled:
        await sandbox.upload(task.directory / "tests", TESTS)
    return None


async def _run_tests(task: Task, sandbox: Sandbox, provider: SandboxSource) -> Verdict:
    spec = task.verifier
    tests, logs = sandbox.native_path(TESTS), sandbox.native_path(LOGS)
    elsewhere = {} if logs == LOGS else {"RL_HARNESS_TESTS": tests, "RL_HARNESS_LOGS": logs}
    # exec starts from the task's own environment: nothing an agent exported is in it.
    result = await sandbox.exec(
        ["bash", f"{tests}/test.sh"],
        env={**spec.env, **_NO_HOOKS, **elsewhere},
        # Where no other user can be chosen everything runs as the sandbox's root; see ``unsupported``.
        user=(spec.user or ROOT) if provider.capabilities.users else None,
        timeout=spec.timeout,
        output_limit=OUTPUT_LIMIT,
    )
    if not result.timed_out:
        # Nothing the tests started may touch the reward between now and its being read.
        await sandbox.kill_processes()
    verdict = await _read_verdict(task, sandbox, result)
    return msgspec.structs.replace(verdict, output=_text(result, _KEPT_OUTPUT))


async def _read_verdict(task: Task, sandbox: Sandbox, result: ExecResult) -> Verdict:
    if result.timed_out:
        return _unscored(
            UnscoredReason.VERIFIER_TIMEOUT, f"tests/test.sh did not end within {task.verifier.timeout:g} s"
        )
    if result.signal is not None:
        return _unscored(UnscoredReason.VERIFIER_ERROR, f"tests/test.sh was killed by signal {result.signal}")
    try:
        rewards = reward_files.combine(
            await _read(sandbox, f"{LOGS}/reward.json"), await _read(sandbox, f"{LOGS}/reward.txt")
        )
    except InvalidReward as error:
        return _unscored(UnscoredReason.REWARD_INVALID, str(error))
    if rewards is None:
        return _no_reward(result, "" if sandbox.native_path(LOGS) == LOGS else _NO_ROOT)
    reward = reward_files.main_reward(rewards)
    if result.exit_code and reward < 0:
        return _unscored(
            UnscoredReason.VERIFIER_ERROR, f"tests/test.sh failed (exit code {result.exit_code}) and left {reward:g}"
        )
    return Verdict(reward=reward, rewards=rewards)


def _no_reward(result: ExecResult, hint: str) -> Verdict:
    if not result.exit_code:
        return _unscored(
            UnscoredReason.REWARD_MISSING, f"tests/test.sh left no reward.json or reward.txt in {LOGS}{hint}"
        )
    tail = _text(result, 300)
    return _unscored(
        UnscoredReason.VERIFIER_ERROR,
        f"tests/test.sh ended with exit code {result.exit_code} and left no reward{hint}: {tail}",
    )


async def _read(sandbox: Sandbox, path: str) -> bytes | None:
    try:
        return await sandbox.read_file(path, limit=reward_files.SIZE_LIMIT)
    except FileNotFoundError:
        return None
    except SandboxError as error:
        if await sandbox.alive():
            raise InvalidReward(str(error)) from None
        raise


def _unscored(reason: UnscoredReason, detail: str) -> Verdict:
    return Verdict(unscored=reason, detail=detail)


def _text(result: ExecResult, limit: int = 300) -> str:
    return (result.stdout + result.stderr)[-limit:].decode("utf-8", "replace").strip()
