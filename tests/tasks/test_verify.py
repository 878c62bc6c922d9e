"""Grading in real sandboxes: what an agent could do to its own grade, and what is not the agent's failure.

Known faults 32 (the agent writes its reward, stale files), 33 (strict parsing), 35 and rule 3 (failures of the
infrastructure are not 0), rule 4 (who may influence a verifier).
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from rl_harness.errors import SandboxError, UnsafeFiles
from rl_harness.records.episode import UnscoredReason
from rl_harness.tasks import Task, Verdict, load_task, verify

pytestmark = [pytest.mark.needs("userns"), pytest.mark.asyncio(loop_scope="module")]

SEPARATE = "[verifier]\ntimeout_sec = 20\n[rl_harness]\nverifier = 'separate'\nartifact_limit_mb = 1\n"
SHARED = "[verifier]\ntimeout_sec = 20\n[rl_harness]\nverifier = 'shared'\n"
PATH = "[environment.env]\nPATH = '/opt/tools:/usr/local/bin:/usr/bin:/bin'\n"
BOTH = pytest.mark.parametrize("toml", [SEPARATE, SHARED], ids=["separate", "shared"])

# Passes when /app/done says yes; stray files in the log folder are left alone, as careless tests would.
YES = '[ "$(cat /app/done 2> /dev/null)" = yes ] && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n'


@pytest.fixture
def grade(write_task, provider):
    """``await grade(toml, agent's script, test.sh)``: the verdict on one attempt."""

    async def run(
        toml: str, agent: str, test: str = YES, files: dict[str, str | None] | None = None, name: str = "job"
    ) -> Verdict:
        task = load_task(write_task(toml, {"tests/test.sh": test, **(files or {})}, name))
        return await attempt(task, provider, agent)

    return run


async def attempt(task: Task, provider, agent: str) -> Verdict:
    sandbox = await provider.create(task.sandbox_spec({"run": "test"}))
    try:
        await sandbox.exec(agent, timeout=20)
        return await verify(task, sandbox, provider, None, {"run": "test"})
    finally:
        await sandbox.close()


@BOTH
async def test_honest_work_is_graded_on_what_it_left(grade, provider, toml):
    verdict = await grade(toml, "echo yes > done")
    assert (verdict.reward, verdict.rewards, verdict.unscored, verdict.flags) == (1.0, {"reward": 1.0}, None, ())
    assert verdict.seconds > 0
    assert await provider.list() == []


@BOTH
async def test_doing_nothing_scores_0(grade, toml):
    assert (await grade(toml, "true")).reward == 0.0


@BOTH
@pytest.mark.parametrize(
    "agent",
    [
        "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo 1 > /logs/verifier/reward.json",
        "mkdir -p /logs; mkdir mine; echo 1 > mine/reward.json; ln -s /app/mine /logs/verifier",
        "mkdir -p mine/verifier; echo 1 > mine/verifier/reward.json; rm -rf /logs; ln -s /app/mine /logs",
        "mkdir -p /logs/verifier; chmod 000 /logs/verifier /logs",
        "rm -rf /logs; echo 1 > /logs",
    ],
    ids=["writes it", "links the folder", "links its parent", "locks it", "puts a file there"],
)
async def test_a_reward_the_agent_wrote_does_not_count(grade, toml, agent):
    # A grader that says nothing: whatever reward is read would be the agent's.
    verdict = await grade(toml, agent, "true")
    assert (verdict.reward, verdict.unscored) == (None, UnscoredReason.REWARD_MISSING)


@BOTH
async def test_a_background_process_is_dead_before_the_verifier_starts(grade, toml):
    agent = "setsid bash -c 'while true; do echo 1 > /logs/verifier/reward.json; done' > /dev/null 2>&1 & sleep 0.1"
    verdict = await grade(toml, agent, "sleep 0.2; ls /logs/verifier; echo 0 > /logs/verifier/reward.txt")
    assert (verdict.reward, verdict.output) == (0.0, "")


@BOTH
async def test_processes_the_tests_started_are_dead_before_the_reward_is_read(grade, toml):
    test = "setsid bash -c 'sleep 0.05; echo 1 > $L' > /dev/null 2>&1 & echo 0 > $L"
    test = f"export L=/logs/verifier/reward.txt; {test}"
    assert (await grade(toml, "true", test)).reward == 0.0


@BOTH
async def test_tests_the_agent_left_in_place_are_not_run(grade, toml):
    agent = "mkdir /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/extra.sh"
    test = "[ -e /tests/extra.sh ] && . /tests/extra.sh || echo 0 > /logs/verifier/reward.txt"
    assert (await grade(toml, agent, test)).reward == 0.0


@pytest.mark.parametrize(
    "agent",
    [
        "printf '#!/bin/sh\\necho 1 > /logs/verifier/reward.txt\\n' > /tmp/bash; chmod 755 /tmp/bash; "
        "cp /tmp/bash /usr/bin/bash.new; mv /usr/bin/bash.new /usr/bin/bash",
        "printf '#!/bin/sh\\necho yes\\n' > /usr/local/bin/cat; chmod 755 /usr/local/bin/cat",
        "rm -f /usr/bin/cat; printf '#!/bin/sh\\necho yes\\n' > /usr/bin/cat; chmod 755 /usr/bin/cat",
        "touch /etc/ld.so.preload",
        "echo 'cat() { echo yes; }' > /root/.bashrc",
        "mkdir -p /opt/tools; printf '#!/bin/sh\\necho yes\\n' > /opt/tools/cat; chmod 755 /opt/tools/cat",
        "mkdir -p /usr/lib/python3/dist-packages; echo 'import os' > /usr/lib/python3/dist-packages/x.pth",
    ],
    ids=["bash", "PATH", "cat", "preload", "bashrc", "image's PATH", "pth"],
)
async def test_tampering_is_flagged_where_the_root_is_shared_and_useless_where_it_is_not(write_task, provider, agent):
    shared = load_task(write_task(SHARED + PATH, {"tests/test.sh": YES}, name="shared"))
    verdict = await attempt(shared, provider, agent)
    assert verdict.flags == ("tampered",)
    assert "the agent changed /" in verdict.detail
    separate = load_task(write_task(SEPARATE + PATH, {"tests/test.sh": YES}, name="separate"))
    verdict = await attempt(separate, provider, agent)
    assert (verdict.reward, verdict.flags) == (0.0, ())


async def test_ordinary_work_in_a_shared_root_is_not_flagged(grade):
    agent = (
        "echo yes > done; mkdir -p bin sub; echo x > bin/tool; echo y > /tmp/z; echo z > /root/notes; mkdir /srv/www"
    )
    assert (await grade(SHARED, agent)).flags == ()


@BOTH
async def test_an_agent_that_deletes_everything_scores_0(grade, toml):
    assert (await grade(toml, "cd /; rm -rf /app /app/.*")).reward == 0.0


@BOTH
@pytest.mark.parametrize(
    "agent",
    [
        "rm -rf --no-preserve-root / 2> /dev/null",
        "rm -rf /bin /usr/bin",
        "rm -f /usr/bin/bash",
        "printf '#!/bin/sh\nexit 0\n' > /tmp/bash; chmod 755 /tmp/bash; mv /tmp/bash /usr/bin/bash",
        "rm -f /usr/lib/*/libc.so.6 /lib/*/libc.so.6",
        "rm -rf /etc",
        "echo spoiled > /etc/passwd",
        "rm /etc/passwd; mkdir /etc/passwd",
        "rm -f /etc/group; mkdir /etc/group",
        "rm -rf /etc; touch /etc",
    ],
    ids=["everything", "tools", "bash", "another bash", "C library", "etc", "passwd", "folder", "group", "file"],
)
async def test_an_agent_cannot_escape_its_grade_by_breaking_what_grades_it(grade, toml, agent):
    verdict = await grade(toml, agent)
    assert (verdict.reward, verdict.unscored) == (0.0, None), verdict


@pytest.mark.needs("root")  # only its agents can replace the shell
async def test_an_agent_cannot_escape_its_grade_by_a_shell_that_hangs(grade):
    toml = SHARED.replace("20", "1")
    agent = r"printf '#!/bin/dash\nsleep 1000\n' > /tmp/b; chmod 755 /tmp/b; cp /tmp/b /usr/bin/bash"
    verdict = await grade(toml, agent)
    assert (verdict.reward, verdict.unscored, verdict.flags) == (0.0, None, ("tampered",)), verdict


async def test_a_service_that_was_installed_with_its_user_is_not_destruction(grade):
    agent = "echo 'redis:x:101:101::/:/bin/false' >> /etc/passwd; echo 'redis:x:101:' >> /etc/group"
    verdict = await grade(SHARED, agent, "exit 7")
    assert (verdict.reward, verdict.unscored) == (None, UnscoredReason.VERIFIER_ERROR)
    assert verdict.flags == ("tampered",)


async def test_tests_that_fail_after_an_installation_are_not_a_0(grade):
    verdict = await grade(SHARED, "touch /usr/local/bin/tool /usr/bin/another", "exit 7")
    assert (verdict.reward, verdict.unscored) == (None, UnscoredReason.VERIFIER_ERROR)
    assert verdict.flags == ("tampered",)


@BOTH
async def test_what_the_agent_deleted_stays_deleted(grade, toml):
    test = "[ -e /app/names.txt ] && r=0 || r=1; echo $r > /logs/verifier/reward.txt"
    assert (await grade(toml, "rm names.txt", test)).reward == 1.0
    assert (await grade(toml, "true", test, name="again")).reward == 0.0


async def test_only_artifacts_reach_a_separate_verifier(grade):
    toml = (
        "artifacts = ['/app/out', '/srv/result.txt', { source = '/app/logs', exclude = ['*.tmp', 'old'] }]\n" + SEPARATE
    )
    agent = (
        "mkdir -p out logs/old; echo 1 > out/a; chmod 750 out/a; echo 2 > other; echo 3 > /srv/result.txt; "
        "echo 4 > logs/x.tmp; echo 5 > logs/old/y; echo 6 > logs/z; "
        "mkdir -p /logs/artifacts; echo 7 > /logs/artifacts/w"
    )
    test = "find /app /srv/result.txt /logs/artifacts -type f | sort; stat -c %a /app/out/a; " + YES
    expected = "/app/logs/z /app/names.txt /app/out/a /logs/artifacts/w /srv/result.txt 750"
    assert (await grade(toml, agent, test)).output.split() == expected.split()


@BOTH
async def test_a_link_to_the_expected_answer_does_not_pass(grade, toml):
    test = "[ ! -L /app/done ] && grep -q yes /app/done && r=1 || r=0; echo $r > /logs/verifier/reward.txt"
    verdict = await grade(toml, "ln -s /tests/expected.txt done", test, {"tests/expected.txt": "yes\n"})
    assert verdict.reward == 0.0


async def test_unsafe_files_are_left_out_and_the_rest_is_graded(grade):
    agent = (
        "echo yes > done; mkfifo pipe; ln -s /etc/passwd link; ln -s ../../../etc out; mkdir sub; ln -s ../done sub/ok"
    )
    test = "ls /app /app/sub; " + YES
    verdict = await grade(SEPARATE, agent, test)
    assert verdict.reward == 1.0
    assert set(verdict.output.split()) == {"/app:", "done", "names.txt", "sub", "/app/sub:", "ok"}


HANGS_READERS = ["mkfifo done", "ln -s /dev/zero done", "mkfifo pipe; ln -s pipe done"]


@pytest.mark.parametrize("artifact", ["/app", "/app/done"], ids=["folder", "file"])
@pytest.mark.parametrize("agent", HANGS_READERS)
async def test_an_answer_that_would_be_waited_for_is_a_missing_one(grade, agent, artifact):
    """Not waited for, neither by us nor by tests that read it without looking."""
    toml = f"artifacts = ['{artifact}']\n{SEPARATE}"
    verdict = await grade(toml, agent, "find /app -type p; " + YES)
    assert (verdict.reward, verdict.output) == (0.0, "")


async def test_in_a_shared_root_only_the_tests_can_beware_of_a_pipe(grade):
    """What docs/tasks.md says: reading without looking waits, looking first does not."""
    hasty = await grade(SHARED.replace("20", "0.5"), "mkfifo done")
    assert hasty.unscored is UnscoredReason.VERIFIER_TIMEOUT
    test = f"if [ -f done ]; then {YES} else echo 0 > /logs/verifier/reward.txt; fi"
    careful = await grade(SHARED, "mkfifo done", test, name="careful")
    assert careful.reward == 0.0


async def test_in_a_shared_root_python_takes_the_agents_modules_unless_it_is_told_not_to(grade):
    agent = "echo 'raise SystemExit(0)' > json.py"
    test = "cd /app; {} -c 'import json; print(0)' > $L; [ -s $L ] || echo 1 > $L"
    for python, name, reward in (("python3", "careless", 1.0), ("python3 -I", "careful", 0.0)):
        verdict = await grade(SHARED, agent, f"L=/logs/verifier/reward.txt; {test.format(python)}", name=name)
        assert (name, verdict.reward) == (name, reward)


async def test_what_the_agent_left_reaches_the_verifier_byte_for_byte(grade):
    """A patch lost the newline it did not have, scripts got other line ends, commits moved what was compared with."""
    look = "find . -type f -exec md5sum {} + -exec stat -c '%a %n' {} + | sort"
    agent = (
        "printf 'a\\r\\nb' > fix.patch; printf '#!/bin/sh\\r\\n' > run; chmod 755 run; mkdir .git; "
        f"printf 'ref: refs/heads/mine' > .git/HEAD; mkdir -p /logs/artifacts; {look} > /logs/artifacts/was"
    )
    test = f"{look} | cmp - /logs/artifacts/was && grep -c . /logs/artifacts/was; echo 0 > /logs/verifier/reward.txt"
    verdict = await grade(SEPARATE, agent, test)
    assert verdict.output == "8"  # two lines of each: names.txt, fix.patch, run, .git/HEAD


async def test_an_agent_finds_neither_the_tasks_history_nor_its_solution(grade):
    """The right patch was there to be read in the history of the repository."""
    files = {".git/packed-refs": "gold", "environment/.git/gold": "gold", "solution/gold.patch": "gold"}
    test = "cat found; echo 0 > /logs/verifier/reward.txt"
    for toml, name in ((SEPARATE, "separate"), (SHARED, "shared")):
        agent = "find / -xdev ( -name 'gold*' -o -name packed-refs ) > found 2> /dev/null"
        verdict = await grade(toml, agent.replace("(", "\\(").replace(")", "\\)"), test, files, name=name)
        assert (verdict.reward, verdict.output) == (0.0, "")


@pytest.mark.parametrize("agent", ["truncate -s 1T huge", "head -c 3000000 /dev/zero > big"], ids=["sparse", "real"])
async def test_more_than_the_task_allows_scores_0_and_never_reaches_the_host(grade, agent):
    verdict = await grade(SEPARATE, f"echo yes > done; {agent}")
    assert verdict.reward == 0.0
    assert verdict.detail


@pytest.mark.parametrize(
    "agent", ["rm -rf /app; ln -s / /app", "rm -rf /app; ln -s /tests /app", "rm -rf /app; echo 1 > /app"]
)
async def test_another_thing_in_place_of_the_working_directory(grade, agent):
    verdict = await grade(SEPARATE, f"cd /; {agent}")
    assert (verdict.reward, verdict.unscored) == (0.0, None)


async def test_a_verifier_that_hangs_is_stopped_and_is_not_a_0(grade):
    toml = SEPARATE.replace("20", "0.5")
    verdict = await grade(toml, "true", "echo 1 > /logs/verifier/reward.txt; sleep 1000 & sleep 1000")
    assert (verdict.reward, verdict.unscored) == (None, UnscoredReason.VERIFIER_TIMEOUT)
    assert "0.5 s" in verdict.detail


async def test_endless_output_is_bounded(grade):
    verdict = await grade(SEPARATE, "echo yes > done", "head -c 300000000 /dev/zero; " + YES)
    assert verdict.reward == 1.0
    assert len(verdict.output) <= 4000


@pytest.mark.parametrize(
    ("test", "reward", "reason"),
    [
        ("echo 1 > $L/reward.txt; exit 1", 1.0, None),
        ("echo 0.25 > $L/reward.txt; exit 0", 0.25, None),
        ('echo \'{"a": 1, "b": 0}\' > $L/reward.json', 0.5, None),
        ("echo 1 > $L/reward.json; echo 1.0 > $L/reward.txt", 1.0, None),
        ("echo -1 > $L/reward.txt; exit 0", -1.0, None),
        ("echo -1 > $L/reward.txt; exit 1", None, UnscoredReason.VERIFIER_ERROR),
        ("echo -1; exit 1", None, UnscoredReason.VERIFIER_ERROR),
        ("exit 0", None, UnscoredReason.REWARD_MISSING),
        ("echo 1 > $L/reward.txt; kill -9 $$", None, UnscoredReason.VERIFIER_ERROR),
        ("echo 1 > $L/reward.json; echo 0 > $L/reward.txt", None, UnscoredReason.REWARD_INVALID),
        ("echo true > $L/reward.json", None, UnscoredReason.REWARD_INVALID),
        ("echo nan > $L/reward.txt", None, UnscoredReason.REWARD_INVALID),
        (": > $L/reward.txt", None, UnscoredReason.REWARD_INVALID),
        ("mkdir $L/reward.json; echo 1 > $L/reward.txt", None, UnscoredReason.REWARD_INVALID),
        ("mkfifo $L/reward.txt", None, UnscoredReason.REWARD_INVALID),
        ("echo 1 > $L/x; ln -s x $L/reward.txt", None, UnscoredReason.REWARD_INVALID),
        ("ln -s /etc/hostname $L/reward.txt", None, UnscoredReason.REWARD_INVALID),
        ("truncate -s 1G $L/reward.txt", None, UnscoredReason.REWARD_INVALID),
        ("if [", None, UnscoredReason.VERIFIER_ERROR),
    ],
)
async def test_what_counts_as_a_reward(grade, test, reward, reason):
    verdict = await grade(SEPARATE, "true", f"L=/logs/verifier; {test}\n")
    assert (verdict.reward, verdict.unscored) == (reward, reason)
    assert verdict.unscored is None or verdict.detail


async def test_the_verifiers_own_variables_and_none_of_the_agents(grade):
    toml = SEPARATE + "[verifier.env]\nMODE = 'strict'\n[environment.env]\nBASE = 'b'\nBASH_ENV = '/app/hook'\n"
    toml = toml.replace("[verifier]\ntimeout_sec = 20\n", "")
    agent = "echo 'MODE=hooked' > hook; export LD_PRELOAD=/app/x; echo yes > done"
    verdict = await grade(toml, agent, 'echo "$MODE $BASE $LD_PRELOAD."; ' + YES)
    assert (verdict.reward, verdict.output) == (1.0, "strict b .")


async def test_invalid_utf8_in_the_output_is_no_problem(grade):
    verdict = await grade(SEPARATE, "echo yes > done", "printf '\\xff\\xfe'; " + YES)
    assert (verdict.reward, verdict.output) == (1.0, "\ufffd\ufffd")


async def test_a_dead_sandbox_is_not_a_0(write_task, provider):
    task = load_task(write_task(SEPARATE))
    sandbox = await provider.create(task.sandbox_spec({"run": "test"}))
    await sandbox.close()
    verdict = await verify(task, sandbox, provider, None, {"run": "test"})
    assert (verdict.reward, verdict.unscored) == (None, UnscoredReason.SANDBOX_ERROR)


async def test_a_task_the_sandbox_cannot_run_is_unscored_not_raised(write_task, provider):
    task = load_task(write_task(SEPARATE + "[verifier.environment]\ndocker_image = 'grader:1'\n"))
    sandbox = await provider.create(task.sandbox_spec({"run": "test"}))
    try:
        verdict = await verify(task, sandbox, provider, None, {"run": "test"})
    finally:
        await sandbox.close()
    assert verdict.unscored is UnscoredReason.VERIFIER_ERROR
    assert "grader:1" in verdict.detail


@pytest.mark.parametrize(
    ("answer", "reward"), [("4", 1.0), (" four\n", 1.0), ("4 or 5", 0.0), ("Four", 0.0), ("", 0.0), (None, 0.0)]
)
async def test_an_answer_is_compared_as_text(write_task, answer, reward):
    task = load_task(write_task("[rl_harness]\nanswer = ['4', 'four']"))
    verdict = await verify(task, None, None, answer, {})
    assert (verdict.reward, verdict.unscored) == (reward, None)


#: Attempts whose files an ordinary user cannot open without ado, and what is graded.
CLOSED = {
    "echo yes > done; mkdir x; echo 1 > x/y; chmod 000 x x/y": (1.0, "000 x"),
    "echo yes > done; chmod 000 done": (1.0, "000 done"),
    "echo yes > done; mkdir -p a/b; echo 2 > a/b/c; chmod 555 a a/b": (1.0, "555 a"),
    "echo yes > done; chmod 000 /app": (1.0, "000 ."),
    "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.json; chmod 000 /logs/verifier /logs": (0.0, "755 ."),
    "rm -rf /app": (0.0, "755 ."),
    "true": (0.0, "755 ."),
}
MODES = "stat -c '%03a %n' . *; " + YES


@BOTH
@pytest.mark.parametrize("agent", list(CLOSED))
async def test_closed_files_are_graded_and_stay_closed(grade, toml, agent):
    reward, mode = CLOSED[agent]
    verdict = await grade(toml, agent, MODES)
    assert (verdict.reward, verdict.flags) == (reward, ())
    assert mode in verdict.output.splitlines()


@pytest.mark.needs("root")
@BOTH
async def test_an_ordinary_user_grades_the_same(write_task, tmp_path: Path, toml):
    directory = write_task(toml, {"tests/test.sh": MODES})
    (tmp_path / "work").mkdir()
    script = Path(__file__).with_name("unprivileged.py")
    command = [sys.executable, script, tmp_path / "work", directory, *CLOSED]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    verdicts = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(verdicts) == len(CLOSED), done.stderr
    for verdict, (agent, (reward, mode)) in zip(verdicts, CLOSED.items(), strict=True):
        assert verdict["reward"] == reward, (agent, verdict)
        assert mode in verdict["output"].splitlines(), (agent, verdict)
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["state"]


async def test_a_tree_of_many_levels_is_graded_and_leaves_nothing(grade, monkeypatch, tmp_path):
    (tmp_path / "host").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "host"))
    # The path is longer than the system takes in one piece; the levels are more than Python's own removal follows.
    chunk = "/".join(["folder"] * 100)
    agent = f"echo yes > done; for i in $(seq 15); do mkdir -p {chunk}; cd -P {chunk}; done 2> /dev/null"
    verdict = await grade(SEPARATE, agent, "find /app | wc -l; " + YES)
    assert (verdict.reward, verdict.unscored) == (1.0, None)
    assert int(verdict.output) > 100
    assert list((tmp_path / "host").iterdir()) == []


async def test_a_mistake_in_a_provider_costs_one_episode_not_the_run(write_task, provider):
    class Broken(type(provider)):
        async def create(self, spec):
            raise KeyError("image")

    task = load_task(write_task(SEPARATE))
    sandbox = await provider.create(task.sandbox_spec({"run": "test"}))
    try:
        verdict = await verify(task, sandbox, Broken(Broken.Options()), None, {"run": "test"})
    finally:
        await sandbox.close()
    assert (verdict.reward, verdict.unscored) == (None, UnscoredReason.VERIFIER_ERROR)
    assert "KeyError" in verdict.detail


async def test_an_agent_cannot_escape_its_grade_by_changing_too_much_to_be_listed(write_task, provider, monkeypatch):
    async def too_many(self):
        raise UnsafeFiles("more than 200000 changed files")

    task = load_task(write_task(SHARED))
    sandbox = await provider.create(task.sandbox_spec({"run": "test"}))
    monkeypatch.setattr(type(sandbox), "changes", too_many)
    try:
        verdict = await verify(task, sandbox, provider, None, {"run": "test"})
    finally:
        await sandbox.close()
    assert (verdict.reward, verdict.unscored) == (0.0, None)


async def test_cancelling_removes_the_verifiers_sandbox(write_task, provider, monkeypatch, tmp_path):
    (tmp_path / "host").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "host"))
    task = load_task(write_task(SEPARATE, {"tests/test.sh": "sleep 1000"}))
    sandbox = await provider.create(task.sandbox_spec({"run": "test"}))
    verifying = asyncio.create_task(verify(task, sandbox, provider, None, {"run": "test", "its": "own"}))
    while not await provider.list({"role": "verifier", "its": "own"}):  # noqa: ASYNC110 - made by another task
        await asyncio.sleep(0.01)
    verifying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await verifying
    await sandbox.close()
    assert await provider.list() == []
    assert list((tmp_path / "host").iterdir()) == []


@BOTH
async def test_the_user_the_task_names_runs_the_tests(grade, provider, toml):
    toml = toml.replace("timeout_sec = 20", "timeout_sec = 20\nuser = 'root'")
    verdict = await grade(toml, "true", "id -un; echo 1 > /logs/verifier/reward.txt")
    assert (verdict.reward, verdict.output) == (1.0, "root")
    if provider.capabilities.users:
        toml = toml.replace("'root'", "'nobody'")
        verdict = await grade(toml, "true", "id -un; echo 1 > /logs/verifier/reward.txt", name="nobody")
        assert (verdict.reward, verdict.output) == (1.0, "nobody")


async def test_a_sandbox_that_starts_nothing_after_its_shell_was_destroyed_is_a_0(write_task, provider, monkeypatch):
    """As a container that has to be started again: not the infrastructure's failure, unless it is really dead."""
    task = load_task(write_task(SHARED, {"tests/test.sh": YES}))
    sandbox = await provider.create(task.sandbox_spec({"run": "test"}))
    try:
        await sandbox.exec("echo yes > done; rm -f /usr/bin/dash /usr/bin/sh /bin/sh", timeout=20)

        async def refuses(*arguments, **more):
            raise SandboxError("it does not start again")

        monkeypatch.setattr(sandbox, "exec", refuses)
        verdict = await verify(task, sandbox, provider, None, {"run": "test"})
        assert (verdict.reward, verdict.unscored, verdict.flags) == (0.0, None, ("tampered",)), verdict
        await sandbox.close()
        verdict = await verify(task, sandbox, provider, None, {"run": "test"})
        assert verdict.unscored == UnscoredReason.SANDBOX_ERROR
    finally:
        await sandbox.close()
