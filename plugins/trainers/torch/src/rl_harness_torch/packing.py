"""Samples into micro-batches a transformers model can take: the prefix trie as one row with an ancestor mask, or,
for models that cannot do that, padded rows or one sequence at a time.

Either way a micro-batch says which positions predict which tokens ("edges"), each distinct prediction once, and how
edge values map back onto every sample's own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from rl_harness.learning.trie import Packed, pack
from rl_harness.records import Sample, TokenBatch
from torch import Tensor

Layout = Literal["tree", "rows", "alone"]


@dataclass(frozen=True)
class MicroBatch:
    """``input_ids`` and ``positions`` are [rows, length]; ``mask`` is a 2-D padding mask, a 4-D additive attention
    mask, or None where plain causal attention is right.

    Edge e predicts ``targets[e]`` from flat position ``source[e]`` with logits times ``scale[e]``. ``samples`` are
    the ones in here, ``members`` their indices in the batch; token i of their concatenated completions has the value
    of edge ``edge[i]``, or none where that is -1.
    """

    input_ids: Tensor
    positions: Tensor
    mask: Tensor | None
    source: Tensor
    targets: Tensor
    scale: Tensor
    samples: tuple[Sample, ...]
    members: tuple[int, ...]
    edge: NDArray[np.int64]

    @property
    def tokens_computed(self) -> int:
        return self.input_ids.numel()

    def batch(self) -> TokenBatch:
        return TokenBatch.of(self.samples)

    def spread(self, values: Tensor) -> NDArray[np.float32]:
        """Edge values as one value a completion token of the samples in here; 0 where there is no edge."""
        array: NDArray[Any] = values.detach().cpu().numpy()
        out = np.zeros(len(self.edge), dtype=array.dtype)
        wanted = self.edge >= 0
        out[wanted] = array[self.edge[wanted]]
        return out

    def gather(self, grads: NDArray[np.float32], like: Tensor) -> Tensor:
        """Transpose of :meth:`spread`: each token's gradient added onto its edge."""
        wanted = self.edge >= 0
        summed = np.bincount(self.edge[wanted], weights=grads[wanted], minlength=len(self.targets))
        return torch.from_numpy(summed).to(dtype=like.dtype, device=like.device)


def plan(
    samples: Sequence[Sample],
    budget: int,
    *,
    layout: Layout,
    masked_only: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> list[MicroBatch]:
    """Micro-batches of about ``budget`` computed tokens (one sequence each if ``alone``) that hold every sample once.

    With ``masked_only`` just the tokens whose ``mask`` is set get edges, and nothing after a sample's last one is
    computed; otherwise every completion token does.
    """
    wanted = [_wanted(sample, masked_only) for sample in samples]
    inputs = [
        np.concatenate([sample.prompt, sample.completion])[: len(sample.prompt) + _last(want)]
        for sample, want in zip(samples, wanted, strict=True)
    ]
    if layout == "tree":
        return _trees(samples, inputs, wanted, budget, dtype, device)
    return _rows(samples, inputs, wanted, budget if layout == "rows" else 1, device)


def _wanted(sample: Sample, masked_only: bool) -> NDArray[np.bool_]:
    return sample.mask > 0 if masked_only else np.ones(len(sample.completion), dtype=np.bool_)


def _last(wanted: NDArray[np.bool_]) -> int:
    """How many completion tokens are inputs: those before the last one that is predicted."""
    set_ = np.flatnonzero(wanted)
    return int(set_[-1]) if len(set_) else 0


def _trees(
    samples: Sequence[Sample],
    inputs: list[NDArray[np.int32]],
    wanted: list[NDArray[np.bool_]],
    budget: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[MicroBatch]:
    batches = []
    for packed in pack(inputs, budget):
        sources = [path[len(samples[m].prompt) - 1 :] for m, path in zip(packed.members, packed.paths, strict=True)]
        batches.append(
            _micro_batch(
                torch.from_numpy(packed.tokens.astype(np.int64))[None],
                torch.from_numpy(packed.depth.astype(np.int64))[None],
                _ancestor_mask(packed, dtype),
                sources,
                samples,
                wanted,
                packed.members,
                device,
            )
        )
    return batches


def _ancestor_mask(packed: Packed, dtype: torch.dtype) -> Tensor | None:
    if len(packed.members) == 1:
        return None
    visible = torch.from_numpy(packed.visible())
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)[None, None]


def _rows(
    samples: Sequence[Sample],
    inputs: list[NDArray[np.int32]],
    wanted: list[NDArray[np.bool_]],
    budget: int,
    device: torch.device,
) -> list[MicroBatch]:
    batches = []
    order = sorted(range(len(samples)), key=lambda i: len(inputs[i]), reverse=True)
    while order:
        width = len(inputs[order[0]])
        members, order = order[: max(1, budget // width)], order[max(1, budget // width) :]
        ids = np.zeros((len(members), width), dtype=np.int64)
        mask = np.zeros((len(members), width), dtype=np.int64)
        sources = []
        for row, member in enumerate(members):
            n = len(inputs[member])
            ids[row, :n] = inputs[member]
            mask[row, :n] = 1
            sources.append(np.arange(row * width + len(samples[member].prompt) - 1, row * width + n))
        batches.append(
            _micro_batch(
                torch.from_numpy(ids),
                torch.arange(width).expand(len(members), width),
                torch.from_numpy(mask) if len(members) > 1 else None,
                sources,
                samples,
                wanted,
                tuple(members),
                device,
            )
        )
    return batches


def _micro_batch(
    input_ids: Tensor,
    positions: Tensor,
    mask: Tensor | None,
    sources: list[NDArray[np.int64]],
    samples: Sequence[Sample],
    wanted: list[NDArray[np.bool_]],
    members: tuple[int, ...],
    device: torch.device,
) -> MicroBatch:
    """``sources[i][j]`` is the flat position that predicts completion token j of ``members[i]``."""
    here = tuple(samples[m] for m in members)
    want = np.concatenate([wanted[m] for m in members])
    keys = np.empty((int(want.sum()), 3), dtype=np.int64)
    keys[:, 0] = np.concatenate([s[wanted[m][: len(s)]] for m, s in zip(members, sources, strict=True)])
    keys[:, 1] = np.concatenate([s.completion for s in here])[want]
    temperatures = np.concatenate([np.full(len(s.completion), s.temperature) for s in here])[want]
    keys[:, 2] = temperatures.view(np.int64)
    distinct, inverse = np.unique(keys, axis=0, return_inverse=True)
    edge = np.full(len(want), -1, dtype=np.int64)
    edge[want] = inverse.reshape(-1)
    columns = np.ascontiguousarray(distinct.T)
    return MicroBatch(
        input_ids=input_ids.to(device),
        positions=positions.to(device),
        mask=None if mask is None else mask.to(device),
        source=torch.from_numpy(columns[0]).to(device),
        targets=torch.from_numpy(columns[1]).to(device),
        scale=torch.from_numpy(1.0 / columns[2].view(np.float64)).to(device),
        samples=here,
        members=members,
        edge=edge,
    )
