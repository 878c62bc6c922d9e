"""Continuous batching with our own attention: one step computes the next token of every running request together with
pieces of waiting prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from rl_harness.contracts.engine import GenerateRequest
from rl_harness.records.arrays import IdArray
from tokenizers import Tokenizer

from rl_harness_torch.attention import DecodePart, PackedModel, PrefillPart
from rl_harness_torch.kv import Lane, PrefixStore, Segment, common_prefix, lane_capacity
from rl_harness_torch.running import Running
from rl_harness_torch.scheduler import Limits, Scheduler

#: A prompt waits for another one that is being computed only if that saves at least this many tokens.
_WORTH_WAITING = 8


class PackedRunning(Running):
    """Also where its keys and values are: a segment of its own while its prompt is computed, then a row of a lane."""

    def __init__(self, request: GenerateRequest, tokenizer: Tokenizer, end: frozenset[int], context: int) -> None:
        super().__init__(request, tokenizer, end, context)
        self.segment: Segment | None = None
        self.lane: Lane | None = None
        self.row = -1


class PackedScheduler(Scheduler[PackedRunning]):
    """Serves a model whose attention is ours."""

    model: PackedModel
    store: PrefixStore

    def __init__(self, model: PackedModel, tokenizer: Tokenizer, end_token_ids: Sequence[int], limits: Limits) -> None:
        super().__init__(model, PrefixStore(), PackedRunning, tokenizer, end_token_ids, limits)
        self._prefilling: list[PackedRunning] = []
        self._lanes: dict[int, Lane] = {}
        self._rows: dict[int, list[PackedRunning]] = {}  # by lane capacity, in row order

    def _way(self) -> dict[str, int]:
        return {"own_forward": 0, "own_cache": 0}

    def _running(self) -> list[PackedRunning]:
        return [*self._prefilling, *(running for rows in self._rows.values() for running in rows)]

    def _running_bytes(self) -> int:
        return sum(lane.nbytes for lane in self._lanes.values())

    def _advance(self) -> list[PackedRunning]:
        self._admit()
        decoding = [(self._lanes[capacity], rows) for capacity, rows in self._rows.items() if rows]
        prefills = list(self._next_prefills())
        return self._compute(decoding, prefills) if decoding or prefills else []

    def _forget(self) -> None:
        for running in self._running():
            running.segment, running.lane, running.row, running.computed = None, None, -1, 0
        self._prefilling.clear()
        self._lanes.clear()
        self._rows.clear()

    # ------------------------------------------------------------------------------------------------- admission

    def _admit(self) -> None:
        """Let waiting requests in, first come first served, except that one whose beginning another is computing right
        now waits for that, so that a burst of equal prompts is computed once."""
        postponed: list[PackedRunning] = []
        while self._waiting and len(self._running()) < self.limits.batch and self._unprefilled() < self.limits.prefill:
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

    def _begin(self, running: PackedRunning, known: int, segments: Sequence[Segment]) -> None:
        self._note_cached(running, known)
        running.computed = known
        if known == len(running.tokens) - 1:
            self._join_lane(running, segments)
            return
        running.segment = Segment.empty(self.model.shape, len(running.tokens))
        _write_all(running.segment, segments)
        self._prefilling.append(running)

    def _fits(self, running: PackedRunning) -> bool:
        if not self._running():
            return True
        wanted = lane_capacity(len(running.tokens) + min(running.max_tokens, 256), self.limits.context)
        return self._running_bytes() + wanted * self.model.shape.token_bytes <= self.limits.kv_bytes

    def _unprefilled(self) -> int:
        return sum(len(running.tokens) - running.computed for running in self._prefilling)

    # --------------------------------------------------------------------------------------------------- compute

    def _next_prefills(self) -> Iterator[tuple[PackedRunning, int, int]]:
        """Pieces of prompts for the next step, at most ``limits.prefill`` tokens."""
        budget = self.limits.prefill
        for running in self._prefilling:
            stop = min(len(running.tokens), running.computed + budget)
            if stop > running.computed:
                yield running, running.computed, stop
                budget -= stop - running.computed

    def _compute(
        self, decoding: list[tuple[Lane, list[PackedRunning]]], prefills: list[tuple[PackedRunning, int, int]]
    ) -> list[PackedRunning]:
        parts: list[DecodePart | PrefillPart] = []
        ids: list[IdArray] = []
        sampled: list[PackedRunning] = []
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

    def _sample(self, logits: torch.Tensor, sampled: Sequence[PackedRunning]) -> None:
        super()._sample(logits, sampled)
        for running in sampled:
            if running.lane is not None and len(running.tokens) > running.lane.capacity and running.finish is None:
                self._move_lane(running)

    def _prefilled(self, running: PackedRunning, stop: int) -> None:
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

    def _join_lane(self, running: PackedRunning, segments: Sequence[Segment]) -> None:
        likely = len(running.tokens) + min(running.max_tokens, 32)
        capacity = lane_capacity(likely, self.limits.context)
        lane = self._lanes.setdefault(capacity, Lane(self.model.shape, capacity))
        running.lane, running.row = lane, lane.add()
        self._rows.setdefault(capacity, []).append(running)
        _write_all(lane.row(running.row), segments)

    def _leave_lane(self, running: PackedRunning) -> None:
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

    def _move_lane(self, running: PackedRunning) -> None:
        assert running.lane is not None
        kept = running.lane.row(running.row).part(0, running.computed).copy()
        self._leave_lane(running)
        self._join_lane(running, [kept])

    def _leave(self, running: PackedRunning) -> None:
        if running in self._prefilling:
            self._prefilling.remove(running)
            running.segment = None
        if running.lane is not None:
            if running.error is None:
                ids = running.tokens[: running.computed]
                start = self.store.missing(ids)
                self.store.insert(ids, start, running.lane.row(running.row).part(start, running.computed))
            self._leave_lane(running)


def _write_all(target: Segment, segments: Sequence[Segment]) -> None:
    at = 0
    for segment in segments:
        target.write(at, segment)
        at += len(segment)
