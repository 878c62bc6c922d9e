"""The evaluation job: one phase over one split, and its summary."""

from __future__ import annotations

from rl_harness.jobs.assembly import TaskSource, assembled
from rl_harness.jobs.model import model_identity
from rl_harness.jobs.outcome import Outcome, Status
from rl_harness.jobs.phases import Phase, is_complete, run_phase
from rl_harness.jobs.stop import StopSignal
from rl_harness.plugins import Registry
from rl_harness.records import SamplingParams
from rl_harness.reports import View, summarise
from rl_harness.runs import open_run
from rl_harness.runs.config import RunConfig, Sampling


def sampling_params(sampling: Sampling, *, temperature: float | None = None) -> SamplingParams:
    """The configured sampling, at another temperature if one is given (0 is greedy, and then truncates nothing)."""
    if temperature == 0:
        return SamplingParams(max_tokens=sampling.max_tokens, temperature=0.0)
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature if temperature is None else temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
    )


async def evaluate(
    config: RunConfig, registry: Registry, view: View, *, fresh: bool = False, stop: StopSignal | None = None
) -> Outcome:
    """Evaluate a model, or a harness that needs none, on a split. Continues an interrupted run of the same kind."""
    stop = stop or StopSignal()
    with stop.installed():
        source = TaskSource.of(registry, config)
        await source.preflight()
        split = source.split(config.split)
        tasks = tuple(await source.tasks(split, limit=config.limit, seed=config.seed))
        phase = Phase(
            name="evaluate", split=split, tasks=tasks, samples=config.samples, sampling=sampling_params(config.sampling)
        )
        async with assembled(config, registry, source, tasks) as parts:
            inputs = {
                "tasks": {task.name: task.digest for task in tasks},
                "plugins": registry.versions(),
                **model_identity(config.model),
            }
            with open_run(config, inputs, fresh=fresh) as run:
                what = " ".join(dict.fromkeys((source.name, split)))  # task directories: both are "tasks"
                view.start(f"{what}: {len(tasks)} tasks x {config.samples}", run)
                await parts.start(run, view.note)
                parts.remember_model(run)
                # Whoever gives the command again has mended what kept episodes unscored, such as a wrong key.
                episodes = await run_phase(phase, parts, run, view, stop, again=run.resumed)
                summary = summarise(episodes, k=tuple(sorted({1, config.samples})))
                complete = is_complete(phase, episodes, config.retries)
                status: Status = "interrupted" if not complete else "done" if summary.scored else "failed"
                run.close(status)
                outcome = Outcome(run=run.path, status=status, resumed=run.resumed, evaluations={"evaluate": summary})
                view.finish(outcome)
    return outcome
