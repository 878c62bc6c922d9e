"""Continuous batching: which tokens of which requests the model computes next, and what becomes of the results.

One :meth:`Scheduler.step` computes the next token of every running request together with pieces of waiting prompts,
so requests join and leave between any two tokens. Nothing here knows processes or sockets.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
import numpy as np
import torch
from rl_harness.contracts.engine import GenerateRequest, TokenChunk
from rl_harness.errors import EngineError, RlHarnessError, UsageError
from rl_harness.records import ids as id_array
from rl_harness.records import logps as logp_array
from rl_harness.records.arrays import IdArray
from tokenizers import Tokenizer

from rl_harness_torch.attention import DecodePart, PackedModel, PrefillPart
from rl_harness_torch.kv import Lane, PrefixStore, Segment, common_prefix, lane_capacity
from rl_harness_torch.sampler import Draw, Uniforms, sample
from rl_harness_torch.stops import StopStrings

#: A prompt waits for another one that is being computed only if that saves at least this many tokens.
_WORTH_WAITING = 8


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """``batch``: requests running at once. ``prefill``: prompt tokens computed in one step. ``kv_bytes``: memory for
    keys and values, of running requests first and remembered prefixes with the rest. ``context``: tokens a sequence
    may have."""

    batch: int
    prefill: int
    kv_bytes: int
    context: int


class Running:
    """A request in the engine, from its arrival to its last token."""

    def __init__(self, request: GenerateRequest, tokenizer: Tokenizer, end: frozenset[int], context: int) -> None:
        params = request.sampling
        self.request = request
        self.prompt_length = len(request.prompt)
        room = context - self.prompt_length
        self.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        self.end = end | frozenset(params.stop_token_ids)
        self.cancelled = False
        self.cached_tokens: int | None = None
        self._tokens = np.empty(self.prompt_length + min(self.max_tokens, 256), np.int32)
        self._tokens[: self.prompt_length] = request.prompt
        self._length = self.prompt_length
        self._uniforms = Uniforms(params.seed)
        self._stops = StopStrings(tokenizer, params.stop)
        self._sent = self.prompt_length
        self._logps: list[float] = []
        self._tops: list[dict[int, float]] = []
        self.finish: Literal["stop", "length"] | None = None
        self.error: RlHarnessError | None = None
        # Where its keys and values are: a segment of its own while its prompt is computed, then a row of a lane.
        self.computed = 0
        self.segment: Segment | None = None
        self.lane: Lane | None = None
        self.row = -1

    @property
    def tokens(self) -> IdArray:
        """Prompt and completion so far."""
        return self._tokens[: self._length]

    def next_uniform(self) -> float:
        return self._uniforms.next() if self.request.sampling.temperature else 0.0

    def accept(self, draw: Draw) -> None:
        """Take the sampled token; sets ``finish`` when it was the last, ``error`` when there is none."""
        if draw.logp is None:
            self.error = EngineError(
                f"request {self.request.id}: the model computed log-probabilities that are not finite after "
                f"{self._length - self.prompt_length} tokens",
                remedy="the weights are damaged or the training diverged; go back to an earlier checkpoint",
            )
            return
        if self._length == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty(len(self._tokens), np.int32)])
        self._tokens[self._length] = draw.id
        self._length += 1
        self._logps.append(draw.logp)
        self._tops.append(draw.top)
        completion = self.tokens[self.prompt_length :]
        if draw.id in self.end or self._stops.hit(completion):
            self.finish = "stop"
        elif len(completion) >= self.max_tokens:
            self.finish = "length"

    def chunk(self, version: int) -> TokenChunk:
        """What was sampled since the last chunk."""
        new = self.tokens[self._sent :]
        chunk = TokenChunk(
            ids=id_array(new),
            logps=logp_array(self._logps),
            version=version,
            finish_reason=self.finish,
            cached_tokens=self.cached_tokens or 0,
            top_logprobs=tuple(self._tops) if self.request.sampling.top_logprobs else (),
        )
        self._sent, self._logps, self._tops = self._length, [], []
        return chunk

    @property
    def unsent(self) -> bool:
        return self._sent < self._length


class Counters:
    """What :meth:`Scheduler.stats` reports, summed since the start."""

    def __init__(self) -> None:
        self.requests = self.steps = self.prompt_tokens = self.cached_tokens = 0
        self.computed_tokens = self.sampled_tokens = 0
        self.seconds = 0.0


class Scheduler:
    """All requests of one engine. Used from one thread."""

    def __init__(self, model: PackedModel, tokenizer: Tokenizer, end_token_ids: Sequence[int], limits: Limits) -> None:
        self.model = model
        self.limits = limits
        self.version = 0
        self.store = PrefixStore()
        self.counters = Counters()
        self._tokenizer = tokenizer
        self._end = frozenset(end_token_ids)
        self._waiting: collections.deque[Running] = collections.deque()
        self._prefilling: list[Running] = []
        self._lanes: dict[int, Lane] = {}
        self._rows: dict[int, list[Running]] = {}  # by lane capacity, in row order

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._prefilling or any(self._rows.values()))

    def add(self, request: GenerateRequest) -> Running:
        """Take a request in. Raises :class:`~rl_harness.errors.UsageError` for one that can never be served."""
        self._check(request)
        running = Running(request, self._tokenizer, self._end, self.limits.context)
        self._waiting.append(running)
        self.counters.requests += 1
        self.counters.prompt_tokens += running.prompt_length
        return running

    def step(self) -> list[Running]:
        """Compute once. Returns the requests that have something new: tokens, an end, or an error."""
        started = time.perf_counter()
        self._drop_cancelled()
        self._admit()
        decoding = [(self._lanes[capacity], rows) for capacity, rows in self._rows.items() if rows]
        prefills = list(self._next_prefills())
        if not decoding and not prefills:
            return []
        changed = self._compute(decoding, prefills)
        for running in changed:
            if running.finish is not None or running.error is not None:
                self._leave(running)
        self.store.shrink(max(0, self.limits.kv_bytes - self._lane_bytes()))
        self.counters.steps += 1
        self.counters.seconds += time.perf_counter() - started
        return changed

    def weights_changed(self, version: int) -> None:
        """Everything computed with the old weights is void: running requests are computed anew from their ids and go
        on from the token they had reached."""
        self.version = version
        self.model.weights_changed()
        self.store.clear()
        again = [*self._prefilling, *(running for rows in self._rows.values() for running in rows)]
        for running in again:
            running.segment, running.lane, running.row, running.computed = None, None, -1, 0
        self._prefilling.clear()
        self._lanes.clear()
        self._rows.clear()
        self._waiting.extendleft(reversed(again))

    def abandon(self) -> None:
        """Forget every request and everything computed."""
        self.store.clear()
        self._waiting.clear()
        self._prefilling.clear()
        self._lanes.clear()
        self._rows.clear()

    def stats(self) -> dict[str, float]:
        c = self.counters
        return {
            "requests": c.requests,
            "steps": c.steps,
            "prompt_tokens": c.prompt_tokens,
            "cached_tokens": c.cached_tokens,
            "computed_tokens": c.computed_tokens,
            "sampled_tokens": c.sampled_tokens,
            "seconds": c.seconds,
            "running": sum(map(len, self._rows.values())) + len(self._prefilling),
            "waiting": len(self._waiting),
            "prefix_bytes": self.store.nbytes,
            "running_bytes": self._lane_bytes(),
        }

    # ------------------------------------------------------------------------------------------------- admission

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

    def _admit(self) -> None:
        """Let waiting requests in, first come first served, except that one whose beginning another is computing right
        now waits for that, so that a burst of equal prompts is computed once."""
        postponed: list[Running] = []
        while self._waiting and self._running() < self.limits.batch and self._unprefilled() < self.limits.prefill:
            running = self._waiting.popleft()
            if not self._fits(running):
                self._waiting.appendleft(running)
                break
            ids = running.tokens
            known, segments = self.store.match(ids[:-1])  # the last token is always computed, for its logits
            shared = max((common_prefix(ids[:-1], other.tokens) for other in self._prefilling), default=0)
            if shared >= known + _WORTH_WAITING:
                postponed.append(running)
                continue
            self._begin(running, known, segments)
        self._waiting.extendleft(reversed(postponed))

    def _begin(self, running: Running, known: int, segments: Sequence[Segment]) -> None:
        if running.cached_tokens is None:
            running.cached_tokens = min(known, running.prompt_length)
            self.counters.cached_tokens += running.cached_tokens
        running.computed = known
        if known == len(running.tokens) - 1:
            self._join_lane(running, segments)
            return
        running.segment = Segment.empty(self.model.shape, len(running.tokens))
        _write_all(running.segment, segments)
        self._prefilling.append(running)

    def _fits(self, running: Running) -> bool:
        if not self._running():
            return True
        wanted = lane_capacity(len(running.tokens) + min(running.max_tokens, 256), self.limits.context)
        return self._lane_bytes() + wanted * self.model.shape.token_bytes <= self.limits.kv_bytes

    def _unprefilled(self) -> int:
        return sum(len(running.tokens) - running.computed for running in self._prefilling)

    def _running(self) -> int:
        return len(self._prefilling) + sum(map(len, self._rows.values()))

    def _lane_bytes(self) -> int:
        return sum(lane.nbytes for lane in self._lanes.values())

    # --------------------------------------------------------------------------------------------------- compute

    def _next_prefills(self) -> Iterator[tuple[Running, int, int]]:
        """Pieces of prompts for the next step, at most ``limits.prefill`` tokens."""
        budget = self.limits.prefill
        for running in self._prefilling:
            stop = min(len(running.tokens), running.computed + budget)
            if stop > running.computed:
                yield running, running.computed, stop
                budget -= stop - running.computed

    def _compute(
        self, decoding: list[tuple[Lane, list[Running]]], prefills: list[tuple[Running, int, int]]
    ) -> list[Running]:
        parts: list[DecodePart | PrefillPart] = []
        ids: list[IdArray] = []
        sampled: list[Running] = []
        wanted: list[int] = []
        at = 0
        for lane, rows in decoding:
            parts.append(DecodePart(lane, [running.computed for running in rows]))
            ids.append(np.array([running.tokens[-1] for running in rows], np.int32))
            wanted.extend(range(at, at + len(rows)))
            sampled.extend(rows)
            at += len(rows)
        for running, start, stop in prefills:
            assert running.segment is not None
            parts.append(PrefillPart(running.segment, start, stop))
            ids.append(running.tokens[start:stop])
            at += stop - start
            if stop == len(running.tokens):
                wanted.append(at - 1)
                sampled.append(running)
        device = self.model.shape.device
        logits = self.model.forward(
            torch.from_numpy(np.concatenate(ids).astype(np.int64)).to(device),
            parts,
            torch.tensor(wanted, dtype=torch.long, device=device),
        )
        self.counters.computed_tokens += at
        for _, rows in decoding:
            for running in rows:
                running.computed += 1
        for running, _, stop in prefills:
            self._prefilled(running, stop)
        if sampled:
            self._sample(logits, sampled)
        return sampled

    def _sample(self, logits: torch.Tensor, sampled: list[Running]) -> None:
        params = [running.request.sampling for running in sampled]
        draws = sample(logits, params, [running.next_uniform() for running in sampled])
        self.counters.sampled_tokens += len(draws)
        for running, draw in zip(sampled, draws, strict=True):
            running.accept(draw)
            if running.lane is not None and len(running.tokens) > running.lane.capacity and running.finish is None:
                self._move_lane(running)

    def _prefilled(self, running: Running, stop: int) -> None:
        """Account for a computed piece of a prompt; a whole prompt is remembered and joins the running ones."""
        assert running.segment is not None
        running.computed = stop
        if stop < len(running.tokens):
            return
        self.store.insert(running.tokens, 0, running.segment)
        self._prefilling.remove(running)
        segment, running.segment = running.segment, None
        self._join_lane(running, [segment])

    # ----------------------------------------------------------------------------------------------------- lanes

    def _join_lane(self, running: Running, segments: Sequence[Segment]) -> None:
        likely = len(running.tokens) + min(running.max_tokens, 32)
        capacity = lane_capacity(likely, self.limits.context)
        lane = self._lanes.setdefault(capacity, Lane(self.model.shape, capacity))
        running.lane, running.row = lane, lane.add()
        self._rows.setdefault(capacity, []).append(running)
        _write_all(lane.row(running.row), segments)

    def _leave_lane(self, running: Running) -> None:
        lane = running.lane
        assert lane is not None
        rows = self._rows[lane.capacity]
        last = rows.pop()
        lane.remove(running.row, last.computed)
        if last is not running:
            rows[running.row] = last
            last.row = running.row
        running.lane, running.row = None, -1
        if not rows:
            del self._rows[lane.capacity], self._lanes[lane.capacity]

    def _move_lane(self, running: Running) -> None:
        assert running.lane is not None
        kept = running.lane.row(running.row).part(0, running.computed).copy()
        self._leave_lane(running)
        self._join_lane(running, [kept])

    def _leave(self, running: Running) -> None:
        """A finished, failed or cancelled request; what it computed is remembered unless it failed."""
        if running in self._prefilling:
            self._prefilling.remove(running)
            running.segment = None
        if running.lane is not None:
            if running.error is None:
                ids = running.tokens[: running.computed]
                start = self.store.missing(ids)
                self.store.insert(ids, start, running.lane.row(running.row).part(start, running.computed))
            self._leave_lane(running)

    def _drop_cancelled(self) -> None:
        if any(running.cancelled for running in self._waiting):
            self._waiting = collections.deque(running for running in self._waiting if not running.cancelled)
        for running in [*self._prefilling, *(running for rows in self._rows.values() for running in rows)]:
            if running.cancelled:
                self._leave(running)


def _write_all(target: Segment, segments: Sequence[Segment]) -> None:
    at = 0
    for segment in segments:
        target.write(at, segment)
        at += len(segment)
