"""Drawing the next token of every row of a batch, with the log-probability of exactly the distribution drawn from.

Each request brings its own random numbers, one per token, so what it draws does not depend on its neighbours.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from rl_harness.records.turn import SamplingParams

_NUCLEUS = 256  # candidates looked at first for top-p; most nuclei are smaller, and sorting a vocabulary is slow


class Draw(NamedTuple):
    """``logp`` is None when the row's logits were not finite. ``top`` holds the most likely ids, as asked for."""

    id: int
    logp: float | None
    top: dict[int, float]


class Uniforms:
    """The random numbers of one request, in [0, 1): number n belongs to completion token n.

    Philox is counter-based and the same on every platform, so a seed means the same everywhere.
    """

    def __init__(self, seed: int | None) -> None:
        self._bits = np.random.Philox(key=None if seed is None else np.uint64(seed % 2**64))
        self._generator = np.random.Generator(self._bits)

    def next(self) -> float:
        return float(self._generator.random())


def sample(logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> list[Draw]:
    """One token per row of fp32 ``logits`` ``[rows, vocab]``.

    Temperature, then top-k, then top-p, then min-p shape the distribution; ``logp`` is of the result. At temperature 0
    the most likely token is taken and ``logp`` is that of the model's own distribution (temperature 1, nothing cut).
    """
    logps = _distribution(logits, params)
    greedy = torch.tensor([p.temperature == 0 for p in params], device=logits.device)
    chosen = logps.argmax(-1) if bool(greedy.all()) else _invert(logps, uniforms)
    if bool(greedy.any()) and not bool(greedy.all()):
        chosen = torch.where(greedy, logps.argmax(-1), chosen)
    values = logps.gather(1, chosen[:, None])[:, 0]
    tops = _top(logps, params)
    return [
        Draw(token, value if np.isfinite(value) else None, top)
        for token, value, top in zip(chosen.tolist(), values.tolist(), tops, strict=True)
    ]


def _distribution(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Log-probabilities ``[rows, vocab]`` after temperature and truncation; what is cut off is -inf."""
    temperatures = [p.temperature or 1.0 for p in params]
    if any(t != 1.0 for t in temperatures):
        logits = logits / torch.tensor(temperatures, device=logits.device)[:, None]
    logps = torch.log_softmax(logits, -1)
    cut = [i for i, p in enumerate(params) if p.temperature and (p.top_k or p.top_p < 1 or p.min_p)]
    if cut:
        rows = logps if len(cut) == len(params) else logps[cut]
        floor = torch.full((len(cut),), -torch.inf, device=logits.device)
        for which, threshold in (
            (_where(params, cut, "top_k"), _top_k),
            (_where(params, cut, "top_p"), _top_p),
            (_where(params, cut, "min_p"), _min_p),
        ):
            if which:
                # Each cut works on what the one before left, renormalised.
                left = _renormalise(rows[which], floor[which])
                found = threshold(left, [params[cut[i]] for i in which])
                kept = torch.where(left >= found[:, None], rows[which], torch.inf).amin(-1)
                floor[which] = torch.maximum(floor[which], kept)
        logps = logps.clone() if rows is logps else logps
        logps[cut] = _renormalise(rows, floor)
    return logps


def _where(params: Sequence[SamplingParams], rows: Iterable[int], name: str) -> list[int]:
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}[name]
    return [i for i, row in enumerate(rows) if getattr(params[row], name) != off]


def _renormalise(logps: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    kept = logps.masked_fill(logps < floor[:, None], -torch.inf)
    return kept - kept.logsumexp(-1, keepdim=True)


def _top_k(logps: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """The log-prob of the k-th most likely token of each row."""
    sizes = [min(p.top_k, logps.shape[1]) for p in params]
    best = logps.topk(max(sizes), -1).values
    return best.gather(1, torch.tensor(sizes, device=logps.device)[:, None] - 1)[:, 0]


def _top_p(logps: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """The log-prob of the last token of each row's nucleus: the fewest tokens whose probabilities reach top_p."""
    wanted = torch.tensor([p.top_p for p in params], device=logps.device)
    last = torch.empty_like(wanted)
    rows = torch.arange(len(params), device=logps.device)
    size = min(_NUCLEUS, logps.shape[1])
    while len(rows):
        best = logps[rows].topk(size, -1).values
        before = best.exp().cumsum(-1) - best.exp()  # probability of the more likely tokens
        inside = before < wanted[rows, None]
        last[rows] = best.masked_fill(~inside, torch.inf).amin(-1)
        rows = rows[inside[:, -1]] if size < logps.shape[1] else rows[:0]
        size = min(size * 16, logps.shape[1])
    return last


def _min_p(logps: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """The log-prob that is min_p times as likely as the most likely token of each row."""
    return logps.amax(-1) + torch.tensor([p.min_p for p in params], device=logps.device).log()


def _invert(logps: torch.Tensor, uniforms: Sequence[float]) -> torch.Tensor:
    """The token at which each row's cumulative probability passes its uniform number; never one that was cut off."""
    cumulative = logps.exp().cumsum(-1)
    total = cumulative[:, -1:]
    point = torch.tensor(uniforms, device=logps.device, dtype=cumulative.dtype)[:, None] * total
    # Rounding can lift the product to the total itself, past every token.
    point = torch.minimum(point, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, point, right=True)[:, 0].clamp_(max=logps.shape[1] - 1)


def _top(logps: torch.Tensor, params: Sequence[SamplingParams]) -> list[dict[int, float]]:
    most = max(p.top_logprobs for p in params)
    if not most:
        return [{} for _ in params]
    values, ids = logps.topk(min(most, logps.shape[1]), -1)
    rows = zip(params, ids.tolist(), values.tolist(), strict=True)
    return [
        {i: v for i, v in itertools.islice(zip(row, row_values, strict=True), p.top_logprobs) if v > -np.inf}
        for p, row, row_values in rows
    ]
