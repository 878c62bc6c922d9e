"""The training report: which numbers of a step people look at, in which order, and what they are called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rl_harness.reports.tables import Table, number

#: Metric name to column title, the most telling first: a narrow terminal shows as many as fit. ``kl`` is to the
#: reference model, where one is used; ``kl_sampler`` and ``logp_gap`` (mean absolute difference, nats a token) compare
#: the log-probs of trained tokens as sampled and as the trainer computes them.
COLUMNS = {
    "reward": "reward",
    "pass_rate": "pass",
    "unscored": "unscored",
    "groups_no_signal": "no signal",
    "groups_partial": "partial",
    "groups_single": "single",
    "entropy": "entropy",
    "kl": "KL",
    "kl_sampler": "KL sampler",
    "clip_fraction": "clipped",
    "grad_norm": "grad norm",
    "logp_gap": "logp gap",
    "rollout_tokens_per_second": "rollout tok/s",
    "train_tokens_per_second": "train tok/s",
    "seconds_rollout": "rollout s",
    "seconds_train": "train s",
    "loss": "loss",
}

#: Counts of what ought not to happen; shown when it does.
_WORTH_SHOWING_IF_ANY = frozenset({"unscored", "groups_no_signal", "groups_partial", "groups_single"})


def with_speeds(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics plus tokens a second of sampling and of training, where their tokens and seconds are known."""
    out = dict(metrics)
    for phase, tokens in (("rollout", "sampled_tokens"), ("train", "tokens")):
        seconds = metrics.get(f"seconds_{phase}", 0.0)
        if seconds > 0 and tokens in metrics:
            out[f"{phase}_tokens_per_second"] = metrics[tokens] / seconds
    return out


def step_line(step: int, metrics: Mapping[str, float]) -> str:
    """One step in one line."""
    known = with_speeds(metrics)
    shown = [f"{COLUMNS[name]} {number(known[name])}" for name in _columns([known])]
    return f"step {step}: " + "  ".join(shown)


def steps_table(steps: Sequence[Mapping[str, float]], *, title: str = "Training") -> Table:
    """A row a step (each has ``step`` among its keys); columns nobody measured are left out."""
    known = [with_speeds(step) for step in steps]
    names = _columns(known)
    return Table(
        title=title,
        columns=("step", *(COLUMNS[name] for name in names)),
        rows=tuple((number(step["step"]), *(number(step.get(name)) for name in names)) for step in known),
    )


def _columns(steps: Sequence[Mapping[str, float]]) -> list[str]:
    return [
        name
        for name in COLUMNS
        if any(name in step for step in steps)
        and (name not in _WORTH_SHOWING_IF_ANY or any(step.get(name) for step in steps))
    ]
