"""Comparing what an engine computes with what the model computes on its own, on a few tokens, when it is loaded.

A few tokens are fewer than most windows and blocks. So a model whose config has such lengths is also looked at as a
twin of the same weights with these lengths shrunk, where a few tokens cross every one of them.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from rl_harness.errors import Unsupported

from rl_harness_torch.models import context_length

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROBE = 24  # tokens that are compared

#: Names of lengths in a config at which a model begins to compute something else.
_LENGTH = re.compile(
    r"window|chunk|block_size|local_attention|context_left|index_topk|index_local|compress|floor_scale"
)
#: Numbers of layers, and what only divides work up.
_NO_LENGTH = re.compile(r"layer|pattern|feed_forward|type|theta|rope|rank|dim|head")
#: Rotary embeddings that depend on the whole length; their models are served up to where that begins.
_BY_LENGTH = ("longrope", "dynamic")
#: Tokens that are tried in a low precision: more than two blocks of 64, which models have that do not say so.
_LONG = 136
#: What a length is shrunk to, if the probe does not go far enough beyond it.
_SHRUNK = 8


def check_decoder_only(model: PreTrainedModel) -> None:
    """Raises ``Unsupported`` for a model that reads its prompt with an encoder."""
    if model.config.is_encoder_decoder:
        raise Unsupported(
            f"{type(model).__name__} is an encoder-decoder model; the embedded engine serves decoder-only ones",
            remedy="choose a causal language model",
        )


def lengths(config: Any) -> dict[str, int]:
    """The lengths in a text config (windows, chunks, blocks) at which attention or recurrence changes, by their names.

    0, None and False are none, and so is a sliding window where ``use_sliding_window`` is false.
    """
    return {name: max(values) for name, values in _lengths(config).items()}


def _lengths(config: Any) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for name, value in vars(config).items():
        if not _LENGTH.search(name) or _NO_LENGTH.search(name):
            continue
        if name == "sliding_window" and getattr(config, "use_sliding_window", True) is False:
            continue
        values = value if isinstance(value, list | tuple) else [value]
        if numbers := [v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0]:
            found[name] = numbers
    return found


def _rope_entries(config: Any) -> list[dict[str, Any]]:
    """Rotary settings (one for the model, or one for each kind of layer) with a length where a scale may change."""
    rope = getattr(config, "rope_parameters", None) or {}
    entries = [entry for entry in (rope, *rope.values()) if isinstance(entry, dict)]
    name = "original_max_position_embeddings"
    return [e for e in entries if isinstance(e.get(name), int) and e.get("rope_type") not in _BY_LENGTH]


def _untried(config: Any) -> list[str]:
    """The lengths that a probe does not cross, or not by far enough."""
    names = [name for name, values in _lengths(config).items() if max(values) > PROBE // 2]
    if any(entry["original_max_position_embeddings"] > PROBE // 2 for entry in _rope_entries(config)):
        names.append("rope_parameters")
    return names


def shrunken(model: PreTrainedModel) -> tuple[PreTrainedModel, str] | None:
    """A model of the same weights (in the same memory) whose windows, chunks and blocks are so short that a probe
    crosses them, and what was shrunk, in words; None for a model that has none longer than that.

    Raises :class:`~rl_harness.errors.Unsupported` where that cannot be made.
    """
    names = _untried(model.config.get_text_config())
    if not names:
        return None
    twin = _twin(model, names)
    if twin is None:  # one of the numbers is the size of a weight, not a length; most models have one number anyway
        names = [name for name in names if _twin(model, [name]) is not None]
        twin = _twin(model, names) if names else None
    return (twin, _in_words(model.config.get_text_config(), names)) if twin is not None else None


def _in_words(config: Any, names: list[str]) -> str:
    known = lengths(config)
    rope = "original_max_position_embeddings"
    return " and ".join(f"{name} {known[name]}" if name in known else rope for name in names)


def _twin(model: PreTrainedModel, names: list[str]) -> PreTrainedModel | None:
    """None if its weights would be of other shapes."""
    config = copy.deepcopy(model.config)
    text: Any = config.get_text_config()
    for name in names:
        if name == "rope_parameters":
            for entry in _rope_entries(text):
                entry["original_max_position_embeddings"] = min(_SHRUNK, entry["original_max_position_embeddings"])
        else:
            setattr(text, name, _shrink(getattr(text, name)))
    weights: Mapping[str, torch.Tensor] = model.state_dict()
    factory: Any = type(model)
    try:
        twin, info = factory.from_pretrained(
            None,
            config=config,
            state_dict=weights,
            dtype=model.dtype,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a config or a model may object in any manner
        raise Unsupported(
            f"{type(model).__name__} cannot be tried beyond its {_in_words(model.config.get_text_config(), names)} "
            f"({type(error).__name__}: {first_line(error)})"
        ) from error
    sizes = {name for name, _ in model.named_parameters()}
    if sizes & {key[0] if isinstance(key, tuple) else key for key in (*info["mismatched_keys"], *info["missing_keys"])}:
        return None  # buffers of other shapes have been computed anew
    for own, given in zip(twin.parameters(), model.parameters(), strict=True):
        own.data = given.data  # on another device it was copied
    moved: PreTrainedModel = twin.to(model.device).eval()
    return moved


def _shrink(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_shrink(each) for each in value)
    return min(value, _SHRUNK) if isinstance(value, int) and not isinstance(value, bool) else value


def first_line(error: BaseException) -> str:
    """What an error says, in one line that is not too long."""
    return (str(error).strip().splitlines() or ["no message"])[0][:200]


def probe_ids(model: PreTrainedModel) -> torch.Tensor:
    """``[PROBE]`` ids of the model's vocabulary."""
    return torch.arange(3, 3 + PROBE, device=model.device) * 7 % int(model.config.get_text_config().vocab_size)


@contextlib.contextmanager
def in_fp32(model: PreTrainedModel) -> Iterator[None]:
    """Compute in fp32, so that rounding does not hide what a comparison is to find. Nothing is lost on the way back."""
    low = (torch.bfloat16, torch.float16)
    cast = [(tensor, tensor.dtype) for tensor in (*model.parameters(), *model.buffers()) if tensor.dtype in low]
    try:
        for tensor, _ in cast:
            tensor.data = tensor.data.float()
        yield
    finally:
        for tensor, dtype in cast:
            tensor.data = tensor.data.to(dtype)


@torch.inference_mode()
def own_logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """fp32 ``[len(ids), vocab]`` of one plain forward over everything, without a cache."""
    untyped: Any = model
    logits: torch.Tensor = untyped(input_ids=ids[None], use_cache=False).logits[0]
    return logits.float()


@torch.no_grad()
def check_precision(model: PreTrainedModel, option: str) -> None:
    """Raises ``Unsupported`` for a model that fails, or computes no numbers, in the precision that it was loaded in.

    Some mix precisions on the way, and only where a prompt is longer than a block; fp32 needs no such check.
    """
    if next(model.parameters()).dtype == torch.float32:
        return
    limit = context_length(model) or _LONG
    attempts: list[tuple[PreTrainedModel, int]] = [(model, min(_LONG, limit))]
    with contextlib.suppress(Unsupported):  # then just the model itself is tried
        if found := shrunken(model):
            attempts.append((found[0], min(PROBE, limit)))
    for tried, length in attempts:
        untyped: Any = tried
        ids = probe_ids(model).repeat(-(-length // PROBE))[None, :length]
        try:
            fine = bool(untyped(input_ids=ids, use_cache=False).logits.isfinite().all())
            why = "" if fine else "its logits are not finite"
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {first_line(error)}"
        if why:
            name = str(model.dtype).removeprefix("torch.")
            raise Unsupported(
                f"{type(model).__name__} does not compute in {name} ({why})", remedy=f"set {option} to fp32"
            )


def gap(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """How far the log-probabilities of ``logits`` are from those of ``expected``, on average."""
    difference = torch.log_softmax(logits, -1) - torch.log_softmax(expected, -1)
    return float(difference.abs().mean().item())


def same(gap: float, dtype: torch.dtype) -> bool:
    """Whether ``gap`` is what rounding in ``dtype`` explains (NaN is not)."""
    return gap < (1e-3 if dtype == torch.float32 else 0.3)
