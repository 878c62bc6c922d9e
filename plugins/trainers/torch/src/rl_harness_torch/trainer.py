"""Training in one process: gradients of any loss over samples, an optimizer step, checkpoints, weights out.

This is the whole backend but for the process it runs in: :mod:`rl_harness_torch.trainer_worker` serves it,
:mod:`rl_harness_torch.backend` calls it from the main process, tests use it directly.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from rl_harness.contracts import Loss, LossSpec, OptimizerSpec, StepResult, WeightManifest
from rl_harness.errors import BackendError, Unsupported
from rl_harness.learning import check_samples, load_loss
from rl_harness.records import Sample, TokenBatch

from rl_harness_torch import checkpoint
from rl_harness_torch.models import DType, load_model
from rl_harness_torch.optimizer import MasterOptimizer
from rl_harness_torch.packing import MicroBatch
from rl_harness_torch.scoring import Scorer
from rl_harness_torch.weight_folders import WeightFolders

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OUTPUTS = frozenset({"logp", "entropy", "ref_logp"})
Values = NDArray[np.float32]


class Trainer:
    """One trainable model and its optimizer.

    ``source`` is the folder the model was loaded from: it describes checkpoints and is the reference of
    ``ref_logp``, which is loaded a second time when first asked for. ``micro_batch_tokens`` is about how many
    tokens go through the model at once.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        spec: OptimizerSpec,
        *,
        source: Path,
        dtype: DType = "fp32",
        micro_batch_tokens: int = 1024,
        weight_folders: WeightFolders | None = None,
    ) -> None:
        self.version = 0
        self.model = model
        self.scorer = Scorer(model)
        self.optimizer = MasterOptimizer({name: p for name, p in model.named_parameters() if p.requires_grad}, spec)
        self._source = source
        self._dtype: DType = dtype
        self._budget = micro_batch_tokens
        self._folders = weight_folders or WeightFolders()
        self._reference: Scorer | None = None

    def forward(self, samples: Sequence[Sample], outputs: Sequence[str]) -> dict[str, list[Values]]:
        """Per-token outputs without gradient, one array a sample."""
        self._check(samples, frozenset(outputs))
        result: dict[str, list[Values]] = {}
        own = [name for name in outputs if name != "ref_logp"]
        if own:
            result |= self._score(self.scorer, samples, own, masked_only=False)
        if "ref_logp" in outputs:
            result["ref_logp"] = self._score(self._load_reference(), samples, ["logp"], masked_only=False)["logp"]
        return result

    def train_step(self, samples: Sequence[Sample], spec: LossSpec) -> StepResult:
        """One optimizer step. Raises ``BackendError``, ``Unsupported`` or ``ValueError`` with nothing changed."""
        clock = _Clock()
        loss = load_loss(spec)
        self._check(samples, loss.needs)
        samples = [sample for sample in samples if sample.mask.any()]
        total = float(sum((sample.weight * sample.mask).sum(dtype=np.float64) for sample in samples))
        if total <= 0:
            raise BackendError("the batch trains no token: every mask or weight is 0")
        reference: list[Values] = []
        if "ref_logp" in loss.needs:
            with clock.part("reference"):
                reference = self._score(self._load_reference(), samples, ["logp"], masked_only=True)["logp"]
        batches = self.scorer.plan(samples, self._budget, masked_only=True)
        tally = _Tally()
        with self.optimizer.gradients():
            whole = None
            if _splits_units(loss, batches):
                with clock.part("forward"):
                    whole = self._whole_gradients(loss, samples, reference, tally)
            for batch in batches:
                with clock.part("forward"):
                    outputs = self.scorer(batch)
                    arrays = {name: batch.spread(values) for name, values in outputs.items()}
                    _check_finite(arrays, batch)
                    if whole is None:
                        if reference:
                            arrays["ref_logp"] = np.concatenate([reference[m] for m in batch.members])
                        grads = tally.add(loss, arrays, batch.batch())
                    else:
                        grads = {n: np.concatenate([per[m] for m in batch.members]) for n, per in whole.items()}
                    tally.entropy(arrays["entropy"], batch.batch())
                with clock.part("backward"):
                    heads = [outputs[name] for name in grads]
                    torch.autograd.backward(
                        heads, [batch.gather(g, like=h) for g, h in zip(grads.values(), heads, strict=True)]
                    )
            rate = self.optimizer.learning_rate()
            with clock.part("optimizer"):
                norm = self.optimizer.step()
        self.version += 1
        metrics = {
            **tally.metrics(total),
            "grad_norm": norm,
            "learning_rate": rate,
            "tokens": float(sum(len(sample.prompt) + len(sample.completion) for sample in samples)),
            "tokens_trained": float(sum(int((sample.mask > 0).sum()) for sample in samples)),
            "tokens_computed": float(sum(batch.tokens_computed for batch in batches)),
            "micro_batches": float(len(batches)),
            **clock.metrics(),
        }
        return StepResult(version=self.version, metrics=metrics)

    def weights(self) -> tuple[Path, WeightManifest]:
        """A folder with the weights in the precision the model computes in; give it back to :meth:`release`."""
        return self._folders.write(self._named({}), self.version)

    def release(self, folder: Path) -> None:
        self._folders.release(folder)

    def save(self, path: Path, *, optimizer: bool) -> None:
        """Write a model folder that can be loaded anywhere, with what :meth:`load` needs if ``optimizer``."""
        manifest = checkpoint.Manifest(
            format=checkpoint.FORMAT,
            version=self.version,
            steps=self.optimizer.steps if optimizer else None,
            optimizer=self.optimizer.spec,
        )
        checkpoint.save(
            path,
            source=self._source,
            weights=self._saved_weights(),
            moments=self.optimizer.state() if optimizer else {},
            manifest=manifest,
        )

    @torch.no_grad()
    def load(self, path: Path) -> int:
        """Go on from a folder saved with ``optimizer``. Raises ``BackendError`` with nothing changed."""
        manifest = checkpoint.read_manifest(path)
        if manifest.steps is None:
            raise BackendError(f"{path} was saved without its optimizer, so training cannot go on exactly from there")
        weights = self._saved_weights()
        loaded = checkpoint.read_tensors(path / checkpoint.WEIGHTS, weights)
        moments: dict[str, torch.Tensor] = {}
        if manifest.steps:
            file = path / checkpoint.OPTIMIZER
            moments = checkpoint.read_tensors(file, self.optimizer.expected(checkpoint.names(file)))
        for name, tensor in weights.items():
            tensor.copy_(loaded[name])
        self.optimizer.publish()
        self.optimizer.restore(manifest.steps, moments)
        self.version = manifest.version
        return self.version

    def close(self) -> None:
        self._folders.close()

    def _saved_weights(self) -> dict[str, torch.Tensor]:
        return self._named(self.optimizer.masters)

    def _named(self, masters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the model consists of, by Hugging Face name: parameters (``masters`` in place of the narrow ones;
        frozen ones included, tied ones once) and what else it saves. Wide ones first, which aligns them in a file."""
        tensors = {name: masters.get(name, parameter) for name, parameter in self.model.named_parameters()}
        tied = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        tensors |= {name: buffer for name, buffer in self.model.state_dict().items() if name not in tied}
        wide_first = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
        return {name: tensor.detach() for name, tensor in wide_first}

    def _check(self, samples: Sequence[Sample], needs: frozenset[str]) -> None:
        if missing := sorted(needs - OUTPUTS):
            raise Unsupported(
                f"the torch backend has no output {', '.join(missing)}; it has {', '.join(sorted(OUTPUTS))}"
            )
        check_samples(samples, self.scorer.vocab_size)
        limit = self.scorer.max_positions
        for sample in samples:
            if limit is not None and len(sample.prompt) + len(sample.completion) > limit:
                raise ValueError(
                    f"turn {sample.turn} has {len(sample.prompt) + len(sample.completion)} tokens, "
                    f"the model has {limit} positions"
                )

    @torch.no_grad()
    def _score(
        self, scorer: Scorer, samples: Sequence[Sample], outputs: Sequence[str], *, masked_only: bool
    ) -> dict[str, list[Values]]:
        result: dict[str, list[Values]] = {name: [np.zeros(0, np.float32)] * len(samples) for name in outputs}
        for batch in scorer.plan(samples, self._budget, masked_only=masked_only):
            values = scorer(batch)
            arrays = {name: batch.spread(values[name]) for name in outputs}
            _check_finite(arrays, batch)
            for name, array in arrays.items():
                for member, part in zip(batch.members, _split(array, batch.samples), strict=True):
                    result[name][member] = part
        return result

    def _whole_gradients(
        self, loss: Loss, samples: Sequence[Sample], reference: list[Values], tally: _Tally
    ) -> dict[str, list[Values]]:
        """First of two passes: what the loss asks of every sample, when a unit of it spans micro-batches."""
        own = sorted(loss.needs - {"ref_logp"})
        scores = self._score(self.scorer, samples, own, masked_only=True)
        arrays = {name: np.concatenate(per) for name, per in scores.items()}
        if reference:
            arrays["ref_logp"] = np.concatenate(reference)
        grads = tally.add(loss, arrays, TokenBatch.of(samples))
        return {name: _split(grad, samples) for name, grad in grads.items()}

    def _load_reference(self) -> Scorer:
        if self._reference is None:
            model = load_model(self._source, self._dtype, str(self.scorer.device))
            self._reference = Scorer(model.requires_grad_(False))
        return self._reference


def _splits_units(loss: Loss, batches: Sequence[MicroBatch]) -> bool:
    if loss.unit != "episode":
        return False  # a token or a turn is always whole in a micro-batch
    places = Counter(episode for batch in batches for episode in {sample.episode for sample in batch.samples})
    return any(count > 1 for count in places.values())


def _split(values: Values, samples: Sequence[Sample]) -> list[Values]:
    return np.split(values, np.cumsum([len(sample.completion) for sample in samples])[:-1])


def _check_finite(arrays: Mapping[str, Values], batch: MicroBatch) -> None:
    for name, values in arrays.items():
        if not bool(np.isfinite(values).all()):
            at = np.flatnonzero(~np.isfinite(values))[0]
            turn = batch.samples[int(batch.batch().sample[at])].turn
            raise BackendError(f"the model's {name} for turn {turn} is {values[at]}; no step was made")


class _Tally:
    """Adds up what a loss says of the parts of a batch."""

    def __init__(self) -> None:
        self._value = 0.0
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._maxima: dict[str, float] = {}
        self._entropy = 0.0

    def add(self, loss: Loss, arrays: Mapping[str, Values], batch: TokenBatch) -> dict[str, Values]:
        """Evaluate the loss and return its gradients, checked."""
        result = loss({name: arrays[name] for name in loss.needs}, batch)
        grads = dict(result.grads)
        if odd := sorted(set(grads) - (loss.needs - {"ref_logp"})):
            raise Unsupported(f"{type(loss).__name__} differentiates {', '.join(odd)}, which it does not declare")
        finite = np.isfinite(result.value) and all(np.isfinite(grad).all() for grad in grads.values())
        if not grads or not finite:
            raise BackendError(
                f"the loss is {result.value} or its gradient is not finite; no step was made",
                remedy="look at the sampler-trainer log-prob gap of the last steps: training may have diverged",
            )
        self._value += result.value
        for name, value in result.sums.items():
            self._sums[name] += value
        for name, value in result.maxima.items():
            self._maxima[name] = max(value, self._maxima.get(name, -np.inf))
        return grads

    def entropy(self, values: Values, batch: TokenBatch) -> None:
        self._entropy += float((batch.weight * batch.mask) @ values)

    def metrics(self, total: float) -> dict[str, float]:
        means = {name: value / total for name, value in self._sums.items()}
        return {"loss": self._value, **means, **self._maxima, "entropy": self._entropy / total}


class _Clock:
    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._parts: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._parts[name] = self._parts.get(name, 0.0) + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        parts = {f"seconds_{name}": value for name, value in self._parts.items()}
        return {"seconds": time.perf_counter() - self._start, **parts}
