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
    "baseline": "baseline",
    "episodes_no_signal": "no signal",
    "staleness": "staleness",
    "turns_too_old": "too old",
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

#: Nats a token of ``logp_gap`` beyond which a step is warned of: the ratios that the loss is made of are off by 10 % on
#: average then. fp32 gives 1e-5 to 1e-3, bf16 on one side or both 0.01 to 0.05; what is far above is not rounding.
LARGE_LOGP_GAP = 0.1
#: The same for a single token (``logp_gap_max``), where bf16 can give 1 or 2 on an unlikely one.
LARGE_LOGP_GAP_OF_ONE = 5.0

#: Counts of what ought not to happen; shown when it does.
_WORTH_SHOWING_IF_ANY = frozenset(
    {"unscored", "groups_no_signal", "groups_partial", "groups_single", "episodes_no_signal", "staleness"}
    | {"turns_too_old"}
)


def with_speeds(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics plus tokens a second of sampling and of training, where their tokens and seconds are known."""
    out = dict(metrics)
    for phase, tokens in (("rollout", "sampled_tokens"), ("train", "tokens")):
        seconds = metrics.get(f"seconds_{phase}", 0.0)
        if seconds > 0 and tokens in metrics:
            out[f"{phase}_tokens_per_second"] = metrics[tokens] / seconds
    return out


def gap_warning(step: int, metrics: Mapping[str, float]) -> str | None:
    """What to say of a step whose tokens the trainer gives other log-probs than the engine sampled them with."""
    mean, largest = metrics.get("logp_gap", 0.0), metrics.get("logp_gap_max", 0.0)
    if mean <= LARGE_LOGP_GAP and largest <= LARGE_LOGP_GAP_OF_ONE:
        return None
    return (
        f"WARNING, step {step}: engine and trainer disagree on the log-probs of the sampled tokens by "
        f"{number(mean)} nats on average, {number(max(mean, largest))} at most (rounding gives less than "
        f"{LARGE_LOGP_GAP} and {LARGE_LOGP_GAP_OF_ONE:g}). One of them computes another model: do not trust this "
        "training; try fp32 on both sides, another engine, or shorter prompts"
    )


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
