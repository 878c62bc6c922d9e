"""Log-probs and entropies of chosen tokens from hidden states, without a tensor of tokens by vocabulary.

The vocabulary projection is computed in chunks of rows that fit a fixed number of bytes, and again in the backward
pass, except for the last chunk, which is still there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: Bytes of fp32 logits that exist at once.
CHUNK_BYTES = 64 << 20


def token_outputs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scale: Tensor, chunk_bytes: int = CHUNK_BYTES
) -> tuple[Tensor, Tensor]:
    """``log softmax(scale · (hidden weightᵀ + bias))[target]`` and the entropy of that softmax, in nats.

    ``hidden`` [n, d], ``weight`` [vocabulary, d], ``targets`` int64 [n], ``scale`` [n] (1/temperature). Both results
    are [n] in fp32 (fp64 for fp64 input) and differentiable with respect to hidden, weight and bias.
    """
    logp, entropy = _TokenOutputs.apply(hidden, weight, bias, targets, scale, chunk_bytes)  # type: ignore[no-untyped-call]
    return logp, entropy


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _log_softmax(hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias).to(_wide(hidden.dtype))
    logits.mul_(scale[:, None])
    return logits.sub_(logits.logsumexp(-1, keepdim=True))


class _TokenOutputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scale: Tensor, chunk_bytes: int
    ) -> tuple[Tensor, Tensor]:
        n, wide = len(hidden), _wide(hidden.dtype)
        rows = max(1, chunk_bytes // (weight.shape[0] * 4))
        scale = scale.to(wide)
        logp, entropy = hidden.new_empty(n, dtype=wide), hidden.new_empty(n, dtype=wide)
        last = None
        for start in range(0, n, rows):
            part = slice(start, start + rows)
            last = None  # freed before the next chunk is allocated
            last = _log_softmax(hidden[part], weight, bias, scale[part])
            logp[part] = last.gather(1, targets[part, None])[:, 0]
            entropy[part] = -(last.exp() * last).sum(-1)
        keep = any(ctx.needs_input_grad)
        ctx.save_for_backward(hidden, weight, bias, targets, scale, entropy, last if keep else None)
        ctx.rows = rows
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_logp, grad_entropy = grads
        hidden, weight, bias, targets, scale, entropy, last = ctx.saved_tensors
        n, wide = len(hidden), _wide(hidden.dtype)
        with_entropy = bool(grad_entropy.any())
        grad_hidden = torch.empty_like(hidden)
        grad_weight: Tensor | None = None
        grad_bias = None if bias is None else bias.new_zeros(bias.shape, dtype=wide)
        for start in reversed(range(0, n, ctx.rows)):
            part = slice(start, start + ctx.rows)
            scores = last if last is not None else _log_softmax(hidden[part], weight, bias, scale[part])
            last = None
            # d logp/d z = onehot - p and d entropy/d z = -p (log p + entropy), z the scaled logits
            if with_entropy:
                probs = scores.exp()
                scores.add_(entropy[part, None]).mul_(-grad_entropy[part, None]).sub_(grad_logp[part, None]).mul_(probs)
            else:
                scores.exp_().mul_(-grad_logp[part, None])
            scores.scatter_add_(1, targets[part, None], grad_logp[part, None])
            scores.mul_(scale[part, None])
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
        )
