"""Chooses the view of a job. Those that are not chosen are not imported."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from rl_harness.reports.view import View


def make_view(json: bool = False, stream: TextIO | None = None, *, lines: bool = False) -> View:
    """The view for ``stream`` (standard output if None): JSON if asked for (with ``lines`` as things happen, one object
    a line), live in a terminal, else plain lines."""
    stream = stream if stream is not None else sys.stdout
    if json and lines:
        from rl_harness.reports.json_lines_view import JsonLinesView

        return JsonLinesView(stream)
    if json:
        from rl_harness.reports.json_view import JsonView

        return JsonView(stream)
    if stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb"):
        from rl_harness.reports.rich_view import RichView

        return RichView(stream)
    from rl_harness.reports.plain_view import PlainView

    return PlainView(stream)
