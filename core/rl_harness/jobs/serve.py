"""The serving job: agents call the model through the gateway, their sessions are rewarded, and with a trainer the model
learns from what was rewarded while it serves. It runs until it is told to stop; the same command continues it.

Crash safety: :mod:`rl_harness.online` and :mod:`rl_harness.jobs.learner` write before they tell.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rl_harness.contracts import Algorithm
from rl_harness.errors import BackendError, RunError, Unsupported, UsageError
from rl_harness.gateway import Gateway, Limits
from rl_harness.gateway.listening import listen
from rl_harness.jobs.evaluate import sampling_params
from rl_harness.jobs.learner import STEPS, Learner, check_algorithm
from rl_harness.jobs.model import ModelParts, known_secrets, model_identity
from rl_harness.jobs.outcome import Outcome
from rl_harness.jobs.serving import GatewayHost
from rl_harness.jobs.stop import StopSignal
from rl_harness.online import (
    PREFIX,
    ArealRoutes,
    Batches,
    OnlineSessions,
    RecordingPolicy,
    Routes,
    digest,
    new_admin_key,
)
from rl_harness.plugins import Registry
from rl_harness.records import Episode, Group
from rl_harness.reports import View, Waiting, write_plot
from rl_harness.runs import Run, open_run
from rl_harness.runs.config import RunConfig
from rl_harness.runs.directory import default_name
from rl_harness.runs.info import JOB, SERVE

_log = logging.getLogger(__name__)

_ADMIN = "admin_key_digest"
_SWEEP_SECONDS = 1.0
#: Batches in a row that the trainer may refuse before the job ends.
_REFUSALS = 3


class Opened(NamedTuple):
    """What whoever started the job is told. ``admin_key`` is None where they have it: it came from a variable, or was
    told when the run was started."""

    base_url: str
    admin_key: str | None


async def serve(
    config: RunConfig,
    registry: Registry,
    view: View,
    *,
    opened: Callable[[Opened], None],
    fresh: bool = False,
    new_admin: bool = False,
    stop: StopSignal | None = None,
) -> Outcome:
    """Serve a model, and train it if the configuration has a trainer. ``opened`` is told when it can be called.
    ``new_admin``: make another admin key instead of the one that an earlier process told."""
    stop = stop or StopSignal()
    with stop.installed():
        admin_key = _admin_key_given(config)
        listen(config.serving.host, config.serving.port).close()  # an address that cannot be had is told at once
        async with contextlib.AsyncExitStack() as stack:
            parts = ModelParts(config, registry, stack)
            await parts.create()
            algorithm = await _algorithm(config, registry, parts)
            inputs = {JOB: SERVE, "plugins": registry.versions(), **model_identity(config.model)}
            with open_run(config, inputs, fresh=fresh, default=_default_name(config)) as run:
                view.start(f"serve {config.model}: {config.trainer.name if algorithm else 'no training'}", run)
                policy = await parts.load(calls_tools=False)
                parts.remember_model(run)
                learner = Learner(parts, algorithm, run, view) if algorithm else None
                steps = await learner.start() if learner else 0
                serving = _Serving(config, run, view, learner, steps)
                gateway = Gateway(
                    {policy.name: RecordingPolicy(policy, serving.record)},
                    host=config.serving.host,
                    port=config.serving.port,
                    hosts=config.serving.hosts,
                    limits=Limits(calls=config.serving.session_calls, refuse=config.serving.refuse_busy),
                    secrets=known_secrets(config),
                )
                told = _admin_digest(run, admin_key, new_admin)
                serving.open(gateway, policy.name, told)
                await gateway.start()
                stack.push_async_callback(gateway.close)
                opened(Opened(gateway.base_url, told.key))
                await serving.until(stop)
                await gateway.close()
                outcome = Outcome(
                    run=run.path,
                    status="interrupted",
                    resumed=run.resumed,
                    evaluations={},
                    steps=serving.steps,
                    model=latest[1] if (latest := run.checkpoints.latest()) else None,
                    plot=write_plot(run.path),
                )
                run.close(outcome.status)
                view.finish(outcome)
    return outcome


async def _algorithm(config: RunConfig, registry: Registry, parts: ModelParts) -> Algorithm | None:
    """The trainer's, checked; None where nothing is trained."""
    if not config.trains:
        return None
    algorithm = registry.create("algorithms", config.trainer.name, config.trainer.plugin_options)
    assert isinstance(algorithm, Algorithm)
    assert parts.backend is not None
    await algorithm.preflight()
    group_size = config.online.group_size
    try:
        check_algorithm(algorithm, parts.backend, group_size=group_size, sampling=sampling_params(config.sampling))
    except UsageError as error:
        if group_size > 1:
            raise
        raise UsageError(
            error.message,
            remedy="use --trainer reinforce, which compares with a running baseline; or, where several sessions attempt"
            " the same thing and name it as their group, -o online.group_size=N",
        ) from error
    return algorithm


def _default_name(config: RunConfig) -> str:
    return f"serve-{default_name(config).removeprefix('tasks-')}"


class _Admin(NamedTuple):
    """``key``: to be told, once."""

    digest: bytes
    key: str | None


def _admin_key_given(config: RunConfig) -> str | None:
    variable = config.serving.admin_key_env
    if variable is None:
        return None
    key = os.environ.get(variable, "")
    if len(key) < 16:
        raise UsageError(
            f"serving.admin_key_env names {variable}, which {'is too short' if key else 'is not set'}",
            remedy="give it a random key of at least 16 characters, or leave the option out to have one made",
        )
    return key


def _admin_digest(run: Run, given: str | None, new: bool) -> _Admin:
    """What tells the admin key. One that is made here is told now and kept as a digest."""
    if given is not None:
        return _Admin(digest(given), None)
    known = run.store.get_state(_ADMIN)
    if known is not None and not new:
        return _Admin(bytes.fromhex(known), None)
    key = new_admin_key()
    run.store.set_state(_ADMIN, digest(key).hex())
    return _Admin(digest(key), key)


class _Serving:
    """What goes on while the gateway is open."""

    def __init__(self, config: RunConfig, run: Run, view: View, learner: Learner | None, steps: int) -> None:
        self._config = config
        self._run = run
        self._view = view
        self._learner = learner
        self.steps = steps if learner else int(run.store.get_state(STEPS) or 0)
        online = config.online
        self._batches = Batches(
            run.store,
            batch_size=online.batch_size,
            group_size=online.group_size,
            group_timeout=online.group_timeout,
        )
        self._sessions: OnlineSessions | None = None
        self._gateway: Gateway | None = None
        self._taking = False  # a step, just now
        self._told: Waiting | None = None

    def open(self, gateway: Gateway, policy: str, admin: _Admin) -> None:
        """Put the sessions there are, and the routes to them, into a gateway that is not open yet."""
        config = self._config
        self._gateway = gateway
        sessions = OnlineSessions(
            self._run.store,
            GatewayHost(gateway, policy, sampling_params(config.sampling)),
            ttl=config.serving.session_ttl,
            idle_timeout=config.serving.idle_timeout,
            needs_group=config.trains and config.online.group_size > 1,
            closed=self._closed,
        )
        self._sessions = sessions
        if self._learner is not None:
            self._batches.load()
        sessions.load()
        routes = Routes(sessions, admin_digest=admin.digest, base_url=self._base_url, status=self._status)
        if config.serving.areal_routes:
            ArealRoutes(sessions, routes).mount(gateway)
        else:
            gateway.mount(PREFIX, routes)
        self._announce()

    def _base_url(self, named: str) -> str:
        """What agents are pointed at. An address that stands for all of this machine's is told as it was ``named``."""
        assert self._gateway is not None
        if named and self._config.serving.host in ("0.0.0.0", "::"):
            return f"http://{named}/v1"
        return self._gateway.base_url

    async def record(self, *turn: Any) -> None:
        assert self._sessions is not None
        await self._sessions.record(*turn)

    def _closed(self, episode: Episode) -> None:
        self._view.episode(episode)
        if episode.reward is not None and self._learner is not None:
            self._batches.add(episode)
        self._tell_waiting()

    def _status(self) -> Mapping[str, Any]:
        online = self._config.online
        counts = {"waiting": len(self._batches), "batch_size": online.batch_size} if self._learner else {}
        return {"sessions": self._open, "steps": self.steps, **counts}

    @property
    def _open(self) -> int:
        """Sessions that can be called."""
        return 0 if self._sessions is None else self._sessions.count

    def _announce(self) -> None:
        self._view.phase("online" if self._learner is None else f"online step {self.steps}", 0)
        self._tell_waiting()

    def _tell_waiting(self) -> None:
        """Say what is waited for, if it is something else than was said before."""
        size = self._config.online.batch_size if self._learner else None
        waiting = Waiting(sessions=self._open, rewarded=len(self._batches), batch_size=size)
        if waiting != self._told:
            self._told = waiting
            self._view.waiting(waiting)

    async def until(self, stop: StopSignal) -> None:
        """Serve until ``stop``: then what runs is finished, a step that is being taken included; nothing is begun."""
        assert self._gateway is not None
        sweeping = asyncio.create_task(self._sweep(), name="sweep")
        training = asyncio.create_task(self._train(stop), name="train")
        stopping = asyncio.create_task(stop.wait(), name="stop")
        try:
            done, _ = await asyncio.wait({sweeping, training, stopping}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            await self._gateway.drain()
            if self._taking:
                await training
        finally:
            for task in (sweeping, training, stopping):
                task.cancel()
            await asyncio.gather(sweeping, training, stopping, return_exceptions=True)

    async def _sweep(self) -> None:
        assert self._sessions is not None
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            self._tell_waiting()
            try:
                await self._sessions.sweep()
                for alone in await self._batches.sweep():
                    self._view.note(
                        f"WARNING: one episode of group {alone.group!r} was rewarded, and no other in "
                        f"{self._config.online.group_timeout:g} s: it is set aside, untrained, as there is nothing to "
                        "compare it with"
                    )
            except RunError:
                _log.exception("what has waited for too long could not be ended; it is tried again")

    async def _train(self, stop: StopSignal) -> None:
        """One step after the other, as rewards come."""
        learner = self._learner
        if learner is None:
            await asyncio.Event().wait()
            return
        refused = 0
        while not stop.requested:
            groups = await self._batches.take(self.steps)
            self._taking = True
            self._tell_waiting()
            try:
                metrics = _metrics(groups, learner.version)
                await learner.step(self.steps, groups, metrics, max_staleness=self._config.online.max_staleness)
                refused = 0
            except (BackendError, Unsupported, UsageError, ValueError) as error:
                refused += 1
                if refused == _REFUSALS or not await learner.works():
                    raise  # the batch stays that of this step, for the same command
                _log.exception("a batch was refused")
                await self._batches.set_aside(groups)
                self._view.note(f"WARNING: a batch of {_count(groups)} episodes is set aside, untrained: {error}")
            else:
                self.steps += 1
            finally:
                self._taking = False
            self._announce()


def _count(groups: list[Group]) -> int:
    return sum(len(group.episodes) for group in groups)


def _metrics(groups: list[Group], version: int) -> dict[str, float]:
    """How old the tokens are that a step learns from, in versions of the policy, and how long their rewards waited."""
    ages = [version - int(v) for group in groups for turns in group.turns for turn in turns for v in turn.versions[-1:]]
    ended = [e.started_at + sum(e.seconds.values()) for group in groups for e in group.episodes]
    return {
        "staleness": sum(ages) / len(ages) if ages else 0.0,
        "staleness_max": float(max(ages, default=0)),
        "seconds_waited": max(0.0, time.time() - max(ended)) if ended else 0.0,
    }
