"""Losses by address: what a backend or a job does with a :class:`~rl_harness.contracts.LossSpec`."""

from __future__ import annotations

import importlib

from rl_harness.contracts.algorithm import Loss
from rl_harness.contracts.backend import BackendCapabilities, LossSpec
from rl_harness.errors import Unsupported


def load_loss(spec: LossSpec) -> Loss:
    """The loss a spec names. Raises ``Unsupported`` when it is not one or does not take the options."""
    module, _, attribute = spec.target.partition(":")
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise Unsupported(f"loss {spec.target} cannot be imported: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, Loss)):
        raise Unsupported(f"{spec.target} is not a Loss class")
    try:
        return kind(**spec.options)
    except TypeError as error:
        raise Unsupported(f"loss {spec.target} does not take the options {sorted(spec.options)}: {error}") from error


def check_loss(spec: LossSpec, capabilities: BackendCapabilities) -> Loss:
    """The loss a spec names. Raises ``Unsupported`` also when it needs an output that the backend lacks."""
    loss = load_loss(spec)
    if missing := sorted(loss.needs - capabilities.outputs):
        raise Unsupported(
            f"loss {spec.target} needs the output {', '.join(missing)}, "
            f"the backend has {', '.join(sorted(capabilities.outputs))}"
        )
    return loss
