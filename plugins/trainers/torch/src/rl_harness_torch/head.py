"""Log-probs and entropies of chosen tokens from hidden states, without a tensor of tokens by vocabulary; or, where a
model's output head cannot be taken apart from it, from the logits it gave.

The vocabulary projection is computed in chunks of rows that fit a fixed number of bytes, and again in the backward
pass, except for the last chunk, which is still there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_harness_torch.transforms import IDENTITY, Transform

#: Bytes of fp32 logits that exist at once.
CHUNK_BYTES = 64 << 20


def token_outputs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    scale: Tensor,
    transform: Transform = IDENTITY,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Tensor, Tensor]:
    """``log softmax(scale · transform(hidden weightᵀ + bias))[target]`` and the entropy of that softmax, in nats.

    ``hidden`` [n, d], ``weight`` [vocabulary, d], ``targets`` int64 [n], ``scale`` [n] (1/temperature). Both results
    are [n] in fp32 (fp64 for fp64 input) and differentiable with respect to hidden, weight and bias.
    """
    if transform.cap is None:  # a factor is a factor, whatever it stands for
        squeeze = None
        scale = scale * transform.scale if transform.scale != 1 else scale
    else:  # the cap is a factor too, of what tanh gives
        squeeze = transform.scale / transform.cap
        scale = scale * transform.cap
    logp, entropy = _TokenOutputs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, scale, squeeze, chunk_bytes
    )
    return logp, entropy


def logit_outputs(
    logits: Tensor, targets: Tensor, scale: Tensor, chunk_bytes: int = CHUNK_BYTES
) -> tuple[Tensor, Tensor]:
    """:func:`token_outputs` of ``logits`` [n, vocabulary] that a model has computed itself. Differentiable with
    respect to them; what is computed in fp32 exists for a chunk of rows at a time."""
    logp, entropy = _LogitOutputs.apply(logits, targets, scale, chunk_bytes)  # type: ignore[no-untyped-call]
    return logp, entropy


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _log_softmax(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, squeeze: float | None
) -> tuple[Tensor, Tensor]:
    """The log-probs, and what the scaled logits exceed them by ([rows, 1])."""
    logits = torch.nn.functional.linear(hidden, weight, bias).to(_wide(hidden.dtype))
    if squeeze is not None:
        logits.mul_(squeeze).tanh_()
    logits.mul_(scale[:, None])
    excess = logits.logsumexp(-1, keepdim=True)
    return logits.sub_(excess), excess


def _pull(scores: Tensor, targets: Tensor, entropy: Tensor, grad_logp: Tensor, grad_entropy: Tensor | None) -> Tensor:
    """The gradient with respect to the scaled logits, in the place of the log-probs ``scores``."""
    # d logp/d z = onehot - p and d entropy/d z = -p (log p + entropy), z the scaled logits
    if grad_entropy is not None:
        probs = scores.exp()
        scores.add_(entropy[:, None]).mul_(-grad_entropy[:, None]).sub_(grad_logp[:, None]).mul_(probs)
    else:
        scores.exp_().mul_(-grad_logp[:, None])
    return scores.scatter_add_(1, targets[:, None], grad_logp[:, None])


class _TokenOutputs(torch.autograd.Function):
    """The scaled logits are ``scale · z``, or ``scale · tanh(squeeze · z)``."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        scale: Tensor,
        squeeze: float | None,
        chunk_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        n, wide = len(hidden), _wide(hidden.dtype)
        rows = max(1, chunk_bytes // (weight.shape[0] * 4))
        scale = scale.to(wide)
        logp, entropy = hidden.new_empty(n, dtype=wide), hidden.new_empty(n, dtype=wide)
        last = excess = None
        for start in range(0, n, rows):
            part = slice(start, start + rows)
            last = None  # freed before the next chunk is allocated
            last, excess = _log_softmax(hidden[part], weight, bias, scale[part], squeeze)
            logp[part] = last.gather(1, targets[part, None])[:, 0]
            entropy[part] = -(last.exp() * last).sum(-1)
        if not any(ctx.needs_input_grad):
            last = excess = None
        ctx.save_for_backward(hidden, weight, bias, targets, scale, entropy, last, excess)
        ctx.rows, ctx.squeeze = rows, squeeze
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_logp, grad_entropy = grads
        hidden, weight, bias, targets, scale, entropy, last, excess = ctx.saved_tensors
        n, wide = len(hidden), _wide(hidden.dtype)
        with_entropy = bool(grad_entropy.any())
        grad_hidden = torch.empty_like(hidden)
        grad_weight: Tensor | None = None
        grad_bias = None if bias is None else bias.new_zeros(bias.shape, dtype=wide)
        for start in reversed(range(0, n, ctx.rows)):
            part = slice(start, start + ctx.rows)
            scores = last
            if scores is None:
                scores, excess = _log_softmax(hidden[part], weight, bias, scale[part], ctx.squeeze)
            last = None
            slope = None
            if ctx.squeeze is not None:  # d tanh(x)/d x = 1 - tanh(x)², and the scaled logits are scale · tanh
                slope = (scores + excess).div_(scale[part, None]).square_().neg_().add_(1).mul_(ctx.squeeze)
            _pull(scores, targets[part], entropy[part], grad_logp[part], grad_entropy[part] if with_entropy else None)
            scores.mul_(scale[part, None])
            if slope is not None:
                scores.mul_(slope)
                slope = None
            if grad_bias is not None:
                grad_bias += scores.sum(0)
            narrow = scores.to(weight.dtype)
            torch.mm(narrow, weight, out=grad_hidden[part])
            product = narrow.T @ hidden[part]
            if grad_weight is None:
                grad_weight = product.to(wide) if n > ctx.rows else product
            else:
                grad_weight.add_(product)
        if grad_weight is None:
            grad_weight = torch.zeros_like(weight)
        return (
            grad_hidden,
            grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
        )


class _LogitOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, scale: Tensor, chunk_bytes: int) -> tuple[Tensor, Tensor]:
        n, wide = len(logits), _wide(logits.dtype)
        scale = scale.to(wide)
        logp, entropy = logits.new_empty(n, dtype=wide), logits.new_empty(n, dtype=wide)
        ctx.rows = max(1, chunk_bytes // (logits.shape[1] * 4))
        for start in range(0, n, ctx.rows):
            part = slice(start, start + ctx.rows)
            scores = (logits[part].to(wide) * scale[part, None]).log_softmax(-1)
            logp[part] = scores.gather(1, targets[part, None])[:, 0]
            entropy[part] = -(scores.exp() * scores).sum(-1)
        ctx.save_for_backward(logits, targets, scale, entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_logp, grad_entropy = grads
        logits, targets, scale, entropy = ctx.saved_tensors
        wide = _wide(logits.dtype)
        with_entropy = bool(grad_entropy.any())
        grad_logits = torch.empty_like(logits)
        for start in range(0, len(logits), ctx.rows):
            part = slice(start, start + ctx.rows)
            scores = (logits[part].to(wide) * scale[part, None]).log_softmax(-1)
            _pull(scores, targets[part], entropy[part], grad_logp[part], grad_entropy[part] if with_entropy else None)
            grad_logits[part] = scores.mul_(scale[part, None])
        return grad_logits, None, None, None
