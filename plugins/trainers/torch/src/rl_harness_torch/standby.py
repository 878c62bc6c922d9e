"""New weights for a serving model: received beside the serving ones, checked, then copied in between two tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rl_harness.contracts.backend import WeightManifest
from rl_harness.errors import EngineError, Unsupported
from safetensors import SafetensorError
from safetensors.torch import load_file

from rl_harness_torch.models import weight_files
from rl_harness_torch.tensors import DTYPES

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def dtype_of(name: str) -> torch.dtype | None:
    """A manifest's dtype, in torch's spelling (``float32``) or safetensors' (``F32``)."""
    found = DTYPES.get(name.upper()) or getattr(torch, name.removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else None


class Standby:
    """Weights mapped from files, waiting for :meth:`install`. The files may be deleted meanwhile, not rewritten."""

    def __init__(self, model: PreTrainedModel, folder: Path, manifest: WeightManifest) -> None:
        """Raises ``EngineError`` when the files are not what the manifest says or the model has."""
        if manifest.kind != "full":
            raise Unsupported(f"the embedded engine takes full weights, not {manifest.kind} weights")
        self._tensors = _mapped(folder)
        self._parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        # Buffers are taken if they are given; what is trained is parameters.
        self._targets: dict[str, torch.Tensor] = model.state_dict(keep_vars=False)
        self._check_manifest(folder, manifest)
        self._check_model(folder)

    @torch.no_grad()
    def install(self) -> None:
        """Copy everything into the model."""
        for name, tensor in self._tensors.items():
            self._targets[name].copy_(tensor)

    def _check_manifest(self, folder: Path, manifest: WeightManifest) -> None:
        told = {info.name: info for info in manifest.tensors}
        if different := sorted(told.keys() ^ self._tensors.keys()):
            raise EngineError(
                f"weights version {manifest.version} in {folder}: {different[0]} is in only one of manifest and files "
                f"({len(different)} such tensors)"
            )
        for name, tensor in self._tensors.items():
            info = told[name]
            if tuple(tensor.shape) != tuple(info.shape) or tensor.dtype != dtype_of(info.dtype):
                raise EngineError(
                    f"weights version {manifest.version} in {folder}: {name} is {tensor.dtype} {tuple(tensor.shape)}, "
                    f"the manifest says {info.dtype} {tuple(info.shape)}"
                )

    def _check_model(self, folder: Path) -> None:
        for name, tensor in self._tensors.items():
            target = self._targets.get(name)
            if target is None:
                raise EngineError(f"weights in {folder}: the served model has no parameter {name}")
            if target.shape != tensor.shape:
                raise EngineError(
                    f"weights in {folder}: {name} is {tuple(tensor.shape)}, the served model's {tuple(target.shape)}"
                )
        given = {self._targets[name].data_ptr() for name in self._tensors}  # tied parameters are given once
        absent = sorted(name for name, target in self._parameters.items() if target.data_ptr() not in given)
        if absent:
            raise EngineError(f"weights in {folder}: {absent[0]} is missing ({len(absent)} such parameters)")


def _mapped(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in weight_files(folder):
        try:
            tensors |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise EngineError(f"new weights cannot be read from {file}: {error}") from error
    return tensors
