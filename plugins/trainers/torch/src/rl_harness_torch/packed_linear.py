"""Linear layers in oneDNN's own weight layout on a CPU: two to four times as fast for the few rows of a decode step.

torch multiplies fp32 matrices with a library that is slow for few rows on some processors, and reorders bf16 weights
at every call. The reordered copy costs the weights' memory a second time.
"""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

_ROWS = 16  # the number of rows that the layout is chosen for


class PackedLinears:
    """The linear layers of ``model``, made to compute from packed copies of their weights.

    :meth:`refresh` must be called when the weights changed.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        kinds = (torch.nn.Linear, Conv1D)
        self._layers: list[Any] = [m for m in model.modules() if type(m) in kinds] if _usable(model) else []
        self.refresh()

    def refresh(self) -> None:
        """Pack the weights as they are now. All cores take part: whoever changed the weights waits for this."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_pack, sorted(self._layers, key=lambda layer: -layer.weight.numel())))

    def undo(self) -> None:
        """Leave the layers as they were."""
        for layer in self._layers:
            del layer.forward
        self._layers = []


@torch.no_grad()
def _pack(layer: Any) -> None:
    weight = layer.weight.detach()
    if isinstance(layer, Conv1D):  # keeps its weight the other way round
        weight = weight.t().contiguous()
    layer.forward = functools.partial(_linear, torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS), layer.bias)


def _linear(packed: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return result


def _usable(model: torch.nn.Module) -> bool:
    """Whether this torch has the operators and the model's weights suit them."""
    backend: Any = torch.backends.mkldnn
    if not backend.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    weight = next(model.parameters())
    if weight.device.type != "cpu":
        return False
    return weight.dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
