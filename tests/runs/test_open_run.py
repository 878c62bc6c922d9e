"""Which directory a command gets: a new one, the interrupted one of the same configuration, or a clear refusal."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import time

import pytest
from rl_harness.errors import RunError, UsageError
from rl_harness.runs import find_runs, open_run, read_info
from rl_harness.runs.config import PluginChoice, RunConfig
from rl_harness.runs.directory import default_name
from rl_harness.testing.records import a_conversation, an_episode

INPUTS = {"tasks": {"task-0": "sha256:0"}, "plugins": {"rl-harness": "0.1.0"}}


def changed(config: RunConfig, **values: object) -> RunConfig:
    return config.model_copy(update=values)


def opened_and_closed(config, status, inputs=INPUTS, **options):
    with open_run(config, inputs, **options) as run:
        run.close(status)
    return run


def test_a_run_directory_says_what_it_is(config):
    with open_run(config, INPUTS) as run:
        assert not run.resumed
        assert run.path == config.runs_dir / "bench-model"
        info = read_info(run.path)
        assert (info.status, info.pid, info.id) == ("running", os.getpid(), run.id)
        assert info.inputs == INPUTS
        assert "rl-harness" in info.versions
        assert RunConfig.model_validate(json.loads((run.path / "config.json").read_text())) == config
        run.close("done")
    info = read_info(run.path)
    assert info.status == "done"
    assert info.ended_at >= info.starts[0]


async def test_the_same_configuration_resumes_an_interrupted_run(config):
    with open_run(config, INPUTS) as first:
        await first.store.add_episode(an_episode(), a_conversation())
        first.log.info("the first time")
        first.close("interrupted")
    with open_run(config, INPUTS) as second:
        assert second.resumed
        assert (second.path, second.id) == (first.path, first.id)
        assert second.store.episodes() == [an_episode()]
        second.log.info("the second time")
        second.close("done")
    log = second.log_path.read_text()
    assert "the first time" in log  # the old log is gone on with, not deleted
    assert "the second time" in log
    assert len(read_info(second.path).starts) == 2


@pytest.mark.parametrize("how", ["interrupted", "failed"])
def test_what_did_not_finish_is_resumed(config, how):
    opened_and_closed(config, how)
    assert opened_and_closed(config, "done").resumed


def test_a_finished_run_starts_anew(config):
    paths = [opened_and_closed(config, "done").path.name for _ in range(3)]
    assert paths == ["bench-model", "bench-model-2", "bench-model-3"]
    assert [info.status for _, info in find_runs(config.runs_dir)] == ["done"] * 3


def test_fresh_starts_anew_whatever_there_is(config):
    first = opened_and_closed(config, "interrupted")
    second = opened_and_closed(config, "interrupted", fresh=True)
    assert not second.resumed
    assert second.path != first.path
    assert opened_and_closed(config, "done").path == second.path  # the newest is the one that goes on


def test_another_configuration_gets_a_number_and_both_can_go_on(config):
    other = changed(config, seed=1)
    first, second = opened_and_closed(config, "interrupted"), opened_and_closed(other, "interrupted")
    assert second.path.name == "bench-model-2"
    assert opened_and_closed(config, "interrupted").path == first.path
    assert opened_and_closed(other, "interrupted").path == second.path


def test_display_and_concurrency_do_not_make_another_run(config):
    opened_and_closed(config, "interrupted")
    assert opened_and_closed(changed(config, concurrency=3, retries=7), "interrupted").resumed


def test_other_tasks_plugins_or_weights_make_another_run(config):
    opened_and_closed(config, "interrupted")
    assert not opened_and_closed(config, "interrupted", {**INPUTS, "tasks": {"task-0": "sha256:1"}}).resumed


def test_a_live_run_is_refused_with_its_pid(config, child):
    def live(say):
        run = open_run(config, INPUTS)
        say(run.path.name)
        time.sleep(60)

    process = child(live)
    name = process.line()
    with pytest.raises(RunError, match=f"{name}: this run is live \\(pid {process.pid}\\)") as error:
        open_run(config, INPUTS)
    assert "--fresh" in str(error.value)
    assert read_info(config.runs_dir / name).status == "running"
    with open_run(config, INPUTS, fresh=True) as beside:
        assert beside.path.name == f"{name}-2"
        beside.close("interrupted")
        shutil.rmtree(beside.path)
    process.kill()
    process.wait()
    assert read_info(config.runs_dir / name).status == "interrupted"
    assert opened_and_closed(config, "done").resumed


def test_a_pid_that_lives_again_is_not_taken_for_the_run(config):
    """The number in run.json is for people; only the kernel's lock says that a run is live."""
    run = opened_and_closed(config, "interrupted")
    info = json.loads((run.path / "run.json").read_text())
    (run.path / "run.json").write_text(json.dumps({**info, "status": "running", "pid": 1}))
    assert opened_and_closed(config, "done").resumed


def test_of_many_equal_commands_at_once_one_runs(config, child):
    def body(say):
        try:
            run = open_run(config, INPUTS)
        except RunError as error:
            say("live" if "is live" in str(error) else f"other: {error}")
            return
        say("runs")
        time.sleep(60)
        run.close("interrupted")

    processes = [child(body) for _ in range(6)]
    assert sorted(process.line() for process in processes) == ["live"] * 5 + ["runs"]


def test_a_named_run_of_another_configuration_is_refused_with_the_keys(config):
    named = changed(config, name="mine")
    first = opened_and_closed(named, "done")
    assert first.path.name == "mine"
    other = changed(named, seed=5, trainer=PluginChoice.model_validate({"name": "grpo", "kl": 0.1}))
    with pytest.raises(RunError) as error:
        open_run(other, {**INPUTS, "tasks": {"task-0": "sha256:new"}})
    text = str(error.value)
    for part in ("mine", "seed (0 there, 5 now)", "trainer.kl (None there, 0.1 now)", "inputs.tasks.task-0", "--name"):
        assert part in text
    assert opened_and_closed(other, "interrupted", fresh=True).path.name == "mine-2"
    assert opened_and_closed(named, "done").path.name == "mine-3"


def test_a_name_with_a_number_is_a_name_of_its_own(config):
    opened_and_closed(changed(config, name="exp-2", seed=1), "done")
    assert opened_and_closed(changed(config, name="exp"), "done").path.name == "exp-3"
    assert not opened_and_closed(changed(config, name="exp"), "done").resumed


@pytest.mark.parametrize("name", ["../up", "a/b", ".hidden", "", "x" * 200, "with space"])
def test_a_name_that_is_no_directory_name_is_refused(config, name):
    if name == "":
        assert default_name(changed(config, name=name)) == "bench-model"
        return
    with pytest.raises(UsageError, match="name"):
        open_run(changed(config, name=name), INPUTS)


def test_default_names(config):
    trainer = PluginChoice(name="grpo")
    assert default_name(changed(config, model="/models/Smol LM2/", trainer=trainer)) == "bench-Smol-LM2-grpo"
    assert default_name(changed(config, benchmark=PluginChoice(name="b@1.0"), model=None)) == "b-1.0"
    assert default_name(changed(config, benchmark=PluginChoice(name=".."), model=None)) == "run"


def test_a_directory_that_is_no_run_is_refused(config):
    foreign = config.runs_dir / "bench-model"
    foreign.mkdir(parents=True)
    (foreign / "thesis.txt").write_text("years of work")
    with pytest.raises(RunError, match=r"bench-model: not a run directory"):
        open_run(config, INPUTS)
    assert opened_and_closed(config, "done", fresh=True).path.name == "bench-model-2"
    assert (foreign / "thesis.txt").read_text() == "years of work"


def test_an_empty_directory_is_used(config):
    (config.runs_dir / "bench-model").mkdir(parents=True)
    assert opened_and_closed(config, "done").path.name == "bench-model"


@pytest.mark.parametrize("content", ["{", '{"id": 3}', "[]"])
def test_a_damaged_description_is_refused(config, content):
    run = opened_and_closed(config, "interrupted")
    (run.path / "run.json").write_text(content)
    with pytest.raises(RunError, match=r"run\.json: damaged"):
        open_run(config, INPUTS)


def test_a_damaged_database_is_refused_and_the_run_stays_free(config):
    run = opened_and_closed(config, "interrupted")
    (run.path / "db.sqlite").write_bytes(b"rubbish" * 1000)
    for _ in range(2):  # not "live" the second time
        with pytest.raises(RunError, match=r"db\.sqlite: damaged"):
            open_run(config, INPUTS)
    assert logging.getLogger("rl_harness").handlers == []


def test_a_missing_database_is_refused(config):
    run = opened_and_closed(config, "interrupted")
    (run.path / "db.sqlite").unlink()
    with pytest.raises(RunError, match=r"db\.sqlite is missing"):
        open_run(config, INPUTS)
    assert opened_and_closed(config, "done", fresh=True).path != run.path


def test_a_runs_directory_that_is_a_file_is_refused(config, tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(RunError, match="runs"):
        open_run(config, INPUTS)


def test_what_a_crash_left_half_made_is_cleared_away(config):
    leftover = config.runs_dir / ".new-1234"
    leftover.mkdir(parents=True)
    (leftover / "config.json").write_text("{")
    run = opened_and_closed(config, "done")
    assert not leftover.exists()
    assert {path.name for path in config.runs_dir.iterdir()} == {".lock", run.path.name}


@pytest.mark.parametrize(
    ("error", "status"),
    [(RuntimeError("broken"), "failed"), (KeyboardInterrupt(), "interrupted"), (None, "interrupted")],
)
def test_a_run_that_nobody_closed_is_closed(config, error, status):
    with pytest.raises(type(error)) if error else contextlib.nullcontext(), open_run(config, INPUTS) as run:
        if error is not None:
            raise error
    assert read_info(run.path).status == status
    if status == "failed":
        assert "RuntimeError: broken" in run.log_path.read_text()


def test_loggers_of_the_package_write_to_the_log_while_the_run_is_open(config):
    logger = logging.getLogger("rl_harness.some.module")
    with open_run(config, INPUTS) as run:
        logger.info("inside")
        run.close("done")
    logger.warning("outside")
    text = run.log_path.read_text()
    assert "inside" in text
    assert "outside" not in text
    assert logging.getLogger("rl_harness").handlers == []
