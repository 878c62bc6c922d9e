"""AdamW on fp32 master weights, whatever precision the model computes in, with warm-up and gradient clipping."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from rl_harness.contracts import OptimizerSpec
from rl_harness.errors import BackendError
from torch import Tensor, nn

_MOMENTS = ("exp_avg", "exp_avg_sq")


class MasterOptimizer:
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101) over ``parameters`` by name.

    Where a parameter is narrower than fp32 its master copy is what is optimised, and each backward pass adds the
    parameter's gradient to the master's in fp32 at once, so that nothing is summed in the narrow type. Otherwise the
    parameter is its own master.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], spec: OptimizerSpec) -> None:
        self.spec = spec
        self.steps = 0
        self.parameters = dict(parameters)
        self.masters: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            if parameter.dtype in (torch.float32, torch.float64):
                self.masters[name] = parameter
                continue
            master = parameter.detach().float()
            self.masters[name] = master
            untyped: Any = parameter
            untyped.register_post_accumulate_grad_hook(_accumulate_into(master))
        self._adam = torch.optim.AdamW(
            list(self.masters.values()),
            lr=spec.learning_rate,
            betas=spec.betas,
            eps=spec.eps,
            weight_decay=spec.weight_decay,
            fused=True,
        )

    def learning_rate(self) -> float:
        """Of the next step: linear warm-up from ``learning_rate / warmup_steps``."""
        warmup = self.spec.warmup_steps
        return self.spec.learning_rate * (min(1.0, (self.steps + 1) / warmup) if warmup else 1.0)

    @contextmanager
    def gradients(self) -> Iterator[None]:
        """Gradients may be accumulated inside; whatever happens they are gone afterwards."""
        self._clear()
        try:
            yield
        finally:
            self._clear()

    def step(self) -> float:
        """Clip and apply what was accumulated; returns the gradient norm before clipping.

        Raises ``BackendError``, with nothing changed, when it is not finite.
        """
        masters = [master for master in self.masters.values() if master.grad is not None]
        if not masters:
            raise BackendError("no parameter received a gradient")
        norm = nn.utils.get_total_norm([master.grad for master in masters if master.grad is not None])
        if not bool(torch.isfinite(norm)):
            raise BackendError(
                f"the gradient norm is {float(norm)}; the step was not made",
                remedy="lower training.learning_rate, or look at the last episodes' rewards and lengths",
            )
        nn.utils.clip_grads_with_norm_(masters, self.spec.max_grad_norm, norm)
        for group in self._adam.param_groups:
            group["lr"] = self.learning_rate()
        self._adam.step()
        self.steps += 1
        self.publish()
        return float(norm)

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the masters into the narrow parameters the model computes with."""
        for name, parameter in self.parameters.items():
            if parameter is not self.masters[name]:
                parameter.copy_(self.masters[name])

    def state(self) -> dict[str, Tensor]:
        """The moments by ``exp_avg.NAME`` and ``exp_avg_sq.NAME``; empty before the first step.

        Where a parameter was left out of some steps, having no gradient, ``step.NAME`` counts those it was in.
        """
        tensors: dict[str, Tensor] = {}
        if not self.steps:
            return tensors
        for name, master in self.masters.items():
            state = self._adam.state.get(master, {})
            tensors |= {f"{kind}.{name}": state[kind] for kind in _MOMENTS if kind in state}
            steps = float(state.get("step", 0.0))
            if steps != self.steps:
                tensors[f"step.{name}"] = torch.tensor(steps)
        return tensors

    def expected(self, saved: Collection[str]) -> dict[str, Tensor]:
        """Stand-ins for the tensors a saved state has to have, ``saved`` being the names of those it has."""
        tensors: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            left_out = f"step.{name}" in saved
            if left_out:
                tensors[f"step.{name}"] = torch.tensor(0.0)
            if not left_out or any(f"{kind}.{name}" in saved for kind in _MOMENTS):
                tensors |= {f"{kind}.{name}": master for kind in _MOMENTS}
        return tensors

    def restore(self, steps: int, tensors: Mapping[str, Tensor]) -> None:
        """Continue from ``state()`` after ``steps`` steps. Raises ``KeyError`` if a moment is missing.

        Moments are copied: those read from a file may be windows into it.
        """
        self._adam.state.clear()
        for name, master in self.masters.items() if steps else ():
            own = float(tensors.get(f"step.{name}", steps))
            if own:
                moments = {kind: tensors[f"{kind}.{name}"].to(master, copy=True) for kind in _MOMENTS}
                self._adam.state[master] = {"step": torch.tensor(own), **moments}
        self.steps = steps

    def _clear(self) -> None:
        for tensor in (*self.masters.values(), *self.parameters.values()):
            tensor.grad = None


def _accumulate_into(master: Tensor) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        if parameter.grad is not None:
            if master.grad is None:
                master.grad = parameter.grad.to(master.dtype)
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

    return hook
