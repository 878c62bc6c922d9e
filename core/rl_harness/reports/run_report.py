"""Everything a run directory has to say, live or not: the data behind ``runs list``, ``runs show``, final reports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from rl_harness.errors import RunError
from rl_harness.records import Episode
from rl_harness.reports.difference import Difference, paired_difference
from rl_harness.reports.summary import Summary, summarise
from rl_harness.reports.training import with_speeds
from rl_harness.runs.checkpoints import Checkpoints
from rl_harness.runs.info import (
    DATABASE,
    JOB,
    LOG,
    SANDBOXES,
    SERVE,
    RunInfo,
    Status,
    find_runs,
    read_config,
    read_info,
)
from rl_harness.runs.online import ONLINE, OnlineStore
from rl_harness.runs.store import reading

TRAIN = "train"
BEFORE, AFTER = "before", "after"
GREEDY = "-greedy"
#: Instead of the status of a run whose ``run.json`` cannot be read.
DAMAGED = "damaged"


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation phase; ``after_steps`` is how many training steps preceded it, None if that is not known."""

    phase: str
    step: int
    after_steps: int | None
    greedy: bool
    summary: Summary


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """Before against after training, of one way of sampling."""

    name: str
    before: Summary
    after: Summary
    difference: Difference | None


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """``pid`` is that of a live run. ``training`` has a mapping a step (with ``step``), ``training_episodes`` the
    summary of the episodes trained on. ``resumed`` counts resumptions. ``sandboxes``: what the supply of sandboxes did,
    all processes of the run together (:mod:`rl_harness.reports.sandboxes` says what in words). ``online``: of a run
    that serves, how many sessions and episodes there are."""

    path: str
    name: str
    id: str
    digest: str
    status: str
    pid: int | None
    started_at: float
    ended_at: float | None
    resumed: int
    versions: dict[str, str]
    benchmark: str | None
    model: str | None
    harness: str | None
    sandbox: str | None
    trainer: str | None
    evaluations: tuple[Evaluation, ...]
    changes: tuple[Change, ...]
    training: tuple[dict[str, float], ...]
    training_episodes: Summary | None
    sandboxes: dict[str, float] | None
    online: dict[str, int] | None
    checkpoint: str | None
    plot: str | None
    log: str


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """A line of ``runs list``. ``pass_rate`` is that of the run's last evaluation; of a damaged run, nothing is known
    but its path and its ``problem``."""

    path: str
    name: str
    status: str
    pid: int | None
    started_at: float | None
    benchmark: str | None
    model: str | None
    trainer: str | None
    episodes: int
    steps: int
    evaluation: str | None
    pass_rate: float | None
    low: float | None
    high: float | None
    problem: str = ""


def show_run(path: Path) -> RunReport:
    """The report of a run directory. RunError when it is not one, or damaged."""
    info, config = read_info(path), read_config(path)
    with reading(path / DATABASE) as store:
        episodes = store.episodes()
        training = store.metrics(TRAIN)
        sandboxes = store.metrics(SANDBOXES)
        checkpoint = Checkpoints(path / "checkpoints", store).latest()
        online = OnlineStore(store).counts() if _serves(info) else None
    evaluations = evaluations_of(episodes, steps=_steps_done(training))
    plot = path / "plots" / "training.png"
    trained_on = [episode for episode in episodes if episode.key.phase in (TRAIN, ONLINE)]
    return RunReport(
        path=str(path),
        name=info.name,
        id=info.id,
        digest=info.digest,
        status=info.status.value,
        pid=info.pid if info.status is Status.RUNNING else None,
        started_at=info.starts[0],
        ended_at=info.ended_at,
        resumed=len(info.starts) - 1,
        versions=info.versions,
        **_choices(info, config),
        evaluations=evaluations,
        changes=_changes(episodes),
        training=tuple(with_speeds(step) for step in training),
        training_episodes=summarise(trained_on) if trained_on else None,
        sandboxes=_total(sandboxes),
        online=online,
        checkpoint=str(checkpoint[1]) if checkpoint else None,
        plot=str(plot) if plot.is_file() else None,
        log=str(path / LOG),
    )


def list_runs(runs_dir: Path) -> list[RunRow]:
    """The runs in a directory, oldest first. One that cannot be read is listed with its problem."""
    rows = []
    for path, info in find_runs(runs_dir):
        if isinstance(info, RunError):
            rows.append(_damaged_row(path, info.message))
            continue
        try:
            rows.append(_row(path, info))
        except RunError as error:
            rows.append(_bare_row(path, info, {}, problem=error.message))
    return rows


def evaluations_of(episodes: Sequence[Episode], *, steps: int) -> tuple[Evaluation, ...]:
    """The evaluation phases among the episodes of a run that took ``steps`` steps, in the order they began."""
    return tuple(
        Evaluation(
            phase=phase,
            step=step,
            after_steps=_after_steps(phase, step, steps),
            greedy=phase.endswith(GREEDY),
            summary=summarise(members, k=_ks(members)),
        )
        for (phase, step), members in _evaluation_phases(episodes).items()
    )


def _evaluation_phases(episodes: Sequence[Episode]) -> dict[tuple[str, int], list[Episode]]:
    phases: dict[tuple[str, int], list[Episode]] = {}
    for episode in episodes:
        if episode.key.phase not in (TRAIN, ONLINE):
            phases.setdefault((episode.key.phase, episode.key.step), []).append(episode)
    return phases


def _after_steps(phase: str, step: int, steps: int) -> int | None:
    name = phase.removesuffix(GREEDY)
    if name == BEFORE:
        return 0
    if name == AFTER:
        return steps
    number = name.removeprefix("step-")
    if number != name and number.isdigit():
        return int(number)
    return step or None


def _ks(episodes: Sequence[Episode]) -> tuple[int, ...]:
    """1 and the number of samples a task."""
    return tuple(sorted({1, 1 + max(episode.key.sample for episode in episodes)}))


def _changes(episodes: Sequence[Episode]) -> tuple[Change, ...]:
    changes = []
    for suffix, name in (("", "sampled"), (GREEDY, "greedy")):
        before = [e for e in episodes if e.key.phase == BEFORE + suffix]
        after = [e for e in episodes if e.key.phase == AFTER + suffix]
        if before and after:
            changes.append(
                Change(
                    name=name,
                    before=summarise(before),
                    after=summarise(after),
                    difference=paired_difference(before, after),
                )
            )
    return tuple(changes)


def _total(processes: Sequence[dict[str, float]]) -> dict[str, float] | None:
    names = dict.fromkeys(name for process in processes for name in process if name != "step")
    return {name: sum(process.get(name, 0.0) for process in processes) for name in names} or None


def _steps_done(training: Sequence[dict[str, float]]) -> int:
    return 1 + int(training[-1]["step"]) if training else 0


def _serves(info: RunInfo) -> bool:
    return info.inputs.get(JOB) == SERVE


def _choices(info: RunInfo, config: dict[str, Any]) -> dict[str, str | None]:
    """The names of what a configuration chooses, for headings. A run that serves has no agent of its own."""
    chosen = {kind: (config.get(kind) or {}).get("name") for kind in ("benchmark", "harness", "sandbox", "trainer")}
    return {
        **chosen,
        "benchmark": ", ".join(map(str, config.get("tasks") or ())) or chosen["benchmark"],
        "model": config.get("model"),
        **({"benchmark": ONLINE, "harness": None, "sandbox": None} if _serves(info) else {}),
        "trainer": None if chosen["trainer"] == "none" else chosen["trainer"],
    }


def _row(path: Path, info: RunInfo) -> RunRow:
    with reading(path / DATABASE) as store:
        episodes, training = store.episodes(), store.metrics(TRAIN)
    sampled = [(key, found) for key, found in _evaluation_phases(episodes).items() if not key[0].endswith(GREEDY)]
    last = summarise(sampled[-1][1]) if sampled else None
    return msgspec.structs.replace(
        _bare_row(path, info, read_config(path)),
        episodes=len(episodes),
        steps=_steps_done(training),
        evaluation=sampled[-1][0][0] if sampled else None,
        pass_rate=last.pass_rate if last else None,
        low=last.low if last else None,
        high=last.high if last else None,
    )


def _damaged_row(path: Path, problem: str) -> RunRow:
    """Of a run that cannot even say what it is."""
    return RunRow(
        path=str(path),
        name=path.name,
        status=DAMAGED,
        pid=None,
        started_at=None,
        benchmark=None,
        model=None,
        trainer=None,
        episodes=0,
        steps=0,
        evaluation=None,
        pass_rate=None,
        low=None,
        high=None,
        problem=problem,
    )


def _bare_row(path: Path, info: RunInfo, config: dict[str, Any], *, problem: str = "") -> RunRow:
    choices = _choices(info, config)
    return RunRow(
        path=str(path),
        name=path.name,
        status=info.status.value,
        pid=info.pid if info.status is Status.RUNNING else None,
        started_at=info.starts[0],
        benchmark=choices["benchmark"],
        model=choices["model"],
        trainer=choices["trainer"],
        episodes=0,
        steps=0,
        evaluation=None,
        pass_rate=None,
        low=None,
        high=None,
        problem=problem,
    )
