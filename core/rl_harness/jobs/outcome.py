"""What a job came to, for the command line and for programs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from rl_harness.reports import Summary

Status = Literal["done", "failed", "interrupted"]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """``evaluations`` maps phase name to its summary, in the order they ran; ``model`` is the trained folder."""

    run: Path
    status: Status
    resumed: bool
    evaluations: Mapping[str, Summary]
    steps: int = 0
    model: Path | None = None
    plot: Path | None = None

    @property
    def exit_code(self) -> int:
        return {"done": 0, "failed": 1, "interrupted": 130}[self.status]
