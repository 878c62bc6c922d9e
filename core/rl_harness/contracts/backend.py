"""Backend plugins: turn a batch of samples into a weight update. Data crosses as numpy arrays."""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from rl_harness.contracts.common import Plugin
from rl_harness.records.arrays import LogpArray
from rl_harness.records.sample import Sample


class TensorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A parameter by its Hugging Face name."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class WeightManifest(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    kind: Literal["full", "adapter"]
    tensors: tuple[TensorInfo, ...]
    digest: str


class WeightSource(abc.ABC):
    """Weights on their way from a backend to engines.

    ``transport`` was negotiated before the run. With ``file``, ``path`` is a folder of safetensors files (on a
    memory file system where there is one) that stays valid until :meth:`release`.
    """

    manifest: WeightManifest
    transport: str
    path: Path | None = None

    @abc.abstractmethod
    def buckets(self) -> AsyncIterator[tuple[TensorInfo, memoryview]]:
        """Every tensor's raw little-endian bytes, in manifest order (transport ``stream``)."""

    async def release(self) -> None:
        """No engine reads it any more."""


class OptimizerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """AdamW (Loshchilov & Hutter 2019) with linear warm-up over ``warmup_steps`` and gradient-norm clipping."""

    learning_rate: float = 5e-5
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 0
    max_grad_norm: float = 1.0


class LossSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A loss by address, so that trainer processes can import it: ``target`` is ``module:attr`` of a
    :class:`~rl_harness.contracts.algorithm.Loss` class, ``options`` its keyword arguments."""

    target: str
    options: Mapping[str, Any] = {}


class BackendCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """``outputs``: per-token outputs it can compute, of ``logp``, ``entropy``, ``ref_logp``, ``value``."""

    outputs: frozenset[str]
    weight_transports: tuple[str, ...]
    lora: bool = False
    tree_packing: bool = False
    parallel: tuple[str, ...] = ()


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """``metrics``: ``loss``, ``grad_norm``, ``learning_rate``, whatever the loss reports, ``tokens`` (logical),
    ``tokens_computed`` (after prefix sharing), ``seconds``."""

    version: int
    metrics: Mapping[str, float]


class Backend(Plugin):
    """One trainable policy and its optimizer. Version 0 is the model as loaded; each train step adds 1."""

    @property
    @abc.abstractmethod
    def capabilities(self) -> BackendCapabilities: ...

    @abc.abstractmethod
    async def start(self, model: str, optimizer: OptimizerSpec, *, seed: int) -> None: ...

    @abc.abstractmethod
    async def forward(self, samples: Sequence[Sample], outputs: Sequence[str]) -> dict[str, list[LogpArray]]:
        """Per-token ``outputs`` without gradient: one array per sample, an entry per completion token.

        Log-probs are of the model's full softmax at the sample's temperature. ``ref_logp`` is the model as
        loaded at version 0.
        """

    @abc.abstractmethod
    async def train_step(self, samples: Sequence[Sample], loss: LossSpec) -> StepResult:
        """One optimizer step on d loss/d outputs. Raises ``Unsupported`` if the loss needs an output this
        backend lacks; never ignores an option. A non-finite loss or gradient raises and changes nothing."""

    @abc.abstractmethod
    async def weights(self, transport: str) -> WeightSource: ...

    @abc.abstractmethod
    async def save(self, path: Path, *, optimizer: bool) -> None:
        """Write a Hugging Face folder that ``--model`` takes (``model.safetensors``, config, tokenizer), and
        with ``optimizer`` what :meth:`load` needs to go on exactly. ``path`` appears only when complete."""

    @abc.abstractmethod
    async def load(self, path: Path) -> int:
        """Continue from a folder saved with ``optimizer``; returns its version."""

    @abc.abstractmethod
    def version(self) -> int: ...

    @abc.abstractmethod
    async def close(self) -> None: ...
