"""What the ``rl-harness`` script runs: the command line, with Ctrl-C told the same way while it is still being loaded
and when it is already on its way out."""

from __future__ import annotations

import os
import signal

_INTERRUPTED = 130


def main() -> int:
    try:
        from rl_harness.cli.main import main as run

        code = run()
        if code == _INTERRUPTED:
            _leave_at_once_if_asked_again()
        return code
    except KeyboardInterrupt:
        _leave_at_once_if_asked_again()
        return _INTERRUPTED


def _leave_at_once_if_asked_again() -> None:
    """Otherwise the next Ctrl-C meets the interpreter as it ends, which dies of it with a traceback."""
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(_INTERRUPTED))
