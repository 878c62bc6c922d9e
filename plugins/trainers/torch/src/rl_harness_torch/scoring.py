"""A causal language model as a function from micro-batches to per-edge log-probs and entropies, with and without
gradient; the fastest way that gives what the model itself gives, found by trying the loaded model.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from rl_harness.errors import Unsupported
from rl_harness.records import Sample, ids, logps
from torch import Tensor, nn

from rl_harness_torch.faithful import check_precision, first_line, lengths
from rl_harness_torch.head import logit_outputs, token_outputs
from rl_harness_torch.models import context_length
from rl_harness_torch.packing import Layout, MicroBatch, plan
from rl_harness_torch.transforms import IDENTITY, depends_on, recognise

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Logps = NDArray[np.floating[Any]]

_log = logging.getLogger(__name__)

#: How many tokens the first two probes share.
_PREFIX = 8


class Way(NamedTuple):
    """How a model is trained: how samples are laid out, and whether it computes its logits itself (``own_logits``) or
    its output head is taken chunk by chunk."""

    layout: Layout
    own_logits: bool = False

    def __str__(self) -> str:
        layout = {"tree": "a prefix trie as one row", "rows": "padded rows", "alone": "one sequence at a time"}
        return layout[self.layout] + (" with its own logits" if self.own_logits else "")


class Scorer:
    """``way`` is the fastest way that gives the model's own log-probs, ``reason`` why those before it do
    not (None if there are none)."""

    def __init__(self, model: PreTrainedModel) -> None:
        untyped: Any = model
        self.model = untyped
        self.config: Any = model.config.get_text_config()
        self.backbone: Any = _backbone(untyped)
        head = untyped.get_output_embeddings()
        self.head: Any = head
        weight = head.weight if isinstance(head, nn.Linear) else untyped.get_input_embeddings().weight
        self.dtype: torch.dtype = weight.dtype
        self.device: torch.device = weight.device
        self.vocab_size = int(weight.shape[0])
        self._keeps_some_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._transform = IDENTITY
        self.way, self.reason = self._choose()

    @property
    def tree_packing(self) -> bool:
        return self.way.layout == "tree"

    @property
    def max_positions(self) -> int | None:
        return context_length(self.model)

    def plan(self, samples: Sequence[Sample], budget: int, *, masked_only: bool) -> list[MicroBatch]:
        return plan(
            samples, budget, layout=self.way.layout, masked_only=masked_only, dtype=self.dtype, device=self.device
        )

    def __call__(self, batch: MicroBatch) -> dict[str, Tensor]:
        """``logp`` and ``entropy``, one value an edge."""
        if self.way.own_logits:
            logp, entropy = logit_outputs(self._own_logits(batch), batch.targets, batch.scale)
        else:
            more = {"position_ids": batch.positions} if self.way.layout == "tree" else {}
            hidden = self.backbone(input_ids=batch.input_ids, attention_mask=batch.mask, use_cache=False, **more)[0]
            rows = hidden.reshape(-1, hidden.shape[-1]).index_select(0, batch.source).to(self.dtype)
            logp, entropy = token_outputs(
                rows, self.head.weight, self.head.bias, batch.targets, batch.scale, self._transform
            )
        return {"logp": logp, "entropy": entropy}

    def _own_logits(self, batch: MicroBatch) -> Tensor:
        """The rows of a micro-batch of one sequence that predict something; no others exist where the model can."""
        if self._keeps_some_logits:
            kept: Tensor = self.model(input_ids=batch.input_ids, logits_to_keep=batch.source, use_cache=False).logits
            return kept[0]
        logits: Tensor = self.model(input_ids=batch.input_ids, use_cache=False).logits
        return logits[0].index_select(0, batch.source)

    @torch.no_grad()
    def _choose(self) -> tuple[Way, str | None]:
        """Compare with the model's own logits, one sequence at a time; go from way to way until there is no difference.

        Some architectures ignore a 4-D mask, some post-process their logits, some carry a state; only trying it tells.
        """
        check_precision(self.model, "backend.dtype")
        samples = _probes(self.vocab_size)
        try:
            each = [self._plain(sample) for sample in samples]
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a model may fail in any manner
            raise Unsupported(
                f"{type(self.model).__name__} cannot compute a few tokens "
                f"({type(error).__name__}: {first_line(error)})",
                remedy="choose another model",
            ) from error
        plain = np.concatenate(each)
        same = _PREFIX - len(samples[0].prompt)
        if not self._near(each[0][:same], each[1][:same]):
            raise Unsupported(f"{type(self.model).__name__} is not causal: its log-probs depend on tokens that follow")
        obstacles: list[str] = []
        for way, known in self._ways():
            self.way = way
            obstacle = known or self._difference(samples, plain)
            if obstacle is None:
                reason = "; ".join(dict.fromkeys(obstacles)) or None
                if reason:
                    _log.warning("%s is trained on %s: %s", type(self.model).__name__, way, reason)
                return way, reason
            obstacles.append(obstacle)
        raise Unsupported(
            f"{type(self.model).__name__} does not give the same log-probs twice, so this backend would train it on "
            f"wrong ones ({obstacles[-1]})"
        )

    def _ways(self) -> Iterator[tuple[Way, str | None]]:
        """Every way to try, fastest first, with what is known to stand in its way."""
        obstacle = self._look_at_head()
        yield Way("tree"), obstacle or self._why_no_tree()
        yield Way("rows"), obstacle
        yield Way("alone"), obstacle
        yield Way("alone", own_logits=True), None
        if self._keeps_some_logits:
            self._keeps_some_logits = False
            yield Way("alone", own_logits=True), None

    def _look_at_head(self) -> str | None:
        if self.backbone is None or not isinstance(self.head, nn.Linear):
            return "it has no output head that is one matrix after the rest of the model"
        known = {id(parameter) for part in (self.backbone, self.head) for parameter in part.parameters()}
        others = [parameter for parameter in self.model.parameters() if id(parameter) not in known]
        try:
            if depends_on(self.model, others):
                return "it has parameters besides those of its output head and of the rest of the model"
            transform = recognise(self.model, self.head)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            return f"its output head cannot be looked at ({type(error).__name__}: {first_line(error)})"
        if transform is None:
            return "what it does to its logits after the output head is neither a factor nor a soft cap"
        self._transform = transform
        return None

    def _why_no_tree(self) -> str | None:
        found = lengths(self.config)
        kinds = set(getattr(self.config, "layer_types", None) or ["full_attention"])
        if found or kinds != {"full_attention"}:
            sizes = "".join(f", {name} {size}" for name, size in found.items())
            return f"its attention is not full everywhere ({', '.join(sorted(kinds))}{sizes})"
        if "position_ids" not in inspect.signature(self.backbone.forward).parameters:
            return "it does not let positions be given"
        return None

    def _difference(self, samples: Sequence[Sample], expected: Logps) -> str | None:
        """What is wrong with the present way, if anything."""
        found: dict[int, Logps] = {}
        try:
            for batch in self.plan(samples, 10_000, masked_only=False):
                values = batch.spread(self(batch)["logp"])
                lengths = [len(sample.completion) for sample in batch.samples]
                found |= dict(zip(batch.members, np.split(values, np.cumsum(lengths)[:-1]), strict=True))
        except Exception as error:  # a model may fail in any manner on what it was not made for
            return f"it fails on {self.way} ({type(error).__name__}: {first_line(error)}, found by trying)"
        if self._near(np.concatenate([found[i] for i in range(len(samples))]), expected):
            return None
        what = "does not honour a 4-D attention mask" if self.way.layout == "tree" else f"is wrong on {self.way}"
        return f"it {what} (found by trying)"

    def _near(self, found: Logps, expected: Logps) -> bool:
        # Relative mean error: bf16 alone gives 0.006 on a 135M model, a mask that is ignored 0.05 and more.
        tolerance = 1e-4 if self.dtype in (torch.float32, torch.float64) else 0.02
        return bool(np.abs(found - expected).mean() < tolerance * np.abs(expected).mean())

    def _plain(self, sample: Sample) -> Logps:
        sequence = torch.from_numpy(np.concatenate([sample.prompt, sample.completion]).astype(np.int64))
        sequence = sequence.to(self.device)
        logits: Tensor = self.model(input_ids=sequence[None], use_cache=False).logits[0]
        scores = (logits.double() / sample.temperature).log_softmax(-1)
        at = torch.arange(len(sample.prompt) - 1, len(sequence) - 1, device=self.device)
        return np.asarray(scores[at, sequence[at + 1]].cpu().numpy())


def _backbone(model: Any) -> Any:
    """The model below the output head, or None."""
    if model.base_model is not model:
        return model.base_model
    inner = [child for child in model.children() if hasattr(child, "get_input_embeddings")]
    return inner[0] if len(inner) == 1 else None


def _probes(vocab_size: int) -> list[Sample]:
    """Three sequences of different lengths that share prefixes of different lengths."""
    rng = np.random.default_rng(0)
    draw = rng.integers(0, vocab_size, size=24)
    sequences = [draw[:12], np.concatenate([draw[:_PREFIX], draw[12:14]]), np.concatenate([draw[:4], draw[16:19]])]
    return [
        Sample(
            turn=f"probe {i}",
            episode=f"probe {i}",
            group="probe",
            policy="probe",
            temperature=0.7,
            prompt=ids(sequence[:3]),
            completion=ids(sequence[3:]),
            **dict.fromkeys(("mask", "behaviour_logps", "advantage", "weight"), logps(np.ones(len(sequence) - 3))),
            versions=ids(np.zeros(len(sequence) - 3)),
        )
        for i, sequence in enumerate(sequences)
    ]
