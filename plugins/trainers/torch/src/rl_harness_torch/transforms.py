"""What a model does to its logits after the output head (a factor, a soft cap), found by trying the numbers in its
config on the model itself, so that no table of models is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Transform(NamedTuple):
    """``cap · tanh(scale · z / cap)`` of every logit z, or ``scale · z`` where there is no cap."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        scaled = logits * self.scale
        return scaled if self.cap is None else self.cap * torch.tanh(scaled / self.cap)


IDENTITY = Transform()

#: Logits that are tried: far enough from 0 for any soft cap in use to show.
_REACH = 64.0
#: How many of them each transform is tried on.
_POINTS = 256


@torch.no_grad()
def recognise(model: PreTrainedModel, head: nn.Linear) -> Transform | None:
    """The transform between the output of ``head`` and the logits of ``model``; None for one that is neither a factor
    nor a soft cap made of numbers in the model's config, one that has parameters (it would not be trained), or if the
    model does not call its head."""
    given = _ramp(head)
    found = _response(model, head, given)
    if found is None or found.shape != given.shape:
        return None
    step = max(1, given.shape[-1] // _POINTS)
    x, y = (values[..., ::step].double() for values in (given, found))
    tolerance = 1e-5 if given.dtype in (torch.float32, torch.float64) else 1e-2
    numbers = sorted({number for number in _numbers(model.config.to_dict()) if 0 < number < math.inf})
    scales = sorted({1.0, *numbers, *(1 / number for number in numbers)})
    simple = [*(Transform(scale) for scale in scales), *(Transform(1.0, cap) for cap in numbers)]
    for candidates in ([IDENTITY], simple, [Transform(scale, cap) for scale in scales for cap in numbers]):
        # The best, not the first that is near: in bf16 two may be.
        gaps = [_gap(candidate(x), y) for candidate in candidates]
        best = min(range(len(gaps)), key=gaps.__getitem__)
        if gaps[best] < tolerance:
            return candidates[best]
    return None


def _ramp(head: nn.Linear) -> Tensor:
    """Logits [1, 2, vocabulary] with the same values at different places in the two rows."""
    size = head.weight.shape[0]
    ramp = torch.linspace(-_REACH, _REACH, size, device=head.weight.device)
    return torch.stack([ramp, ramp.roll(size // 3)])[None].to(head.weight.dtype)


def _response(model: PreTrainedModel, head: nn.Linear, given: Tensor) -> Tensor | None:
    """The model's logits when its head says ``given``; None if the head is not asked, or if they are made with anything
    that has a gradient even so."""
    asked = []

    def answer(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        asked.append(output.shape)
        return given

    untyped: Any = model
    handle = head.register_forward_hook(answer)
    try:
        tokens = torch.tensor([[1, 2]], device=head.weight.device)
        with torch.enable_grad():
            logits: Tensor = untyped(input_ids=tokens, use_cache=False).logits
    finally:
        handle.remove()
    return logits if asked == [given.shape] and not logits.requires_grad else None


def depends_on(model: PreTrainedModel, parameters: Sequence[nn.Parameter]) -> bool:
    """Whether the logits of ``model`` are made with any of ``parameters``."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return False
    untyped: Any = model
    with torch.enable_grad():
        tokens = torch.tensor([[1, 2]], device=trained[0].device)
        logits: Tensor = untyped(input_ids=tokens, use_cache=False).logits
        grads = torch.autograd.grad(logits.float().sum(), trained, allow_unused=True)
    return any(grad is not None for grad in grads)


def _gap(found: Tensor, expected: Tensor) -> float:
    gap = float((found - expected).abs().mean() / expected.abs().mean())
    return gap if math.isfinite(gap) else math.inf


def _numbers(values: Mapping[str, Any]) -> Iterator[float]:
    for value in values.values():
        if isinstance(value, Mapping):
            yield from _numbers(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield float(value)
