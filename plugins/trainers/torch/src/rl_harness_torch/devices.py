"""Which device a worker computes on, and in what precision by default."""

from __future__ import annotations

from typing import Literal

from rl_harness.errors import Unavailable

from rl_harness_torch.models import DType


def pick(wanted: str, option: str) -> str:
    """The torch device for ``auto``, ``cpu``, ``cuda`` or ``cuda:N``; ``option`` is the key the user can change."""
    import torch

    if wanted == "cpu":
        return "cpu"
    available = torch.cuda.is_available()
    if wanted == "auto":
        return "cuda" if available else "cpu"
    if not available:
        raise Unavailable(
            f"{option} is {wanted!r} and torch sees no CUDA device",
            remedy=f"use {option}=cpu, or install a CUDA build of torch and check the driver with nvidia-smi",
        )
    return wanted


def precision(wanted: Literal["auto", "fp32", "bf16"], device: str) -> DType:
    """``auto`` is fp32 on a CPU and bf16 on a GPU."""
    if wanted == "auto":
        return "bf16" if device.startswith("cuda") else "fp32"
    return wanted
