"""Running a transformers model by its own forward and with its own cache.

For models whose attention is not ours to replace, or which keep something else than keys and values: recurrent states,
convolutions, sinks, chunks, biases. Nothing is known of a cache but that it holds tensors with a row for each sequence:
it is continued, copied, and put together with others.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from rl_harness.errors import Unsupported
from rl_harness.records.arrays import IdArray

from rl_harness_torch.faithful import (
    PROBE,
    check_decoder_only,
    check_precision,
    first_line,
    gap,
    in_fp32,
    own_logits,
    probe_ids,
    same,
    shrunken,
)
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
        return self._rebuilt(tensor.clone() for tensor in _tensors(self.cache, set()))

    @classmethod
    def joined(cls, states: Sequence[State]) -> State:
        """One state with the rows of all ``states``, in memory of its own."""
        each = (_tensors(state.cache, set()) for state in states)
        together = zip(*each, strict=True)
        return states[0]._rebuilt(torch.cat(rows) if rows[0].ndim else rows[0].clone() for rows in together)

    def row(self, index: int) -> State:
        """One of the rows, in memory of its own."""
        tensors = _tensors(self.cache, set())
        return self._rebuilt(tensor[index : index + 1].clone() if tensor.ndim else tensor.clone() for tensor in tensors)

    def _rebuilt(self, tensors: Iterable[torch.Tensor]) -> State:
        """A copy in which ``tensors`` stand where this one has its own."""
        # deepcopy by itself would copy all the memory that a view is a window on.
        ours = _tensors(self.cache, set())
        memo: dict[int, Any] = {id(own): new for own, new in zip(ours, tensors, strict=True)}
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
    ``batches``: which sequences it continues together, those of equal length or any (there is nothing in the state of a
    recurrent model that tells). ``why_no_cache``: what stands against the cache, if it is not used.
    A model whose cache does not give what one forward over everything gives is computed without it, from the first
    token each time. Raises :class:`~rl_harness.errors.Unsupported` for one that even so has no next token. With
    ``quick`` false, weights are not laid out anew: slower, and no memory is taken.
    """

    def __init__(self, model: PreTrainedModel, *, quick: bool = True) -> None:
        check_decoder_only(model)
        untyped: Any = model
        self.model = model
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self.device: torch.device = model.device
        self.keeps_state = self.takes_pieces = False
        self.batches: Literal["none", "equal", "any"] = "none"
        if getattr(model.config, "rescale_every", 0):
            untyped.config.rescale_every = 0  # RWKV would divide its weights in place, new ones then not
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = next((name for name in _CACHE_NAMES if name in parameters), "")
        self._gives_positions = "position_ids" in parameters
        self.why_no_cache: str | None = None
        self._keep = {"logits_to_keep": 1} if untyped._supports_logits_to_keep() else {}
        self._first = 1  # tokens that a state begins with at least
        self._fixed_bytes = self._token_bytes = 0.0
        self._probe = probe_ids(model).cpu().numpy().astype(np.int32)
        try:
            with in_fp32(model):
                self._look()
        except torch.OutOfMemoryError:
            self._look()
            self.takes_pieces, self.batches = False, "none"  # rounding may hide that they are wrong
        self._look_at_rounding()
        self._look_beyond_lengths()
        if self.keeps_state:
            self._measure()
        self._linears: PackedLinears | None = None
        if quick:
            check_precision(model, "engine.dtype")
            self._linears = PackedLinears(model)
            stops = range(PROBE - 4, PROBE + 1) if self.keeps_state else [PROBE]
            if not self._works(lambda: self._same(stops)):
                self._linears.undo()

    @property
    def how(self) -> str:
        """Which way it is computed, in words."""
        if self.keeps_state:
            together = {"none": "one sequence", "equal": "sequences of one length", "any": "sequences of any length"}
            return f"by its own forward and cache, {together[self.batches]} at a time"
        without = "by its own forward without a cache, every sequence from its first token for each new one"
        return f"{without} ({self.why_no_cache})"

    def state_bytes(self, length: int) -> int:
        """About the memory that the state of ``length`` tokens takes."""
        return int(self._fixed_bytes + self._token_bytes * length)

    @torch.inference_mode()
    def forward(self, tokens: IdArray, done: int = 0, state: State | None = None) -> tuple[torch.Tensor, State | None]:
        """fp32 logits ``[vocab]`` after the last of ``tokens``, and the state there, if one can be kept.

        ``state`` holds the first ``done`` tokens and is used up; without it, everything is computed.
        """
        start = done if state is not None else 0
        logits, after = self._run(
            torch.tensor(tokens[start:], dtype=torch.long, device=self.device)[None],
            torch.arange(start, len(tokens), device=self.device)[None],
            state,
            keep=self.keeps_state and len(tokens) >= self._first,
        )
        return logits[0], after

    @torch.inference_mode()
    def forward_together(
        self, ids: Sequence[int], done: Sequence[int], state: State
    ) -> tuple[torch.Tensor, State | None]:
        """fp32 logits ``[len(ids), vocab]`` after one more token of each sequence in ``state``, which holds the first
        ``done`` tokens of each and is used up; and the state there."""
        return self._run(
            torch.tensor(ids, device=self.device)[:, None], torch.tensor(done, device=self.device)[:, None], state
        )

    def _run(
        self, ids: torch.Tensor, positions: torch.Tensor, state: State | None, *, keep: bool = True
    ) -> tuple[torch.Tensor, State | None]:
        model: Any = self.model
        given: dict[str, Any] = {"input_ids": ids, "use_cache": keep, **self._keep}
        if state is not None:
            given[self._cache_name] = state.cache
            if self._gives_positions:  # from the beginning on, every model knows its own; some begin at another number
                given["position_ids"] = positions
        output = model(**given)
        return output.logits[:, -1].float(), State(output[self._cache_name]) if keep else None

    def weights_changed(self) -> None:
        """The model's parameters were overwritten."""
        if self._linears is not None:
            self._linears.refresh()

    # ------------------------------------------------------------------------------------- looked at once, when loaded

    def _plain_logits(self, ids: torch.Tensor) -> torch.Tensor:
        try:
            return own_logits(self.model, ids)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise Unsupported(
                f"{type(self.model).__name__} cannot compute {len(ids)} tokens "
                f"({type(error).__name__}: {first_line(error)})",
                remedy="choose another model, or another engine",
            ) from error

    def _look(self) -> None:
        """Find out what the cache is good for."""
        ids = torch.tensor(self._probe, dtype=torch.long, device=self.device)
        self._expected = self._plain_logits(ids)
        self._expected_backwards = self._plain_logits(ids.flip(0))
        self.keeps_state = self._finds_state()
        if self.keeps_state:
            self.takes_pieces = self._works(lambda: self._same([5, 12, 20, PROBE]))
            self.batches = self._find_batches()
        else:
            self._check_causal()

    def _finds_state(self) -> bool:
        """Whether the cache is good for anything, and with positions given or found by the model."""
        self.keeps_state = bool(self._cache_name)  # what _continues runs with
        self.why_no_cache = None if self.keeps_state else "it has none"
        for gives in (True, False) if self._gives_positions else (False,):
            self._gives_positions = gives
            if self.keeps_state and self._works(self._continues):
                self.why_no_cache = None
                return True
            if self.keeps_state:
                self.why_no_cache = self._obstacle or "its cache does not give what one forward over everything gives"
        return False

    def _look_beyond_lengths(self) -> None:
        """Have a twin with short windows and blocks say what the cache is good for beyond them."""
        if not self.keeps_state:
            return
        try:
            found = shrunken(self.model)
            if found is None:
                return
            twin, what = found
            seen = OwnModel(twin, quick=False)
            why = seen.why_no_cache and f"{seen.why_no_cache}, tried beyond its {what}"
        except Unsupported as error:
            seen, why = None, error.message
        if seen is None or not seen.keeps_state:
            self._give_up_cache(why)
            return
        self.takes_pieces = self.takes_pieces and seen.takes_pieces
        self.batches = min(self.batches, seen.batches, key=("none", "equal", "any").index)
        self._first = max(self._first, seen._first)
        self._gives_positions = self._gives_positions and seen._gives_positions

    def _look_at_rounding(self) -> None:
        """In a low precision, a cache can go its own way: a decay near 1 that is rounded is another one soon."""
        if self.keeps_state and self.model.dtype != torch.float32 and not self._works(self._same_by_singles):
            name = str(self.model.dtype).removeprefix("torch.")
            self._give_up_cache(self._obstacle or f"in {name} its cache does not give what one forward gives")

    def _give_up_cache(self, why: str | None) -> None:
        self.keeps_state = self.takes_pieces = False
        self.batches = "none"
        self.why_no_cache = why

    def _same_by_singles(self) -> bool:
        return self._same([PROBE - 7, *range(PROBE - 6, PROBE + 1)])

    def _continues(self) -> bool:
        if not self._same_by_singles():
            return False
        self._first = 1 if self._same(range(1, 7)) else 2
        return self._same(range(self._first, 7)) and self._same_after_copy()

    def _find_batches(self) -> Literal["none", "equal", "any"]:
        half = PROBE // 2
        if not self._works(lambda: self._same_together(half, half)):
            return "none"
        mixed = [(half - 3, half + 2), (half, 2)]
        return "any" if self._works(lambda: all(self._same_together(*lengths) for lengths in mixed)) else "equal"

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

    def _same_together(self, *lengths: int) -> bool:
        """Whether sequences that are put together at these lengths, and parted again, come out as they do alone."""
        sequences = [(self._probe, self._expected), (self._probe[::-1].copy(), self._expected_backwards)]
        every: list[torch.Tensor] = []
        expected: list[torch.Tensor] = []
        states = [self.forward(tokens[:n])[1] for (tokens, _), n in zip(sequences, lengths, strict=True)]
        state: State | None = State.joined([one for one in states if one is not None])
        for step in range(3):
            assert state is not None
            done = [n + step for n in lengths]
            ids = [int(tokens[n]) for (tokens, _), n in zip(sequences, done, strict=True)]
            logits, state = self.forward_together(ids, done, state)
            every.extend(logits)
            expected.extend(own[n] for (_, own), n in zip(sequences, done, strict=True))
        assert state is not None
        for row, ((tokens, own), length) in enumerate(zip(sequences, lengths, strict=True)):
            n = length + 3
            every.append(self.forward(tokens[: n + 1], n, state.row(row))[0])
            expected.append(own[n])
        return same(gap(torch.stack(every), torch.stack(expected)), self.model.dtype)

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
        causal = self._works(lambda: self._same([1]) and self._same([PROBE // 2]))
        if self._obstacle:
            raise Unsupported(
                f"{type(self.model).__name__} cannot compute a few tokens ({self._obstacle})",
                remedy="choose another model, or another engine",
            )
        if not causal:
            set_already = bool(getattr(self.model.config, "is_decoder", False))
            raise Unsupported(
                f"{type(self.model).__name__} is not causal: what it predicts after a token depends on later tokens",
                remedy="choose another model"
                + ("" if set_already else "; one that can be a decoder needs is_decoder in its config.json"),
            )

    def _works(self, check: Callable[[], bool]) -> bool:
        """Whether ``check`` says so; what a model does not support raises all kinds of errors, noted in
        ``_obstacle``."""
        self._obstacle = ""
        try:
            return check()
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            self._obstacle = f"{type(error).__name__}: {first_line(error)}"
            _log.debug("a way of computing is not used: %s", error, exc_info=True)
            return False
