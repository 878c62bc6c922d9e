"""Running a transformers model on a packed step: one token of every running sequence and pieces of new prompts, side
by side in one row, each attending to its own keys and values only.

The model's own code does everything but attention, which transformers lets us replace by name; that is also where the
keys and values of new tokens are kept. No cache object of transformers is involved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from rl_harness.errors import EngineError, RlHarnessError, Unsupported
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from rl_harness_torch.faithful import (
    PROBE,
    check_decoder_only,
    first_line,
    gap,
    in_fp32,
    lengths,
    own_logits,
    probe_ids,
    same,
    shrunken,
)
from rl_harness_torch.kv import KVShape, Lane, Segment
from rl_harness_torch.packed_linear import PackedLinears

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "rl_harness_packed"


class DecodePart:
    """The next token of every row of ``lane``; row i has ``lengths[i]`` tokens before it."""

    def __init__(self, lane: Lane, lengths: Sequence[int]) -> None:
        device = lane.shape.device
        self.lane = lane
        self.size = len(lengths)
        self._rows = torch.arange(self.size, device=device)
        self._lengths = torch.tensor(lengths, device=device)
        self._end = max(lengths) + 1
        self._uniform = min(lengths) == max(lengths)
        self._masks: dict[int | None, torch.Tensor | None] = {}

    def positions(self) -> torch.Tensor:
        return self._lengths

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: _How) -> torch.Tensor:
        keys, values = self.lane.keys[layer], self.lane.values[layer]
        keys[self._rows, :, self._lengths] = k
        values[self._rows, :, self._lengths] = v
        used = self.size * keys.shape[1]
        # The query heads that share a key head, as if they were positions of one sequence a row and key head.
        grouped = q.reshape(used, -1, q.shape[-1])
        keys, values = keys.flatten(0, 1)[:used, : self._end], values.flatten(0, 1)[:used, : self._end]
        return how.attention(grouped, keys, values, self._mask(how.window, q)).reshape(self.size, -1, values.shape[-1])

    def _mask(self, window: int | None, q: torch.Tensor) -> torch.Tensor | None:
        if window not in self._masks:
            mask = None
            if not self._uniform or (window is not None and window < self._end):
                rows = _mask(self._lengths, self._end, window, q.dtype)
                mask = rows.repeat_interleave(self.lane.shape.heads, 0)[:, None]
            self._masks[window] = mask
        return self._masks[window]


class PrefillPart:
    """Prompt tokens ``start`` to ``stop`` of one sequence whose keys and values are in ``segment``."""

    def __init__(self, segment: Segment, start: int, stop: int) -> None:
        self.segment = segment
        self.size = stop - start
        self._start, self._stop = start, stop
        self._positions = torch.arange(start, stop, device=segment.keys.device)
        self._masks: dict[int | None, torch.Tensor] = {}

    def positions(self) -> torch.Tensor:
        return self._positions

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: _How) -> torch.Tensor:
        keys, values = self.segment.keys[layer], self.segment.values[layer]
        keys[:, self._start : self._stop] = k.transpose(0, 1)
        values[:, self._start : self._stop] = v.transpose(0, 1)
        heads, size = keys.shape[0], q.shape[-1]
        group = q.shape[1] // heads
        grouped = q.transpose(0, 1).reshape(heads, group * self.size, size)
        mask = self._mask(how.window, q).repeat(group, 1)
        out = how.attention(grouped, keys[:, : self._stop], values[:, : self._stop], mask)
        return out.view(heads * group, self.size, -1).transpose(0, 1)

    def _mask(self, window: int | None, q: torch.Tensor) -> torch.Tensor:
        if window not in self._masks:
            self._masks[window] = _mask(self._positions, self._stop, window, q.dtype)
        return self._masks[window]


def _mask(positions: torch.Tensor, end: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """``[len(positions), end]``, added to the scores: each position sees itself and what is before it."""
    keys = torch.arange(end, device=positions.device)
    hidden = keys > positions[:, None]
    if window is not None:
        hidden |= keys <= positions[:, None] - window
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


class _How:
    """The attention function of one layer: its scale, sliding window and soft cap."""

    def __init__(self, scale: float | None, window: int | None, softcap: float | None) -> None:
        self.scale = scale
        self.window = window
        self.softcap = softcap

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """``[batch, queries, size]`` over ``[batch, keys, size]``; ``mask`` is added to the scores."""
        if self.softcap is None:
            mask = mask[None] if mask is not None else None
            return scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, scale=self.scale)[0]
        scores = torch.bmm(q * (self.scale if self.scale is not None else q.shape[-1] ** -0.5), k.transpose(1, 2))
        scores = self.softcap * torch.tanh(scores / self.softcap)
        if mask is not None:
            scores = scores + mask
        return torch.bmm(torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype), v)


class _Recorder:
    """Stands in for the parts when a model is first looked at: notes the shape of every layer's keys and values, and
    the window it is given."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[int, int, int]] = {}
        self.windows: dict[int, int | None] = {}
        self.calls = 0

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: _How) -> torch.Tensor:
        self.calls += 1
        self.layers[layer] = (k.shape[1], k.shape[2], v.shape[2])
        self.windows[layer] = how.window
        return q.new_zeros(q.shape[0], q.shape[1], v.shape[2])


class _Current:
    """What the model's attention layers are working on. The worker computes in one thread, one step at a time."""

    parts: Sequence[DecodePart | PrefillPart] | None = None
    recorder: _Recorder | None = None


def _packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: ``query`` is ``[1, heads, tokens, size]``, the result tokens-first."""
    for name in ("s_aux", "position_bias", "head_mask"):
        if others.get(name) is not None:
            raise Unsupported(f"our attention has no {name}")
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise Unsupported("its attention layers do not know their index")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    how = _How(scaling, sliding_window, softcap)
    if _Current.recorder is not None:
        return _Current.recorder.attend(layer, q, k, v, how)[None], None
    if _Current.parts is None:
        raise EngineError("attention was called outside a step")
    outputs, at = [], 0
    for part in _Current.parts:
        piece = slice(at, at + part.size)
        outputs.append(part.attend(layer, q[piece].contiguous(), k[piece], v[piece], how))
        at += part.size
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None], None


AttentionInterface.register(NAME, _packed_attention)


def _try_beyond_lengths(model: PreTrainedModel) -> None:
    """Run and compare a twin whose windows and chunks are short, in fp32 so that rounding hides nothing."""
    found = shrunken(model)
    if found is None:
        return
    twin, what = found
    try:
        try:
            with in_fp32(twin):
                PackedModel(twin, quick=False)
        except torch.OutOfMemoryError:
            PackedModel(twin, quick=False)
    except Unsupported as error:
        raise Unsupported(f"{error.message} (tried beyond its {what})") from error


class PackedModel:
    """A transformers causal model whose attention is ours.

    Raises :class:`~rl_harness.errors.Unsupported` for a model type that cannot run this way; the model is then as it
    was. With ``quick`` false, weights are not laid out anew: slower, and no memory is taken.
    """

    def __init__(self, model: PreTrainedModel, *, quick: bool = True) -> None:
        self.model = model
        untyped: Any = model
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self._check_type()
        _try_beyond_lengths(model)
        probe = probe_ids(model)
        own = untyped.config._attn_implementation
        linears: PackedLinears | None = None
        try:
            expected = own_logits(model, probe)
            model.set_attn_implementation(NAME)
            self._linears = linears = PackedLinears(model) if quick else None
            self._keeps_some_logits = bool(untyped._supports_logits_to_keep())
            self.shape = self._look()
            self._compare(probe, expected)
        except Exception as error:
            if linears is not None:
                linears.undo()
            model.set_attn_implementation(own)
            if isinstance(error, RlHarnessError | MemoryError | torch.OutOfMemoryError):
                raise
            raise Unsupported(
                f"{type(model).__name__} does not run with our attention: {type(error).__name__}: {first_line(error)}"
            ) from error

    @torch.inference_mode()
    def forward(
        self, ids: torch.Tensor, parts: Sequence[DecodePart | PrefillPart], wanted: torch.Tensor
    ) -> torch.Tensor:
        """Compute ``ids`` (the parts' tokens, one after another) and return fp32 logits ``[len(wanted), vocab]`` of
        the tokens at ``wanted``. The parts' keys and values are kept."""
        positions = torch.cat([part.positions() for part in parts])
        _Current.parts = parts
        try:
            return self._run(ids, positions, wanted)
        finally:
            _Current.parts = None

    def _run(self, ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        keep = {"logits_to_keep": wanted} if self._keeps_some_logits else {}
        model: Any = self.model
        logits: torch.Tensor = model(input_ids=ids[None], position_ids=positions[None], use_cache=False, **keep).logits[
            0
        ]
        return (logits if keep else logits[wanted]).float()

    def weights_changed(self) -> None:
        """The model's parameters were overwritten."""
        if self._linears is not None:
            self._linears.refresh()

    def _check_type(self) -> None:
        model, config = self.model, self.model.config
        name = type(model).__name__
        check_decoder_only(model)
        if not model._supports_attention_backend:
            raise Unsupported(f"transformers does not let {name}'s attention be replaced")
        kinds = set(getattr(config.get_text_config(), "layer_types", None) or ())
        if unknown := kinds - {"full_attention", "sliding_attention"}:
            raise Unsupported(f"{name} has {', '.join(sorted(unknown))} layers")

    @torch.inference_mode()
    def _look(self) -> KVShape:
        device = self.model.device
        recorder = _Recorder()
        _Current.recorder = recorder
        try:
            self._run(*(torch.zeros(1, dtype=torch.long, device=device) for _ in range(3)))
        finally:
            _Current.recorder = None
        shapes = set(recorder.layers.values())
        if (
            len(shapes) != 1
            or recorder.calls != len(recorder.layers)
            or set(recorder.layers) != set(range(recorder.calls))
        ):
            raise Unsupported(f"{type(self.model).__name__} does not keep keys and values of one shape in every layer")
        self._check_windows(recorder.windows)
        ((heads, key_size, value_size),) = shapes
        return KVShape(
            layers=recorder.calls,
            heads=heads,
            key_size=key_size,
            value_size=value_size,
            dtype=self.model.dtype,
            device=device,
        )

    def _check_windows(self, given: Mapping[int, int | None]) -> None:
        """A window that is only in the masks which the model makes for itself is one that our attention never sees."""
        config: Any = self.model.config.get_text_config()
        windows = [name for name in lengths(config) if "sliding_window" in name]
        if not windows:
            return
        kinds = getattr(config, "layer_types", None)
        if kinds is None:
            missed = all(window is None for window in given.values())
        else:
            missed = any(kind == "sliding_attention" and given[layer] is None for layer, kind in enumerate(kinds))
        if missed:
            raise Unsupported(f"{type(self.model).__name__} does not tell our attention of its {min(windows)}")

    @torch.inference_mode()
    def _compare(self, ids: torch.Tensor, expected: torch.Tensor) -> None:
        """Compute a few tokens the way steps do (a prompt in two pieces, then single tokens) and compare.

        Catches architectures whose layers need something beyond keys and values (state, shared caches, biases).
        """
        single = 4
        device = self.shape.device
        segment = Segment.empty(self.shape, PROBE)
        every = [self._piece(ids, segment, start, stop) for start, stop in ((0, 9), (9, PROBE - single))]
        lane = Lane(self.shape, 128)
        for _ in range(2):
            lane.row(lane.add()).write(0, segment.part(0, PROBE - single))
        for at in range(PROBE - single, PROBE):
            logits = self.forward(ids[at].repeat(2), [DecodePart(lane, [at, at])], torch.arange(2, device=device))
            every.append(logits[1:])
        difference = gap(torch.cat(every), expected)
        if not same(difference, self.shape.dtype):
            raise Unsupported(
                f"{type(self.model).__name__} computes something else with our attention than with its own "
                f"(log-probabilities differ by {difference:.3g} on average)"
            )

    def _piece(self, ids: torch.Tensor, segment: Segment, start: int, stop: int) -> torch.Tensor:
        every = torch.arange(stop - start, device=ids.device)
        return self.forward(ids[start:stop], [PrefillPart(segment, start, stop)], every)
