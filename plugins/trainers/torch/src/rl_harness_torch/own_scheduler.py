"""Serving a model by its own forward and cache: one running request after the other, or those together that the model
continues together (the members of a group, which are of one length from the start, or any).
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

import numpy as np
import torch
from rl_harness.contracts.engine import GenerateRequest
from rl_harness.records.arrays import IdArray
from tokenizers import Tokenizer

from rl_harness_torch.kv import common_prefix
from rl_harness_torch.own_forward import OwnModel, State
from rl_harness_torch.running import Running
from rl_harness_torch.scheduler import Limits, Scheduler

#: A state where two prompts part is kept only if that saves at least this many tokens.
_WORTH_KEEPING = 8
#: A model that takes new tokens only one by one continues a known beginning if it is this many times what is new.
_WORTH_CONTINUING = 8


class StateStore:
    """States by the tokens that led to them; the least recently used go first.

    A state can only be continued from its end, so only a beginning that was kept as such is found.
    """

    def __init__(self) -> None:
        self._kept: collections.OrderedDict[bytes, tuple[IdArray, State, int]] = collections.OrderedDict()
        self.nbytes = 0

    def clear(self) -> None:
        """Forget everything (the weights changed)."""
        self._kept.clear()
        self.nbytes = 0

    def find(self, ids: IdArray) -> tuple[int, State | None]:
        """The longest beginning of ``ids`` that has a state: its length, and the state, which must be copied."""
        length, best = 0, None
        for key, (kept, _, _) in self._kept.items():
            if length < len(kept) <= len(ids) and np.array_equal(kept, ids[: len(kept)]):
                length, best = len(kept), key
        if best is None:
            return 0, None
        self._kept.move_to_end(best)
        return length, self._kept[best][1]

    def shared(self, ids: IdArray) -> int:
        """How many tokens of ``ids`` some remembered sequence begins with, state or not."""
        return max((common_prefix(kept, ids) for kept, _, _ in self._kept.values()), default=0)

    def insert(self, ids: IdArray, state: State) -> None:
        """Remember ``state``, which nobody may compute with from now on."""
        key = ids.tobytes()
        if key in self._kept:
            self._kept.move_to_end(key)
            return
        size = state.nbytes + len(key)
        self._kept[key] = (ids.copy(), state, size)
        self.nbytes += size

    def shrink(self, limit: int) -> None:
        """Drop the least recently used states until at most ``limit`` bytes are kept."""
        while self.nbytes > limit:
            _, (_, _, size) = self._kept.popitem(last=False)
            self.nbytes -= size


class OwnRunning(Running):
    """Also its state after ``computed`` tokens, its own or in a batch, and where on the way a copy is to be kept."""

    def __init__(self, request: GenerateRequest, tokenizer: Tokenizer, end: frozenset[int], context: int) -> None:
        super().__init__(request, tokenizer, end, context)
        self.begun = False
        self.state: State | None = None
        self.batch: Batch | None = None
        self.keep_at: list[int] = []

    def take_state(self) -> State | None:
        """Its state, out of the batch it may be in; the request has none then."""
        batch, state = self.batch, self.state
        self.state = self.batch = None
        return state if batch is None else batch.state.row(batch.members.index(self))


class Batch:
    """Requests whose states are the rows of one. It is given up when one of them leaves or another joins."""

    def __init__(self, members: list[OwnRunning]) -> None:
        states = [member.take_state() for member in members]
        self.members = members
        self.state = State.joined([state for state in states if state is not None])
        for member in members:
            member.batch = self


class OwnScheduler(Scheduler[OwnRunning]):
    """Serves a model that is computed its own way."""

    model: OwnModel
    store: StateStore

    def __init__(self, model: OwnModel, tokenizer: Tokenizer, end_token_ids: Sequence[int], limits: Limits) -> None:
        super().__init__(model, StateStore(), OwnRunning, tokenizer, end_token_ids, limits)
        self._active: list[OwnRunning] = []

    def _way(self) -> dict[str, int]:
        return {"own_forward": 1, "own_cache": int(self.model.keeps_state)}

    def _running(self) -> list[OwnRunning]:
        return list(self._active)

    def _running_bytes(self) -> int:
        held = (running.computed for running in self._active if running.state is not None or running.batch is not None)
        return sum(map(self.model.state_bytes, held))

    def _advance(self) -> list[OwnRunning]:
        """The next token of every request whose prompt is computed, after at most ``limits.prefill`` prompt tokens (or
        one whole prompt, for a model that takes no pieces)."""
        self._admit()
        before = self.counters.computed_tokens
        ready: list[OwnRunning] = []
        for running in self._active:
            if not running.begun:
                if self.counters.computed_tokens - before >= self.limits.prefill:
                    continue
                self._begin(running)
            self._prefill(running, self.limits.prefill - (self.counters.computed_tokens - before))
            if not running.keep_at:
                ready.append(running)
        if not ready:
            return []
        groups = self._together(ready)
        logits = torch.cat([self._compute_last(group) for group in groups])
        sampled = [running for group in groups for running in group]
        self._sample(logits, sampled)
        return sampled

    def _leave(self, running: OwnRunning) -> None:
        self._active.remove(running)
        state = running.take_state()
        if state is not None and running.error is None:
            self.store.insert(running.tokens[: running.computed], state)

    def _forget(self) -> None:
        for running in self._active:
            running.begun, running.state, running.batch, running.computed, running.keep_at = False, None, None, 0, []
        self._active.clear()

    def _admit(self) -> None:
        while self._waiting and len(self._active) < self.limits.batch and self._fits(self._waiting[0]):
            self._active.append(self._waiting.popleft())

    def _fits(self, running: OwnRunning) -> bool:
        wanted = sum(self._promised(other) for other in [*self._active, running])
        return not self._active or wanted <= self.limits.kv_bytes

    def _promised(self, running: OwnRunning) -> int:
        likely = running.prompt_length + min(running.max_tokens, 256)
        return self.model.state_bytes(max(likely, len(running.tokens)))

    def _begin(self, running: OwnRunning) -> None:
        """Take over what is known, and plan which states to keep.

        The last token is left out: the requests of a group, which have all but that in common, each compute it.
        """
        running.begun = True
        if not self.model.keeps_state:
            self._note_cached(running, 0)
            return
        ids = running.tokens[:-1]
        known, state = self.store.find(ids)
        if not self.model.takes_pieces and known < _WORTH_CONTINUING * (len(ids) - known):
            known, state = 0, None
        self._note_cached(running, known)
        running.computed = known
        running.state = state.copy() if state is not None else None
        shared = self.store.shared(ids)
        stops = {len(ids)} if len(ids) > known else set()
        if self.model.takes_pieces and shared >= known + _WORTH_KEEPING:
            stops.add(shared)
        running.keep_at = sorted(stops)

    def _prefill(self, running: OwnRunning, budget: int) -> None:
        """Compute prompt tokens up to the last one, about ``budget`` of them, and keep the planned states."""
        while running.keep_at and budget > 0:
            stop = running.keep_at[0]
            if self.model.takes_pieces:
                stop = min(stop, running.computed + budget)
            elif running.state is not None:
                stop = running.computed + 1
            budget -= stop - running.computed
            self._compute(running, stop)
            if stop == running.keep_at[0]:
                del running.keep_at[0]
                if running.state is not None:
                    self.store.insert(running.tokens[:stop], running.state.copy())

    def _together(self, ready: Sequence[OwnRunning]) -> list[list[OwnRunning]]:
        """``ready`` in groups that the model continues together."""
        groups: dict[tuple[str, int], list[OwnRunning]] = {}
        for number, running in enumerate(ready):
            alone = self.model.batches == "none" or (running.state is None and running.batch is None)
            any_length = self.model.batches == "any"
            key = ("alone", number) if alone else ("together", 0 if any_length else running.computed)
            groups.setdefault(key, []).append(running)
        return list(groups.values())

    def _compute_last(self, group: list[OwnRunning]) -> torch.Tensor:
        """Logits ``[len(group), vocab]`` after the last token of each."""
        if len(group) == 1:
            return self._compute(group[0], len(group[0].tokens))[None]
        batch = group[0].batch
        if batch is None or batch.members != group:
            batch = Batch(group)
        ids = [int(running.tokens[-1]) for running in group]
        logits, state = self.model.forward_together(ids, [running.computed for running in group], batch.state)
        assert state is not None
        batch.state = state
        for running in group:
            running.computed += 1
        self.counters.computed_tokens += len(group)
        return logits

    def _compute(self, running: OwnRunning, stop: int) -> torch.Tensor:
        """Logits ``[vocab]`` after the first ``stop`` tokens; the state is there then."""
        state = running.take_state()
        begin = running.computed if state is not None else 0
        logits, running.state = self.model.forward(running.tokens[:stop], begin, state)
        running.computed = stop
        self.counters.computed_tokens += stop - begin
        return logits
