"""Evaluation from the user's side: the command as a process, the run's directory afterwards."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import time
from pathlib import Path

import pytest
from rl_harness.tasks import new_task
from rl_harness.testing.tokenizer import write_tokenizer

SLOW = ("-o", "engine.delay=0.05", "--concurrency", "2")


def recorded(run: Path) -> list[str]:
    """Keys of the episodes on disk, attempts included."""
    database = run / "db.sqlite"
    if not database.exists():
        return []
    connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
    try:
        if not connection.execute("select 1 from sqlite_master where name = 'episodes'").fetchall():
            return []  # the moment between creating the file and its tables
        return [f"{row[0]}/{row[1]}" for row in connection.execute("select task, sample from episodes")]
    finally:
        connection.close()


def toml(rules: list[dict[str, str]]) -> str:
    """Rules of the scripted engine as the value of an option."""
    inline = ("{" + ", ".join(f"{key} = {json.dumps(value)}" for key, value in rule.items()) + "}" for rule in rules)
    return f"[{', '.join(inline)}]"


def test_scores_are_counted_per_task(world):
    world.question("right", "4")
    world.question("wrong", "5")
    report = world.json(
        "run", "tasks/right", "tasks/wrong", *world.scripted, "--harness", "chat", "-o", "engine.replies=['4']"
    )
    (evaluation,) = report["evaluations"]
    assert evaluation["summary"]["passed"] == 1
    assert evaluation["summary"]["scored"] == 2
    assert evaluation["summary"]["unscored"] == {}
    assert evaluation["summary"]["tokens_per_second"]["sampled"] > 0
    assert "tokens/s: prompt" in world.run("runs", "show", report["path"])


def test_engine_failure_is_unscored_and_counted_and_not_zero(world):
    world.question("fine", "4")
    world.question("broken", "5")
    arguments = ("run", "tasks/fine", "tasks/broken", *world.scripted, "--harness", "chat", "-o", "retries=1")
    rule = "engine.rules=[{match = 'Say 4', reply = '4'}]"
    report = world.json(*arguments, "-o", rule)
    summary = report["evaluations"][0]["summary"]
    assert summary["scored"] == 1
    assert summary["pass_rate"] == 1.0
    assert summary["unscored"] == {"engine_error": 1}
    assert sorted(recorded(world.directory / report["path"])) == ["broken/0", "broken/0", "fine/0"]


def test_a_run_in_which_nothing_could_be_scored_fails(world):
    world.question("broken", "5")
    arguments = ("run", "tasks/broken", *world.scripted, "--harness", "chat", "-o", "retries=0")
    world.run(*arguments, "-o", "engine.rules=[{match = 'never', reply = '4'}]", expect=1)


MENDABLE_AGENT = """
from pathlib import Path

def attempt(task):
    from openai import OpenAI
    if not Path(__file__).with_name("mended").exists():
        OpenAI(max_retries=0).chat.completions.create(model="m", messages=[{"role": "user", "content": "Say 5."}])
    return "4"
"""


def test_a_failed_run_continued_attempts_again_what_is_unscored(world):
    world.question("q", "4")
    (world.directory / "mendable.py").write_text(MENDABLE_AGENT)
    arguments = ("run", "tasks/q", *world.scripted, "--harness", "python:mendable:attempt", "-o", "retries=0")
    rule = ("-o", "engine.rules=[{match = 'never', reply = '4'}]")
    failed = world.json(*arguments, *rule, expect=1)
    (world.directory / "mended").touch()
    mended = world.json(*arguments, *rule)
    assert (mended["path"], mended["resumed"], mended["status"]) == (failed["path"], 1, "done")
    assert mended["evaluations"][0]["summary"]["passed"] == 1


def test_one_task_of_a_run_is_shown_with_its_turns_commands_and_grade(world):
    world.environment["RL_HARNESS_SANDBOX"] = "process"
    turns = [
        {"match": "seven", "reply": "7"},
        {"match": "Say 7", "reply": "```bash\necho seven; echo '\x1b[2J' >&2; exit 3\n```"},
    ]
    world.question("q7", "7")
    arguments = ("run", "tasks/q7", *world.scripted, "--harness", "shell", "--name", "x", "--samples", "2")
    world.run(*arguments, "-o", f"engine.rules={toml(turns)}")
    text = world.run("runs", "show", "x", "--task", "q7")
    assert text.count("reward 1\n") == 2
    assert "Say 7." in text
    assert "    | <|im_start|>assistant" in text
    assert "turn 2" in text
    assert "exit code 3" in text
    assert "    | echo seven" in text
    assert "    | seven" in text
    assert "\x1b" not in text
    assert text.index("turn 1") < text.index("exit code 3") < text.index("turn 2")

    report = world.json("runs", "show", "x", "--task", "q7")
    first = report["episodes"][0]
    assert (first["counts"], first["episode"]["reward"], report["undecoded"]) == (True, 1.0, None)
    assert [turn["after"] for turn in first["turns"]] == [None, 0]
    assert first["turns"][1]["completion"] == "7<|im_end|>"
    assert "Exit code: 3" in first["turns"][1]["prompt"]
    assert first["episode"]["events"][0]["data"]["output"].startswith("seven\n")

    world.run("runs", "show", "x", "--task", "q8", expect=2)
    assert "did you mean q7?" in world.stderr
    world.run("runs", "show", "x", "--task", "q7", "--phase", "train", expect=2)
    assert "no episode of phase 'train'" in world.stderr


def test_what_the_verifier_printed_is_shown(world):
    """A reward of 0 without a word of why."""
    task = world.question("q", "4")
    (task / "task.toml").write_text("[rl_harness]\nverifier = 'separate'\n")
    (task / "tests").mkdir()
    test = 'echo "answer.txt is missing"; echo 0 > "${RL_HARNESS_LOGS:-/logs/verifier}/reward.txt"\n'
    (task / "tests" / "test.sh").write_text(test)
    world.run("run", "tasks/q", "--harness", "nop", "--sandbox", "process", "--name", "x")
    text = world.run("runs", "show", "x", "--task", "q")
    assert "attempt 1: reward 0\n" in text
    assert "  event verifier\n    output:\n    | answer.txt is missing\n" in text


def test_a_task_is_shown_even_where_its_models_tokenizer_is_gone(world):
    world.question("q7", "7")
    world.run("run", "tasks/q7", *world.scripted, "--harness", "chat", "--name", "x", "-o", "engine.replies=['6']")
    (world.model / "tokenizer.json").unlink()
    text = world.run("runs", "show", "x", "--task", "q7")
    assert "prompts are not shown as text" in text
    assert "tokenizer.json does not exist" in text
    assert text.endswith("    completion:\n    | 6\n")


def test_samples_give_pass_at_k(world):
    world.question("q", "4")
    arguments = ("run", "tasks/q", *world.scripted, "--harness", "chat", "--samples", "4", "--concurrency", "1")
    report = world.json(*arguments, "-o", "engine.replies=['4','3','3','3']")
    summary = report["evaluations"][0]["summary"]
    assert summary["pass_rate"] == 0.25
    assert {entry["k"]: entry["value"] for entry in summary["pass_at_k"]} == {1: 0.25, 4: 1.0}


def test_the_seed_decides_which_task_directories_a_limit_takes(world):
    names = [str(world.question(f"q{i}", "4")) for i in range(8)]
    arguments = ("run", *names, *world.scripted, "--harness", "chat", "-o", "engine.replies=['4']", "--limit", "3")
    first, again, other = (world.json(*arguments, "--seed", seed) for seed in "112")
    taken = [recorded(world.directory / report["path"]) for report in (first, again, other)]
    assert sorted(taken[0]) == sorted(taken[1]) != sorted(taken[2])


def test_a_finished_run_starts_anew(world):
    world.question("q", "4")
    arguments = ("run", "tasks/q", *world.scripted, "--harness", "chat", "-o", "engine.replies=['4']")
    first, second = world.json(*arguments), world.json(*arguments)
    assert first["path"] != second["path"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "shell-arithmetik"), "shell-arithmetic"),
        (("run", "--harness", "shel"), "shell"),
        (("run", "--sandbox", "locl"), "local"),
        (("run", "--trainer", "grop"), "grpo"),
        (("run", "--sandbox", "dockr"), "local"),
        (("run", "--model", "m", "--split", "nowhere"), "heldout"),
        (("run", "--model", "m", "--trainer", "grpo", "shell-basics"), "it is there for measuring only, with: heldout"),
        (("run", "--harness", "shell"), "--model"),
    ],
)
def test_a_wrong_name_is_a_usage_error_that_names_what_is_there(world, arguments, said):
    world.run(*arguments, expect=2)
    assert said in world.stderr


def test_training_behind_a_remote_api_is_refused_with_the_reason(world):
    arguments = ("run", "--model", "some-model", "--base-url", "http://127.0.0.1:9/v1", "--trainer", "grpo")
    world.run(*arguments, expect=2)
    assert "token ids and log-probs" in world.stderr


PATIENT_HARNESS = """
import asyncio, os
from rl_harness.hookspecs import Extension, hookimpl
from rl_harness.rollout.harnesses.chat import ChatHarness

@hookimpl
def rl_harness_harnesses():
    return [Extension("patient", f"{__name__}:Patient", "asks its model once there is a file named go")]

class Patient(ChatHarness):
    async def run(self, context):
        with open("started", "a") as file:
            file.write(context.task.name + "\\n")
        while not os.path.exists("go"):
            await asyncio.sleep(0.01)
        return await super().run(context)
"""


def test_interrupted_once_finishes_what_runs_begins_nothing_saves_and_exits_130(world):
    names = [str(world.question(f"q{i}", "4")) for i in range(6)]
    (world.directory / "patient.py").write_text(PATIENT_HARNESS)
    arguments = ("run", *names, *world.scripted, "-p", "patient.py", "--harness", "patient", "--name", "x")
    arguments += ("-o", "engine.replies=['4']", "--concurrency", "2")
    started = world.directory / "started"

    def starts() -> list[str]:
        return started.read_text().split() if started.exists() else []

    process = world.start(*arguments)
    wait_for(lambda: len(starts()) == 2)
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.3)  # it finishes what runs
    (world.directory / "go").touch()
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"Traceback" not in errors
    assert b"the same command continues" in errors
    assert b"Ctrl-C again stops now" in output
    run = world.directory / "runs" / "x"
    assert sorted(recorded(run)) == sorted(f"{name}/0" for name in starts())
    assert len(starts()) == 2
    report = world.json(*arguments)
    assert (report["resumed"], report["evaluations"][0]["summary"]["passed"]) == (1, 6)
    assert len(recorded(run)) == len(set(recorded(run))) == len(starts()) == 6


HANGING_AGENT = """
import os, time
from pathlib import Path

def attempt(task):
    Path(__file__).with_name("started").write_text(str(os.getpid()))
    time.sleep(3600)
"""


def test_interrupted_twice_stops_now_and_is_still_consistent(world):
    names = [world.question(f"q{i:02}", "4") for i in range(6)]
    (world.directory / "hanging.py").write_text(HANGING_AGENT)
    started = world.directory / "started"
    process = world.start(
        "run", *map(str, names), *world.scripted, "--harness", "python:hanging:attempt", "--name", "x"
    )
    wait_for(lambda: started.exists() and started.read_text())
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.3)  # it finishes what runs, which never ends
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"Traceback" not in errors
    assert recorded(world.directory / "runs" / "x") == []
    assert not Path(f"/proc/{started.read_text()}").exists()


def test_interrupted_three_times_ends_even_where_the_loop_is_blocked(world):
    task = world.question("q", "4")
    pipe = world.directory / "blocked"
    os.mkfifo(pipe)
    (world.directory / "blocking.py").write_text(f"""
from rl_harness.hookspecs import Extension, hookimpl
from rl_harness.testing.engine import ScriptedEngine

@hookimpl
def rl_harness_engines():
    return [Extension("blocking", f"{{__name__}}:Blocking", "stops the event loop")]

class Blocking(ScriptedEngine):
    async def start(self, model):
        open({str(pipe)!r}, "w").close()  # the test sees it open
        open({str(pipe)!r}).read()  # and nobody writes again
""")
    engine = ("-p", "blocking.py", "--engine", "blocking", "--model", str(world.model))
    process = world.start("run", str(task), *engine, "--harness", "chat")
    pipe.open().close()
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    assert process.wait(30) == 130
    assert b"Traceback" not in process.communicate()[1]


def test_more_concurrency_than_episodes_costs_nothing(world):
    world.question("q", "4")
    arguments = ("run", "tasks/q", *world.scripted, "--harness", "chat", "-o", "engine.replies=['4']")
    report = world.json(*arguments, "--concurrency", str(10**9))
    assert report["evaluations"][0]["summary"]["passed"] == 1


def test_a_live_run_is_refused_with_its_pid(world):
    world.question("q", "4")
    arguments = ("run", "tasks/q", *world.scripted, "--harness", "chat", "-o", "engine.replies=['4']")
    process = world.start(*arguments, "-o", "engine.delay=3600", "--name", "x")
    try:
        wait_for(lambda: (world.directory / "runs" / "x" / "db.sqlite").exists())
        world.run(*arguments, "-o", "engine.delay=3600", "--name", "x", expect=1)
        assert str(process.pid) in world.stderr
    finally:
        process.kill()
        process.communicate()


def test_killed_at_random_nothing_reported_is_lost_or_repeated(world):
    """kill -9 again and again while it runs; what was on disk stays, once, and the run ends complete."""
    names = [world.question(f"q{i:03}", "4") for i in range(120)]
    arguments = ("run", *map(str, names), *world.scripted, "--harness", "chat", "-o", "engine.replies=['4']", *SLOW)
    run = world.directory / "runs" / "x"
    seen: set[str] = set()
    for kill in range(20):
        process = world.start(*arguments, "--name", "x")
        # A different number of further episodes each time, so that kills fall anywhere between two commits.
        wait_until_recorded(run, min(len(seen) + kill % 4, 120), process)
        process.kill()
        process.communicate()
        now = recorded(run)
        assert len(now) == len(set(now))
        assert seen <= set(now)
        seen = set(now)
    report = world.json(*arguments, "--name", "x")
    assert report["evaluations"][0]["summary"]["scored"] == 120
    assert sorted(recorded(run)) == sorted(f"q{i:03}/0" for i in range(120))


def wait_until_recorded(run: Path, count: int, process: subprocess.Popen[bytes]) -> None:
    wait_for(lambda: len(recorded(run)) >= count or process.poll() is not None)


def wait_for(condition, seconds: float = 60.0) -> None:
    """Wait for something that is bound to happen; the limit only ends a broken test."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it never happened"
        time.sleep(0.01)


def test_a_harness_that_only_answers_is_refused_for_tasks_graded_in_the_sandbox(world):
    world.run("run", "shell-basics", *world.scripted, "--harness", "chat", "-o", "engine.replies=['4']", expect=2)
    assert "graded on what is left in the sandbox" in world.stderr


def test_a_harness_that_speaks_what_the_gateway_does_not_is_refused_before_anything_starts(world):
    world.question("q", "4")
    (world.directory / "other.py").write_text("""
from rl_harness.contracts import HarnessCapabilities
from rl_harness.hookspecs import Extension, hookimpl
from rl_harness.rollout.harnesses.chat import ChatHarness

@hookimpl
def rl_harness_harnesses():
    return [Extension("foreign", f"{__name__}:Foreign", "speaks another protocol")]

class Foreign(ChatHarness):
    capabilities = HarnessCapabilities(protocols=frozenset({"telegraph"}), needs_sandbox=False)
""")
    world.run("run", "tasks/q", *world.scripted, "-p", "other.py", "--harness", "foreign", expect=2)
    assert "telegraph" in world.stderr
    assert not (world.directory / "runs").exists()


@pytest.mark.parametrize(
    ("model", "code", "said"),
    [
        ("./nowhere", 2, "model './nowhere' does not exist"),
        ("some-model", 2, "not in the hub cache, and the model hub cannot be reached"),
        ("./weightless", 1, "has no weights: model.safetensors is missing"),
    ],
)
def test_a_model_that_cannot_be_served_is_told_before_there_is_a_run(world, model, code, said):
    """Failed runs of mistyped names filled the list of runs."""
    pytest.importorskip("rl_harness_torch")
    world.question("q", "4")
    folder = world.directory / "weightless"
    world.model.rename(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    world.environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(world.directory)}
    world.run("run", "tasks/q", "--harness", "chat", "--model", model, expect=code)
    assert said in world.stderr
    assert world.run("runs", "list") == "no runs yet\n"


@pytest.mark.parametrize("kind", ["benchmarks", "harnesses", "sandboxes", "engines", "renderers"])
def test_what_a_plugin_finds_missing_is_said_before_anything_starts(world, kind):
    """A missing evaluator was discovered after an hour of rollouts."""
    world.question("q", "4")
    base, name, chosen = {
        "benchmarks": ("tasks.registry.basics:ShellBasics", "bare", ["bare"]),
        "harnesses": ("rollout.harnesses.chat:ChatHarness", "bare", ["--harness", "bare"]),
        "sandboxes": ("sandboxes.process:ProcessProvider", "bare", ["shell-basics", "--sandbox", "bare"]),
        "engines": ("testing.engine:ScriptedEngine", "bare", ["--engine", "bare", "--model", str(world.model)]),
        "renderers": ("gateway.renderers.template:TemplateRenderer", "bare", ["-o", "renderer.name=bare"]),
    }[kind]
    module, _, attribute = base.partition(":")
    (world.directory / "other.py").write_text(f"""
from rl_harness.errors import Unavailable
from rl_harness.hookspecs import Extension, hookimpl
from rl_harness.{module} import {attribute}

@hookimpl
def rl_harness_{kind}():
    return [Extension("{name}", f"{{__name__}}:Bare", "lacks something")]

class Bare({attribute}):
    async def preflight(self):
        raise Unavailable("the evaluator is not installed", remedy="install it")
""")
    task = [] if kind in ("benchmarks", "sandboxes") else ["tasks/q"]
    engine = world.scripted[:2] if kind == "engines" else world.scripted
    harness = [] if kind == "harnesses" else ["--harness", "chat"]
    world.run("run", *task, *engine, "-p", "other.py", *harness, *chosen, expect=1)
    assert "the evaluator is not installed" in world.stderr
    assert not (world.directory / "runs").exists()


def test_a_tokenizer_that_belongs_to_other_weights_is_refused_before_any_episode(world):
    world.question("q", "4")
    (world.directory / "small.py").write_text("""
import msgspec
from rl_harness.hookspecs import Extension, hookimpl
from rl_harness.testing.engine import ScriptedEngine

@hookimpl
def rl_harness_engines():
    return [Extension("small", f"{__name__}:Small", "a model of few ids")]

class Small(ScriptedEngine):
    async def start(self, model):
        return msgspec.structs.replace(await super().start(model), vocab_size=100)
""")
    engine = ("-p", "small.py", "--engine", "small", "--model", str(world.model))
    world.run("run", "tasks/q", *engine, "--harness", "chat", "--name", "x", expect=1)
    assert "the model has only 100 ids" in world.stderr
    assert recorded(world.directory / "runs" / "x") == []


def test_tools_that_the_models_template_ignores_are_refused_before_any_episode(world):
    world.question("q", "4")
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}<|im_start|>"
    model = write_tokenizer(world.directory / "plain", template=template)
    arguments = ("run", "tasks/q", *world.scripted, "--model", str(model), "--sandbox", "process", "--name", "x")
    world.run(*arguments, "-o", "harness.format=tools", expect=2)
    assert "ignores tools" in world.stderr
    assert recorded(world.directory / "runs" / "x") == []


CHECKING_SANDBOX = """
from pathlib import Path

from rl_harness.errors import TaskError
from rl_harness.hookspecs import Extension, hookimpl
from rl_harness.sandboxes.process import ProcessProvider


@hookimpl
def rl_harness_sandboxes():
    return [Extension("checking", f"{__name__}:Checking", "refuses files that say so")]


class Checking(ProcessProvider):
    async def check(self, spec):
        await super().check(spec)
        bad = (spec.environment.directory or Path()) / "bad.txt"
        if bad.exists():
            raise TaskError(f"{bad}: {bad.read_text()}")
"""


def test_bad_files_of_any_task_are_told_before_the_run_starts(world):
    (world.directory / "checking.py").write_text(CHECKING_SANDBOX)
    for name, text in {"good": "", "torn": "is torn", "wet": "is wet"}.items():
        new_task(world.directory / name)
        if text:
            (world.directory / name / "environment/bad.txt").write_text(text)
    options = ("--harness", "nop", "-p", "checking.py", "--sandbox", "checking", "--name", "n")
    world.run("run", "good", "torn", "wet", *options, expect=2)
    assert "torn/environment/bad.txt: is torn" in world.stderr
    assert "wet/environment/bad.txt: is wet" in world.stderr
    assert not (world.directory / "runs/n").exists()
    world.run("run", "good", *options)
