"""Continuous batching, however the model is computed: which requests are accepted, what becomes of a sampled token,
cancellation, new weights, counting. Nothing here knows processes or sockets.

:mod:`rl_harness_torch.packed_scheduler` and :mod:`rl_harness_torch.own_scheduler` decide what is computed when.
"""

from __future__ import annotations

import collections
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import msgspec
import torch
from rl_harness.contracts.engine import GenerateRequest
from rl_harness.errors import UsageError
from tokenizers import Tokenizer

from rl_harness_torch.running import Running
from rl_harness_torch.sampler import sample

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """``batch``: requests running at once. ``prefill``: prompt tokens computed in one step. ``kv_bytes``: memory for
    keys and values (or states), of running requests first and remembered prefixes with the rest. ``context``: tokens a
    sequence may have."""

    batch: int
    prefill: int
    kv_bytes: int
    context: int


class Counters:
    """What :meth:`Scheduler.stats` reports, summed since the start."""

    def __init__(self) -> None:
        self.requests = self.steps = self.prompt_tokens = self.cached_tokens = 0
        self.computed_tokens = self.sampled_tokens = 0
        self.seconds = 0.0


class ServedModel(Protocol):
    """A loaded model and a way to compute it."""

    model: PreTrainedModel
    vocab_size: int

    def weights_changed(self) -> None:
        """The model's parameters were overwritten."""


class Store(Protocol):
    """What is remembered of finished sequences and of prompts."""

    nbytes: int

    def clear(self) -> None:
        """Forget everything."""

    def shrink(self, limit: int) -> None:
        """Forget what was used least recently until at most ``limit`` bytes are kept."""


R = TypeVar("R", bound=Running)


class Scheduler(ABC, Generic[R]):
    """All requests of one engine. Used from one thread.

    One :meth:`step` gives every running request at most one token, so requests join and leave between any two.
    """

    def __init__(
        self,
        model: ServedModel,
        store: Store,
        kind: type[R],
        tokenizer: Tokenizer,
        end_token_ids: Sequence[int],
        limits: Limits,
    ) -> None:
        self.model = model
        self.store = store
        self.limits = limits
        self.version = 0
        self.counters = Counters()
        self._kind = kind
        self._tokenizer = tokenizer
        self._end = frozenset(end_token_ids)
        self._waiting: collections.deque[R] = collections.deque()

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running())

    def add(self, request: GenerateRequest) -> R:
        """Take a request in. Raises :class:`~rl_harness.errors.UsageError` for one that can never be served."""
        self._check(request)
        running = self._kind(request, self._tokenizer, self._end, self.limits.context)
        self._waiting.append(running)
        self.counters.requests += 1
        self.counters.prompt_tokens += running.prompt_length
        return running

    def step(self) -> list[R]:
        """Compute once. Returns the requests that have something new: a token, an end, or an error."""
        started = time.perf_counter()
        self._drop_cancelled()
        computed = self.counters.computed_tokens
        changed = self._advance()
        for running in changed:
            if running.ended:
                self._leave(running)
        self.store.shrink(max(0, self.limits.kv_bytes - self._running_bytes()))
        if self.counters.computed_tokens > computed:
            self.counters.steps += 1
            self.counters.seconds += time.perf_counter() - started
        return changed

    def weights_changed(self, version: int) -> None:
        """Everything computed with the old weights is void: running requests are computed anew from their ids and go
        on from the token they had reached."""
        self.version = version
        self.model.weights_changed()
        self.store.clear()
        again = self._running()
        self._forget()
        self._waiting.extendleft(reversed(again))

    def abandon(self) -> None:
        """Forget every request and everything computed."""
        self.store.clear()
        self._waiting.clear()
        self._forget()

    def stats(self) -> dict[str, float]:
        """Counters, and how the model is computed: ``own_forward`` and, if so, ``own_cache`` are 1 or 0."""
        c = self.counters
        return {
            "requests": c.requests,
            "steps": c.steps,
            "prompt_tokens": c.prompt_tokens,
            "cached_tokens": c.cached_tokens,
            "computed_tokens": c.computed_tokens,
            "sampled_tokens": c.sampled_tokens,
            "seconds": c.seconds,
            "running": len(self._running()),
            "waiting": len(self._waiting),
            "prefix_bytes": self.store.nbytes,
            "running_bytes": self._running_bytes(),
            **self._way(),
        }

    # ----------------------------------------------------------------------------------- what the two ways differ in

    @abstractmethod
    def _way(self) -> dict[str, int]:
        """``own_forward`` and ``own_cache`` for :meth:`stats`."""

    @abstractmethod
    def _running(self) -> list[R]:
        """The requests that were let in."""

    @abstractmethod
    def _running_bytes(self) -> int:
        """The memory they take."""

    @abstractmethod
    def _advance(self) -> list[R]:
        """Let waiting requests in and compute; returns those that got a token."""

    @abstractmethod
    def _leave(self, running: R) -> None:
        """A request ended, failed or was cancelled; what was computed of it is remembered unless it failed."""

    @abstractmethod
    def _forget(self) -> None:
        """Nothing runs any more, and what was computed is void."""

    # ----------------------------------------------------------------------------------------------- what they share

    def _sample(self, logits: torch.Tensor, sampled: Sequence[R]) -> None:
        """Give each request a token drawn from its row of ``logits``."""
        params = [running.request.sampling for running in sampled]
        draws = sample(logits, params, [running.next_uniform() for running in sampled])
        self.counters.sampled_tokens += len(draws)
        for running, draw in zip(sampled, draws, strict=True):
            running.accept(draw)

    def _note_cached(self, running: R, known: int) -> None:
        """``known`` tokens need not be computed. (Counted once; new weights begin a request again.)"""
        if running.cached_tokens is None:
            running.cached_tokens = min(known, running.prompt_length)
            self.counters.cached_tokens += running.cached_tokens

    def _drop_cancelled(self) -> None:
        if any(running.cancelled for running in self._waiting):
            self._waiting = collections.deque(running for running in self._waiting if not running.cancelled)
        for running in self._running():
            if running.cancelled:
                self._leave(running)

    def _check(self, request: GenerateRequest) -> None:
        n, sampling = len(request.prompt), request.sampling
        if n == 0:
            raise UsageError(f"request {request.id}: the prompt is empty")
        if n >= self.limits.context:
            raise UsageError(
                f"request {request.id}: the prompt has {n} tokens and the context holds {self.limits.context}, "
                "which leaves no room for a completion",
                remedy="shorten the conversation, or serve a model with a longer context",
            )
        low, high = int(request.prompt.min()), int(request.prompt.max())
        if low < 0 or high >= self.model.vocab_size:
            raise UsageError(
                f"request {request.id}: id {low if low < 0 else high} is outside the vocabulary of "
                f"{self.model.vocab_size}",
                remedy="use the renderer of the model that the engine serves",
            )
        if sampling.max_tokens is not None and sampling.max_tokens < 1:
            raise UsageError(f"request {request.id}: max_tokens is {sampling.max_tokens}, it must be at least 1")
        for name, ok in (
            ("temperature", sampling.temperature >= 0),
            ("top_p", 0 < sampling.top_p <= 1),
            ("top_k", sampling.top_k >= 0),
            ("min_p", 0 <= sampling.min_p <= 1),
        ):
            if not ok:  # also when it is not a number
                raise UsageError(f"request {request.id}: {name} is {getattr(sampling, name)}")
