"""Comparing what an engine computes with what the model computes on its own, on a few tokens, when it is loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from rl_harness.errors import Unsupported

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROBE = 24  # tokens that are compared


def check_decoder_only(model: PreTrainedModel) -> None:
    """Raises ``Unsupported`` for a model that reads its prompt with an encoder."""
    if model.config.is_encoder_decoder:
        raise Unsupported(
            f"{type(model).__name__} is an encoder-decoder model; the embedded engine serves decoder-only ones",
            remedy="choose a causal language model",
        )


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


def gap(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """How far the log-probabilities of ``logits`` are from those of ``expected``, on average."""
    difference = torch.log_softmax(logits, -1) - torch.log_softmax(expected, -1)
    return float(difference.abs().mean().item())


def same(gap: float, dtype: torch.dtype) -> bool:
    """Whether ``gap`` is what rounding in ``dtype`` explains (NaN is not)."""
    return gap < (1e-3 if dtype == torch.float32 else 0.3)
