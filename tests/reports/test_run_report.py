"""What `runs list`, `runs show` and `runs compare` say about runs on disk."""

from __future__ import annotations

import json
import os
import re
import shutil

import pytest
from rl_harness.errors import RunError
from rl_harness.excerpts import excerpt
from rl_harness.records import Termination
from rl_harness.reports import (
    compare_runs,
    comparison_text,
    json_text,
    list_runs,
    report_text,
    runs_text,
    show_run,
)
from rl_harness.reports.training import gap_warning, step_line, steps_table
from rl_harness.runs import open_run
from rl_harness.runs.config import PluginChoice
from rl_harness.testing.records import an_episode


def test_an_evaluation(evaluated):
    report = show_run(evaluated)
    assert (report.status, report.pid, report.resumed) == ("done", None, 0)
    assert (report.benchmark, report.model, report.harness, report.trainer) == ("bench", "model", "shell", None)
    (evaluation,) = report.evaluations
    assert (evaluation.phase, evaluation.summary.pass_rate) == ("evaluate", 3 / 8)
    text = report_text(report)
    assert "0.38 [0.14, 0.69]" in text
    assert "3/8" in text
    assert "2 (sandbox_error 2)" in text  # beside the denominator
    assert "slowest" in text
    assert "ended by" in text


def test_a_training_run(trained):
    report = show_run(trained)
    assert [e.phase for e in report.evaluations] == ["before", "before-greedy", "step-2", "after", "after-greedy"]
    assert [e.after_steps for e in report.evaluations] == [0, 0, 2, 3, 3]
    sampled, greedy = report.changes
    assert (sampled.name, sampled.before.pass_rate, sampled.after.pass_rate) == ("sampled", 0.1, 18 / 19)
    assert (sampled.difference.tasks, sampled.difference.unscored) == (19, 1)
    assert greedy.difference.value == pytest.approx(0.45)
    assert [step["step"] for step in report.training] == [0, 1, 2]
    assert report.training[0]["rollout_tokens_per_second"] == 90.0
    assert report.training[0]["train_tokens_per_second"] == 200.0
    assert report.training_episodes.episodes == 12

    text = report_text(report)
    for part in ("reward", "pass", "KL", "entropy", "clipped", "grad norm", "logp gap", "rollout tok/s", "train tok/s"):
        assert part in text
    assert "partial" not in text  # nothing was
    assert "0.10 [0.03, 0.30]" in text
    assert "sharpening" in text
    assert "1 tasks are left out of the change" in text
    assert max(map(len, text.splitlines())) <= 140


def test_groups_that_teach_less_than_they_should_are_shown():
    """Partial groups and groups of one went unnoticed."""
    quiet, loud = {"step": 0, "reward": 0.5, "groups_partial": 0}, {"step": 1, "groups_partial": 2, "groups_single": 1}
    assert steps_table([quiet]).columns == ("step", "reward")
    assert steps_table([quiet, loud]).columns == ("step", "reward", "partial", "single")
    assert "partial 2  single 1" in step_line(1, loud)


@pytest.mark.parametrize(
    ("metrics", "warned"),
    [
        ({}, False),
        ({"logp_gap": 0.05, "logp_gap_max": 2.0}, False),  # bf16
        ({"logp_gap": 0.2, "logp_gap_max": 1.0}, True),
        ({"logp_gap": 0.01, "logp_gap_max": 10.0}, True),  # a few tokens beyond a window
    ],
)
def test_a_step_whose_log_probs_are_not_the_samplers_is_warned_of(metrics, warned):
    warning = gap_warning(3, metrics)
    assert (warning is not None) == warned
    if warning:
        assert warning.startswith("WARNING, step 3: engine and trainer disagree")


def test_the_report_of_a_run_repeats_such_warnings(config):
    with open_run(config, {}) as run:
        for step in range(5):
            run.store.add_metrics("train", step, {"logp_gap": 2.5 if step else 0.0, "logp_gap_max": 4.0 * step})
        run.close("done")
    text = report_text(show_run(run.path))
    assert "step 0: engine" not in text
    assert "WARNING, step 1: engine and trainer disagree on the log-probs of the sampled tokens by 2.5" in text
    assert "... and 1 more steps like these" in text


def test_several_samples_a_task_give_pass_at_k(config, record):
    with open_run(config, {}) as run:
        record(run, [an_episode(f"task-{t}", float(t == i), sample=i) for t in range(2) for i in range(4)])
        run.close("done")
    (evaluation,) = show_run(run.path).evaluations
    assert {p.k: p.value for p in evaluation.summary.pass_at_k} == {1: 0.25, 4: 1.0}
    assert "pass@4" in report_text(show_run(run.path))


def test_a_retried_episode_counts_once_in_the_report(config, record):
    with open_run(config, {}) as run:
        record(run, [an_episode(reward=None), an_episode(reward=1.0, attempt=2)])
        run.close("done")
    (evaluation,) = show_run(run.path).evaluations
    assert (evaluation.summary.episodes, evaluation.summary.unscored) == (1, {})


def test_a_report_says_what_went_wrong(config, record):
    with open_run(config, {}) as run:
        record(run, [an_episode(reward=None, detail="the machine\n died")])
        run.close("done")
    assert "sandbox_error, such as task-0: the machine died" in report_text(show_run(run.path))


def test_a_reason_at_the_end_of_much_output_is_shown(config, record):
    """Of a long output the report showed the beginning, where there is no reason."""
    lines = [f"\x1b[2K#{i} fetching {'x' * 50}" for i in range(100)]
    detail = "\n".join(["Dockerfile: the engine cannot build it: exit code 1", *lines, "E: no such package ripgrp"])
    with open_run(config, {}) as run:
        record(run, [an_episode(reward=None, detail=detail), an_episode("task-1", None, detail=detail + "!" * 5000)])
        run.close("done")
    text = report_text(show_run(run.path))
    assert "sandbox_error, such as task-0: Dockerfile: the engine cannot build it: exit code 1\n" in text
    assert "    [... 93 lines left out; runs show --task has more ...]\n" in text
    assert "    | E: no such package ripgrp\n" in text
    assert "\x1b" not in text


@pytest.mark.parametrize(("text", "most"), [("short", 5), ("a" * 101, 100), ("line\n" * 100, 40), ("abc", 1)])
def test_an_excerpt_keeps_both_ends_and_says_what_it_leaves_out(text, most):
    shown = excerpt(text, most)
    if len(text) <= most:
        assert shown == text
        return
    head, tail = re.split(r"\n?\[\.\.\. \d+ characters left out \.\.\.\]\n?", shown, maxsplit=1)
    assert (text.startswith(head), text.endswith(tail), len(head) + len(tail)) == (True, True, most)
    assert f"[... {len(text) - most} characters" in shown


def out_of_time(phase, count, of):
    waited = {"seconds": {"agent": 20.0, "model": 19.0}, "termination": Termination.TIME_LIMIT}
    return [an_episode(f"task-{i}", 0.0, phase=phase, **(waited if i < count else {})) for i in range(of)]


@pytest.mark.parametrize(("count", "warned"), [(0, False), (9, False), (10, True), (96, True)])
def test_a_report_warns_of_episodes_that_had_no_time_for_the_model(config, record, count, warned):
    with open_run(config, {}) as run:
        record(run, out_of_time("evaluate", count, 100))
        run.close("done")
    text = report_text(show_run(run.path))
    assert (f"warning: {count} of 100 episodes ran out of time while they waited for the model" in text) is warned
    assert ("agent_timeout" in text) is warned


@pytest.mark.parametrize(("before", "after", "warned"), [(4, 96, True), (96, 4, True), (50, 55, False)])
def test_a_change_that_is_one_of_speed_is_not_told_as_learning(config, record, before, after, warned):
    """Training seemed to make a model worse, which was only slower."""
    config = config.model_copy(update={"trainer": PluginChoice(name="grpo")})
    with open_run(config, {}) as run:
        record(run, [*out_of_time("before", before, 100), *out_of_time("after", after, 100)])
        run.close("done")
    told = f"warning: sampled: {before} of 100 episodes before and {after} of 100 after training ran out of time"
    assert (told in report_text(show_run(run.path))) is warned


def test_a_live_run_can_be_shown(config, phase, record):
    with open_run(config, {}) as run:
        record(run, phase("evaluate", [1.0, 0.0]))
        report = show_run(run.path)
        assert (report.status, report.pid) == ("running", os.getpid())
        assert report.evaluations[0].summary.scored == 2
        (row,) = list_runs(config.runs_dir)
        assert f"pid {os.getpid()}" in runs_text([row])
        run.close("interrupted")


def test_a_run_without_episodes_can_be_shown(config):
    with open_run(config, {}) as run:
        run.close("failed")
    report = show_run(run.path)
    assert report.evaluations == ()
    assert "failed" in report_text(report)


def test_the_list(evaluated, trained, config):
    rows = list_runs(config.runs_dir)
    assert [row.name for row in rows] == ["bench-model", "bench-model-grpo"]
    assert (rows[1].evaluation, rows[1].steps, rows[1].trainer) == ("after", 3, "grpo")
    assert "after: 0.95 [0.75, 0.99]" in runs_text(rows)
    assert runs_text(list_runs(config.runs_dir / "nowhere")) == "no runs yet"


def test_a_damaged_run_is_listed_with_its_problem(evaluated, trained, config):
    (evaluated / "db.sqlite").write_bytes(b"rubbish" * 1000)
    damaged, fine = list_runs(config.runs_dir)
    assert "damaged" in damaged.problem
    assert fine.problem == ""
    assert damaged.problem in runs_text([damaged, fine])


@pytest.mark.parametrize("what", ["missing", "empty"])
def test_showing_what_is_no_run(tmp_path, what):
    path = tmp_path / "x"
    if what == "empty":
        path.mkdir()
    with pytest.raises(RunError, match="not a run directory"):
        show_run(path)


def test_reports_are_json(evaluated, trained, config):
    for value in (show_run(trained), list_runs(config.runs_dir), compare_runs(evaluated, evaluated)):
        assert json.loads(json_text(value))
    assert json.loads(json_text(show_run(trained)))["changes"][0]["before"]["pass_rate"] == 0.1
    assert json.loads(json_text({"a": float("nan")})) == {"a": None}


@pytest.fixture
def second_run(config, phase, record):
    def make(rewards, **more):
        with open_run(config.model_copy(update={"seed": 1}), {}) as run:
            record(run, phase("evaluate", rewards, **more))
            run.close("done")
        return run.path

    return make


def test_two_runs_are_compared_on_the_tasks_they_share(evaluated, second_run):
    other = second_run([1.0] * 6)
    comparison = compare_runs(evaluated, other)
    (compared,) = comparison.phases
    assert (compared.shared, compared.only_first, compared.only_second) == (6, 4, 0)
    assert (compared.first.pass_rate, compared.second.pass_rate) == (0.5, 1.0)
    assert compared.difference.gained == ("task-3", "task-4", "task-5")
    assert comparison.settings == {"seed": (0, 1)}
    text = comparison_text(comparison)
    assert "+0.50 [" in text
    assert "4 in the first, 0 in the second" in text
    assert "gained: task-3, task-4, task-5" in text


def test_tasks_of_other_contents_are_left_out_and_said(evaluated, config, phase, record, second_run):
    other = second_run([1.0] * 3)
    with open_run(config.model_copy(update={"seed": 2}), {}) as run:
        record(run, [*phase("evaluate", [1.0]), *phase("evaluate", [1.0, 1.0], digest="sha256:new")[1:]])
        run.close("done")
    (compared,) = compare_runs(other, run.path).phases
    assert (compared.shared, compared.changed) == (1, ("task-1",))
    assert "other contents: task-1" in comparison_text(compare_runs(other, run.path))


def test_runs_that_share_no_task_are_refused(evaluated, second_run):
    with pytest.raises(RunError, match=r"no task in common \(3 have the same name but other contents\)"):
        compare_runs(evaluated, second_run([1.0] * 3, digest="sha256:new"))


def test_phases_of_other_names_are_compared_by_the_last(evaluated, trained):
    (compared,) = compare_runs(evaluated, trained).phases
    assert (compared.first_phase, compared.second_phase) == ("evaluate", "after")


def test_a_run_without_evaluation_cannot_be_compared(evaluated, second_run):
    with pytest.raises(RunError, match="nothing was evaluated"):
        compare_runs(evaluated, second_run([]))
    shutil.rmtree(evaluated)
    with pytest.raises(RunError, match="not a run directory"):
        compare_runs(evaluated, evaluated)
