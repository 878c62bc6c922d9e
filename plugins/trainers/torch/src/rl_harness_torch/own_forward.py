"""Running a transformers model by its own forward and with its own cache, one sequence at a time.

For models whose attention is not ours to replace, or which keep something else than keys and values: recurrent states,
convolutions, sinks, chunks, biases. A cache is only ever continued and copied, never looked into.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rl_harness.errors import Unsupported
from rl_harness.records.arrays import IdArray
from transformers import DynamicCache

from rl_harness_torch.faithful import PROBE, check_decoder_only, gap, own_logits, probe_ids, same
from rl_harness_torch.packed_linear import PackedLinears

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)

#: What models call their cache, both in what forward returns and in what it takes.
_CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state")
_SHARED = (str, bytes, int, float, bool, type(None), torch.dtype, torch.device)


class State:
    """What a model remembers of the tokens it has seen. Computing with it changes it."""

    __slots__ = ("cache",)

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in _tensors(self.cache, set()))

    def copy(self) -> State:
        """The same in memory of its own."""
        # Not deepcopy's own way with tensors: it copies all the memory that a view is a window on.
        memo: dict[int, Any] = {id(tensor): tensor.clone() for tensor in _tensors(self.cache, set())}
        return State(copy.deepcopy(self.cache, memo))


def _tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Every tensor that ``value`` holds, each once."""
    if isinstance(value, _SHARED) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item, seen)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from _tensors(item, seen)
    elif hasattr(value, "__dict__"):
        yield from _tensors(vars(value), seen)


class OwnModel:
    """A causal model as transformers runs it.

    ``keeps_state``: its cache can be continued token by token. ``takes_pieces``: also by several tokens at once.
    A model whose cache does not give what one forward over everything gives is computed without it, from the first
    token each time. Raises :class:`~rl_harness.errors.Unsupported` for one that even so has no next token.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        check_decoder_only(model)
        untyped: Any = model
        self.model = model
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self.device: torch.device = model.device
        self.keeps_state = self.takes_pieces = False
        if getattr(model.config, "rescale_every", 0):
            untyped.config.rescale_every = 0  # RWKV would divide its weights in place, new ones then not
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = next((name for name in _CACHE_NAMES if name in parameters), "")
        self._takes_positions = "position_ids" in parameters
        self._keep = {"logits_to_keep": 1} if untyped._supports_logits_to_keep() else {}
        self._first = 1  # tokens that a state begins with at least
        self._fixed_bytes = self._token_bytes = 0.0
        ids = probe_ids(model)
        self._probe = ids.cpu().numpy().astype(np.int32)
        self._expected = self._plain_logits(ids)
        self._linears = PackedLinears(model)
        if not self._try_state():
            self._linears.undo()
            if not self._try_state():
                self._check_causal()

    @property
    def how(self) -> str:
        """Which way it is computed, in words."""
        if self.keeps_state:
            return "by its own forward and cache, one sequence at a time"
        return "by its own forward without a cache, every sequence from its first token for each new one"

    def state_bytes(self, length: int) -> int:
        """About the memory that the state of ``length`` tokens takes."""
        return int(self._fixed_bytes + self._token_bytes * length)

    @torch.inference_mode()
    def forward(self, tokens: IdArray, done: int = 0, state: State | None = None) -> tuple[torch.Tensor, State | None]:
        """fp32 logits ``[vocab]`` after the last of ``tokens``, and the state there, if one can be kept.

        ``state`` holds the first ``done`` tokens and is used up; without it, everything is computed.
        """
        model: Any = self.model
        start = done if state is not None else 0
        given: dict[str, Any] = {"input_ids": torch.tensor(tokens[start:], dtype=torch.long, device=self.device)[None]}
        if self._takes_positions:
            given["position_ids"] = torch.arange(start, len(tokens), device=self.device)[None]
        if not self.keeps_state or len(tokens) < self._first:
            return model(**given, **self._keep, use_cache=False).logits[0, -1].float(), None
        if state is None and self._cache_name != "state":
            state = State(DynamicCache(config=model.config))
        if state is not None:
            given[self._cache_name] = state.cache
        output = model(**given, **self._keep, use_cache=True)
        returned = output.get(self._cache_name)
        if returned is not None:
            state = State(returned)
        return output.logits[0, -1].float(), state

    def weights_changed(self) -> None:
        """The model's parameters were overwritten."""
        self._linears.refresh()

    # ------------------------------------------------------------------------------------- looked at once, when loaded

    def _plain_logits(self, ids: torch.Tensor) -> torch.Tensor:
        try:
            return own_logits(self.model, ids)
        except Exception as error:
            raise Unsupported(
                f"{type(self.model).__name__} cannot compute {len(ids)} tokens: {type(error).__name__}: {error}",
                remedy="choose another model, or another engine",
            ) from error

    def _try_state(self) -> bool:
        """Find out what the cache is good for; False if for nothing."""
        self.keeps_state = bool(self._cache_name)
        try:
            self.keeps_state = self.keeps_state and self._same([PROBE - 7, *range(PROBE - 6, PROBE + 1)])
            if self.keeps_state:
                self._first = 1 if self._same(range(1, 7)) else 2
                self.keeps_state = self._same(range(self._first, 7)) and self._same_after_copy()
            if self.keeps_state:
                self._measure()
                self.takes_pieces = self._takes_pieces()
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            _log.debug("%s: its cache is not used: %s", type(self.model).__name__, error, exc_info=True)
            self.keeps_state = False
        return self.keeps_state

    def _takes_pieces(self) -> bool:
        try:
            return self._same([5, 12, 20, PROBE])
        except (RuntimeError, ValueError, NotImplementedError):
            return False

    def _same(self, stops: Sequence[int]) -> bool:
        """Whether computing the probe in pieces that end at ``stops`` gives what one forward gives."""
        every, state, done = [], None, 0
        for stop in stops:
            logits, state = self.forward(self._probe[:stop], done, state)
            every.append(logits)
            done = stop
        expected = self._expected[[stop - 1 for stop in stops]]
        return same(gap(torch.stack(every), expected), self.model.dtype)

    def _same_after_copy(self) -> bool:
        """Whether a copied state is independent of the one that it was copied from."""
        half = PROBE // 2
        _, state = self.forward(self._probe[:half])
        assert state is not None
        kept = state.copy()
        self.forward(self._probe[: half + 1][::-1].copy(), half, state)
        logits, _ = self.forward(self._probe[: half + 1], half, kept)
        return same(gap(logits, self._expected[half]), self.model.dtype)

    def _measure(self) -> None:
        sizes = []
        for length in (PROBE // 2, PROBE):
            _, state = self.forward(self._probe[:length])
            assert state is not None
            sizes.append(state.nbytes)
        self._token_bytes = (sizes[1] - sizes[0]) / (PROBE - PROBE // 2)
        self._fixed_bytes = max(0.0, sizes[1] - PROBE * self._token_bytes)

    def _check_causal(self) -> None:
        """Without a cache, the last logits of a beginning must be those at its place in the whole."""
        if not all(self._same([stop]) for stop in (1, PROBE // 2)):
            raise Unsupported(
                f"{type(self.model).__name__} is not causal: what it predicts after a token depends on later tokens",
                remedy="choose another model; a decoder may need is_decoder in its config.json",
            )
