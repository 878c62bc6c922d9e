"""``run.log``: what the loggers below ``rl_harness`` say while a run is open."""

from __future__ import annotations

import logging
from pathlib import Path

from rl_harness.redaction import RedactingFormatter, Secrets

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _QuietHandler(logging.FileHandler):
    """A log that cannot be written (a full disk) must not print tracebacks over the user's terminal."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


class LogFile:
    """Appends to ``path`` until :meth:`close`; a resumed run goes on in the same file."""

    def __init__(self, path: Path) -> None:
        self._root = logging.getLogger("rl_harness")
        self._level = self._root.level
        if self._level == logging.NOTSET:
            self._root.setLevel(logging.INFO)
        self._handler = _QuietHandler(path, encoding="utf-8")
        self._handler.setFormatter(RedactingFormatter(_FORMAT, Secrets.of_environment()))
        self._root.addHandler(self._handler)
        self.logger = self._root.getChild("run")

    def close(self) -> None:
        self._root.removeHandler(self._handler)
        self._root.setLevel(self._level)
        try:
            self._handler.close()
        except OSError:
            pass  # what was buffered does not fit on the disk
