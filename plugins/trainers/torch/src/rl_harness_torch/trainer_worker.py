"""The process that trains: a :class:`~rl_harness_torch.trainer.Trainer` behind :func:`rl_harness_torch.rpc.serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
from rl_harness.contracts import LossSpec, OptimizerSpec, StepResult, WeightManifest
from rl_harness.errors import BackendError
from rl_harness.records import Sample
from rl_harness.records.arrays import LogpArray

from rl_harness_torch.rpc import serve


class Settings(NamedTuple):
    """The backend's options, as the worker needs them."""

    dtype: Literal["auto", "fp32", "bf16"]
    device: str
    threads: int | None
    micro_batch_tokens: int


class Started(msgspec.Struct, frozen=True):
    """What the loaded model can do: how it is trained, and why no faster way will do (None for the fastest)."""

    tree_packing: bool
    way: str
    reason: str | None
    threads: int


class WeightsReady(NamedTuple):
    path: str
    manifest: WeightManifest


class TrainerService:
    """A trainer whose model is loaded by the first call. Every public method is a remote call."""

    def start(self, folder: str, optimizer: OptimizerSpec, seed: int, settings: Settings) -> Started:
        import torch

        from rl_harness_torch import devices
        from rl_harness_torch.models import load_model
        from rl_harness_torch.threads import settle
        from rl_harness_torch.trainer import Trainer

        threads = settle(check=settings.threads is None)
        torch.manual_seed(seed)
        device = devices.pick(settings.device, "backend.device")
        dtype = devices.precision(settings.dtype, device)
        source = Path(folder)
        self._trainer = Trainer(
            load_model(source, dtype, device),
            optimizer,
            source=source,
            dtype=dtype,
            micro_batch_tokens=settings.micro_batch_tokens,
        )
        scorer = self._trainer.scorer
        return Started(tree_packing=scorer.tree_packing, way=str(scorer.way), reason=scorer.reason, threads=threads)

    def forward(self, samples: list[Sample], outputs: list[str]) -> dict[str, list[LogpArray]]:
        return self._trainer.forward(samples, outputs)

    def train_step(self, samples: list[Sample], loss: LossSpec) -> StepResult:
        try:
            return self._trainer.train_step(samples, loss)
        except (ValueError, RuntimeError, MemoryError) as error:
            raise BackendError(f"the training step was refused: {error}") from error

    def weights(self) -> WeightsReady:
        path, manifest = self._trainer.weights()
        return WeightsReady(str(path), manifest)

    def release(self, path: str) -> None:
        self._trainer.release(Path(path))

    def save(self, path: str, optimizer: bool) -> None:
        self._trainer.save(Path(path), optimizer=optimizer)

    def load(self, path: str) -> int:
        return self._trainer.load(Path(path))


def main() -> None:
    serve(TrainerService())


if __name__ == "__main__":
    main()
