"""One request in the engine: its tokens, its random numbers, when it ends, and what was not sent yet."""

from __future__ import annotations

from typing import Literal

import numpy as np
from rl_harness.contracts.engine import GenerateRequest, TokenChunk
from rl_harness.errors import EngineError, RlHarnessError
from rl_harness.records import ids as id_array
from rl_harness.records import logps as logp_array
from rl_harness.records.arrays import IdArray
from tokenizers import Tokenizer

from rl_harness_torch.sampler import Draw, Uniforms
from rl_harness_torch.stops import StopStrings


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
        self.computed = 0  # of its tokens, those whose keys and values (or what the model has instead) are there

    @property
    def ended(self) -> bool:
        return self.finish is not None or self.error is not None

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
